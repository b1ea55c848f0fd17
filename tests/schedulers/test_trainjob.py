"""The manifests of a TrainJob: what Kubernetes and the Trainer know of them, and kubectl."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cpuft.errors import CpuftError
from cpuft.schedulers.base import JobSweep
from cpuft.schedulers.kubernetes import Kubernetes, KubernetesOptions, TrainJob
from tests.conftest import Golden
from tests.launch.operator import expand
from tests.schedulers.programs import SAY, add_program, make_launch, path_with, run_script, told_of, words_said
from tests.schedulers.test_kubernetes import CONFIGS, FIRST, SITE, WORK

JOBS = ("node", "launcher")


def render(options: KubernetesOptions = SITE) -> tuple[Any, Any]:
    """The runtime and the job."""
    runtime, job = yaml.safe_load_all(TrainJob().render(options, WORK, "cpuft"))
    return runtime, job


def jobs_of(text: str) -> list[Any]:
    """The workers' job and the launcher's."""
    return list(next(yaml.safe_load_all(text))["spec"]["template"]["spec"]["replicatedJobs"])


def command_of(job: Any) -> list[str]:
    return list(job["template"]["spec"]["template"]["spec"]["containers"][0]["command"])


def test_the_manifests(golden: Golden) -> None:
    golden("submit-trainjob.yaml", TrainJob().render(SITE, WORK, "cpuft"))


def test_its_pods_are_those_of_an_mpijob() -> None:
    replicas = yaml.safe_load(Kubernetes().render(SITE, WORK, "cpuft"))["spec"]["mpiReplicaSpecs"]
    jobs = jobs_of(TrainJob().render(SITE, WORK, "cpuft"))
    for job, role in zip(jobs, ("Worker", "Launcher")):
        pod, theirs = job["template"]["spec"]["template"]["spec"], replicas[role]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "node"  # the policy gives the key and the hostfile to no other one
        container["name"] = theirs["containers"][0]["name"]
        container["env"] = [one for one in container.get("env", []) if one["name"] != "K_MPI_JOB_ROLE"] or None
        theirs["containers"][0].setdefault("env")
        assert pod == theirs | {"restartPolicy": "OnFailure"}


@pytest.mark.parametrize("options", CONFIGS)
def test_kubernetes_knows_its_jobs(options: KubernetesOptions) -> None:
    runtime, job = render(options)
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert [one["name"] for one in jobs] == list(JOBS)
    for one in jobs:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": one["template"]["spec"]}
        kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)
    assert job["spec"]["trainer"]["numNodes"] == (options.nodes or 4)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == options.name


MODELS = """
import sys, yaml
from kubeflow_trainer_api import models
for one in yaml.safe_load_all(sys.stdin):
    known = getattr(models, "TrainerV1alpha1" + one["kind"]).from_dict(one).to_dict()
    assert known == one, one["kind"]
"""


@pytest.mark.proof
def test_the_trainers_own_package_takes_them(tmp_path: Path) -> None:
    """Its models are made of the definitions in the API server, and drop what they do not know."""
    subprocess.run([sys.executable, "-m", "venv", "own"], check=True, cwd=tmp_path)
    pip = ("own/bin/python", "-m", "pip", "install", "--quiet", "kubeflow-trainer-api==2.3.0", "PyYAML")
    subprocess.run(pip, check=True, cwd=tmp_path)

    def is_known(text: str) -> bool:
        done = subprocess.run(("own/bin/python", "-c", MODELS), cwd=tmp_path, input=text, text=True, check=False)
        return not done.returncode

    for options in CONFIGS:
        text = TrainJob().render(options, WORK, "cpuft")
        assert is_known(text)
        assert not is_known(text.replace("mpiImplementation:", "mpiImplementatio:"))
        assert not is_known(text.replace("dependsOn:", "dependOn:"))
        assert not is_known(text.replace("numNodes: ", "numNodes: a"))


@pytest.mark.parametrize("value", ["", "a b", "'", "$(HOME)", "$$"])
def test_every_word_arrives_as_it_is(value: str) -> None:
    add_program("cpuft", SAY)
    text = TrainJob().render(replace(SITE, name="x"), make_launch(value), "cpuft")
    jobs = jobs_of(text)
    *shell, script = command_of(jobs[1])
    assert run_script(shell[0], expand(script, {"HOME": "/root"})).returncode == 0
    assert words_said() == told_of(value, *FIRST)


def test_it_takes_a_sweep() -> None:
    text = TrainJob().render(replace(SITE, nodes=2), JobSweep(("--seed", "1..3"), ppn=1), "cpuft")
    assert 'exec "$cpuft" sweep' in command_of(jobs_of(text)[1])[-1]


def test_names_that_are_too_long_for_its_pods_are_refused() -> None:
    longest = "a" * (63 - len("-launcher-0-3-abcde"))
    assert render(replace(SITE, name=longest))[1]["metadata"]["name"] == longest
    with pytest.raises(CpuftError, match="use at most 44 small letters"):
        render(replace(SITE, name=longest + "a"))


@pytest.fixture(autouse=True)
def own_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_with())


CREATE = """printf '%s ' "$@" >>said
case "$*" in
    create*) kind=$(sed -n 's/^kind: //p'); echo "$kind" >>said
        case " FAILS " in *" $kind "*) echo 'no such kind' >&2; exit 1 ;; esac
        echo "$kind.trainer.kubeflow.org/x" ;;
    *conditions*) echo "CONDITIONS" ;;
    *managed-by*) echo cpuft ;;
    *exitCode*) echo 75 ;;
    *phase*) echo Running ;;
    logs*) echo a line ;;
esac
"""


@pytest.mark.parametrize(
    "fails, kinds, is_removed",
    [
        ("", ["TrainingRuntime", "TrainJob"], False),
        ("TrainJob", ["TrainingRuntime", "TrainJob"], True),
        ("TrainingRuntime", ["TrainingRuntime"], False),
    ],
)
def test_both_objects_are_created_or_none(fails: str, kinds: list[str], is_removed: bool) -> None:
    add_program("kubectl", CREATE.replace("FAILS", fails))
    text = TrainJob().render(SITE, WORK, "cpuft")
    if fails:
        with pytest.raises(CpuftError, match="no such kind"):
            TrainJob("nlp").submit(text)
    else:
        assert TrainJob("nlp").submit(text) == "nlp/x"
    said = Path("said").read_text()
    assert [kind for kind in said.split() if kind.startswith("Train") and "." not in kind] == kinds
    assert ("delete TrainingRuntime.trainer.kubeflow.org/x --namespace=nlp" in said) == is_removed


@pytest.mark.parametrize(
    "conditions, state, code",
    [("", "Running", None), ("Suspended", "Suspended", None), ("Complete", "Complete", 0), ("Failed", "Failed", 75)],
)
def test_its_state(conditions: str, state: str, code: int | None) -> None:
    add_program("kubectl", CREATE.replace("CONDITIONS", conditions))
    status = TrainJob("nlp").status("x")
    assert (status.state, status.exit_code, status.log) == (state, code, "a line\n")
    assert "jobset.sigs.k8s.io/jobset-name=x,jobset.sigs.k8s.io/replicatedjob-name=launcher" in Path("said").read_text()


def test_it_is_deleted_with_its_runtime() -> None:
    add_program("kubectl", CREATE)
    assert TrainJob().is_ours("x")
    TrainJob().cancel("x")
    assert Path("said").read_text().endswith("delete trainjob,trainingruntime x ")


def test_a_runtime_of_somebody_else_is_not_deleted_with_the_job() -> None:
    add_program("kubectl", 'case "$*" in "get trainjob "*) echo cpuft ;; esac')
    assert not TrainJob().is_ours("x")
