"""The manifest of an MPIJob: its fields, its names, and what its launcher starts."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cpuft.errors import CpuftError
from cpuft.schedulers.base import JobLaunch, JobSweep
from cpuft.schedulers.kubernetes import Kubernetes, KubernetesOptions, escape_variables
from tests.conftest import Golden
from tests.launch.operator import expand
from tests.schedulers.programs import AWKWARD_MORE, SAY, add_program, make_launch, run_script, told_of, words_said
from tests.test_plans import AWKWARD

SITE = KubernetesOptions(
    name="mrpc-np8",
    image="registry.example/cpuft:0.1.0",
    namespace="nlp",
    cores=16,
    memory=64,
    claim="runs",
    queue="cpu",
    seconds=3600,
)
WORK = JobLaunch(("--np", "8", "--ppn", "2", "--task", "mrpc"), np=8, ppn=2)
FIRST = ("--grace-period", "110")

QUANTITY = re.compile("[1-9][0-9]*(Mi|Gi)?")
SHARE = {"cpu": QUANTITY, "memory": QUANTITY}
LABEL = re.compile("[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
CONTAINER = {
    "name": LABEL,
    "image": str,
    "command": [str],
    "workingDir?": str,
    "env?": [
        {
            "name": re.compile("[A-Z_]+"),
            "value?": str,
            "valueFrom?": {"fieldRef": {"fieldPath": re.compile(r"metadata\.labels\['[a-z./-]+'\]")}},
        }
    ],
    "resources": {"requests": SHARE, "limits": SHARE},
    "readinessProbe?": {"tcpSocket": {"port": range(1, 1 << 16)}, "periodSeconds": range(1, 10**6)},
    "volumeMounts": [{"name": LABEL, "mountPath": str}],
}
VOLUME = {
    "name": LABEL,
    "emptyDir?": {"medium?": re.compile("Memory"), "sizeLimit?": QUANTITY},
    "persistentVolumeClaim?": {"claimName": LABEL},
}
REPLICAS = {
    "replicas": range(1, 10**6),
    "restartPolicy": re.compile("Never|OnFailure"),
    "template": {"spec": {"containers": [CONTAINER], "volumes": [VOLUME], "terminationGracePeriodSeconds?": int}},
}
MPIJOB = {
    "apiVersion": re.compile(r"kubeflow\.org/v2beta1"),
    "kind": re.compile("MPIJob"),
    "metadata": {
        "name": LABEL,
        "namespace?": LABEL,
        "labels": {"app.kubernetes.io/managed-by": LABEL, "kueue.x-k8s.io/queue-name?": LABEL},
    },
    "spec": {
        "mpiImplementation": re.compile("OpenMPI|Intel|MPICH"),
        "slotsPerWorker": range(1, 10**6),
        "launcherCreationPolicy": re.compile("AtStartup|WaitForWorkersReady"),
        "sshAuthMountPath": re.compile("/etc/mpi-ssh"),
        "runPolicy": {
            "cleanPodPolicy": re.compile("None|Running|All"),
            "backoffLimit": int,
            "activeDeadlineSeconds?": int,
        },
        "mpiReplicaSpecs": {"Launcher": REPLICAS | {"replicas": range(1, 2)}, "Worker": REPLICAS},
    },
}
"""Of the operator's definition (v2beta1), its controller's rules and pods what a manifest of ours may hold; `?`: may be
missing."""


def find_faults(value: Any, schema: Any, path: str = "") -> Iterator[str]:
    """Where a manifest differs from what there may be."""
    if isinstance(schema, dict) and isinstance(value, dict):
        known = {name.rstrip("?"): inner for name, inner in schema.items()}
        yield from (f"{path}.{name}: unknown" for name in value.keys() - known.keys())
        yield from (f"{path}.{name}: missing" for name in schema if "?" not in name and name not in value)
        for name in value.keys() & known.keys():
            yield from find_faults(value[name], known[name], f"{path}.{name}")
    elif isinstance(schema, list) and isinstance(value, list):
        for number, one in enumerate(value):
            yield from find_faults(one, schema[0], f"{path}[{number}]")
    elif isinstance(schema, range):
        yield from [] if type(value) is int and value in schema else [f"{path}: {value!r}"]
    elif isinstance(schema, re.Pattern):
        yield from [] if isinstance(value, str) and schema.fullmatch(value) else [f"{path}: {value!r}"]
    elif type(value) is not schema:
        yield f"{path}: {value!r}"


def test_the_manifest(golden: Golden) -> None:
    golden("submit-mpijob.yaml", Kubernetes().render(SITE, WORK, "cpuft"))


CONFIGS = [
    SITE,
    KubernetesOptions(name="a", image="i"),
    replace(SITE, claim="", queue="", seconds=0, namespace=""),
    replace(SITE, nodes=8),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_it_holds_what_the_operator_knows(config: KubernetesOptions) -> None:
    assert list(find_faults(yaml.safe_load(Kubernetes().render(config, WORK, "cpuft")), MPIJOB)) == []


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda job: job["spec"].update(slotPerWorker=2), ".spec.slotPerWorker: unknown"),
        (lambda job: job["spec"].update(mpiImplementation="IntelMPI"), ".spec.mpiImplementation: 'IntelMPI'"),
        (lambda job: job["spec"].update(slotsPerWorker="2"), ".spec.slotsPerWorker: '2'"),
        (lambda job: job["spec"]["runPolicy"].pop("backoffLimit"), ".spec.runPolicy.backoffLimit: missing"),
        (
            lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"].update(restartPolicy="Always"),
            ".spec.mpiReplicaSpecs.Worker.restartPolicy: 'Always'",
        ),
        (
            lambda job: job["spec"]["mpiReplicaSpecs"]["Launcher"].update(replicas=2),
            ".spec.mpiReplicaSpecs.Launcher.replicas: 2",
        ),
        (
            lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"].update(replicas=0),
            ".spec.mpiReplicaSpecs.Worker.replicas: 0",
        ),
        (lambda job: job["metadata"].update(name="a.b"), ".metadata.name: 'a.b'"),
    ],
)
def test_what_it_does_not_know_is_found(change: Callable[[Any], Any], fault: str) -> None:
    job = copy.deepcopy(yaml.safe_load(Kubernetes().render(SITE, WORK, "cpuft")))
    change(job)
    assert list(find_faults(job, MPIJOB)) == [fault]


def check_pods(job: Any) -> None:
    """Against the definitions that Kubernetes itself has of pods, unknown fields refused."""
    for replicas in job["spec"]["mpiReplicaSpecs"].values():
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": replicas["template"]}
        kubernetes_validate.validate(pods, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("config", CONFIGS)
def test_kubernetes_knows_its_pods(config: KubernetesOptions) -> None:
    job = yaml.safe_load(Kubernetes().render(config, WORK, "cpuft"))
    check_pods(job)
    job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["imagePullpolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="'imagePullpolicy' was unexpected"):
        check_pods(job)


def test_pods_get_cores_of_their_own() -> None:
    replicas = yaml.safe_load(Kubernetes().render(SITE, WORK, "cpuft"))["spec"]["mpiReplicaSpecs"]
    shares = [replicas[role]["template"]["spec"]["containers"][0]["resources"] for role in ("Launcher", "Worker")]
    assert [share["requests"] for share in shares] == [share["limits"] for share in shares]
    assert shares[1]["limits"] == {"cpu": "16", "memory": "64Gi"}
    assert (replicas["Launcher"]["replicas"], replicas["Worker"]["replicas"]) == (1, 4)


@pytest.mark.parametrize("text", [*AWKWARD, *AWKWARD_MORE, "$$$", "$$$(HOME)", "$", "a$", "$$a$(B)$"])
def test_kubernetes_expands_nothing(text: str) -> None:
    assert expand(escape_variables(text), {"HOME": "/root", "B": "c"}) == text


@pytest.mark.parametrize("value", [*AWKWARD, *AWKWARD_MORE])
def test_every_word_arrives_as_it_is(value: str) -> None:
    add_program("cpuft", SAY)
    job = yaml.safe_load(Kubernetes().render(replace(SITE, name="x"), make_launch(value), "cpuft"))
    *shell, text = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    done = run_script(shell[0], expand(text, {"HOME": "/root"}))
    assert (shell, done.returncode, done.stderr) == (["sh", "-c"], 0, "")
    assert words_said() == told_of(value, *FIRST)


def test_a_launcher_that_is_started_again_goes_on() -> None:
    add_program("cpuft", SAY)
    Path("runs/mrpc-np8").mkdir(parents=True)
    Path("runs/mrpc-np8/record.jsonl").write_text("{}")
    job = yaml.safe_load(Kubernetes().render(SITE, WORK, "cpuft"))
    text = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"][-1]
    assert run_script("sh", expand(text, {})).returncode == 0
    assert words_said() == ["launch", *FIRST, *WORK.options, "--resume", "runs/mrpc-np8", "--run-dir", ""]


@pytest.mark.parametrize("run_dir", ["", "runs/my run/"])
def test_a_job_resumes_only_the_run_that_it_has_begun(run_dir: str) -> None:
    """Each start of a new job with the folder of an earlier job starts a run there, which its launch refuses."""
    add_program("cpuft", SAY)
    launch, run = replace(WORK, run_dir=run_dir), run_dir.rstrip("/") or "runs/mrpc-np8"
    job = yaml.safe_load(Kubernetes().render(SITE, launch, "cpuft"))
    container = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    label = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    assert {"name": "CPUFT_JOB_UID", "valueFrom": label} in container["env"]

    def start(uid: str) -> list[str]:
        done = run_script("sh", expand(container["command"][-1], {}), CPUFT_JOB_UID=uid)
        assert (done.returncode, done.stderr) == (0, "")
        return words_said()[len(FIRST) + len(WORK.options) + 1 :]

    begins, resumes = ["--run-dir", run], ["--resume", run, "--run-dir", ""]
    assert start("a") == begins
    assert start("a") == begins
    Path(run).mkdir()
    Path(run, "record.jsonl").write_text("{}")
    assert start("a") == resumes
    assert start("b") == start("b") == begins
    assert start("a") == resumes
    Path(run, "record.jsonl").unlink()
    Path(run).rmdir()
    assert start("b") == begins
    for left in "logs", "state.json":
        Path(run, left).mkdir(parents=True)
        assert start("b") == begins  # after it has moved aside what came to nothing
        assert not Path(run).exists()
    Path(run, "checkpoints").mkdir(parents=True)
    assert start("b") == resumes


def test_a_job_continues_only_the_sweep_that_it_has_begun() -> None:
    add_program("cpuft", SAY)
    text = Kubernetes().render(replace(SITE, nodes=2), JobSweep(("--seed", "1..3"), ppn=1), "cpuft")
    containers = yaml.safe_load(text)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    begins, run = ["sweep", "--seed", "1..3", "--run-dir", "runs/mrpc-np8"], Path("runs/mrpc-np8")

    def start(uid: str) -> list[str]:
        assert run_script("sh", expand(containers[0]["command"][-1], {}), CPUFT_JOB_UID=uid).returncode == 0
        return words_said()

    assert start("a") == begins
    run.mkdir()
    (run / "sweep.jsonl").write_text("{}")
    assert start("a") == ["sweep", "--resume", "runs/mrpc-np8"]
    assert start("b") == begins


def run_launcher(program: str, memo: Path) -> tuple[int, str]:
    """The launcher's container, where `program` is cpuft and its pod's memory is a folder: exit code and errors."""
    add_program("cpuft", program)
    job = yaml.safe_load(Kubernetes().render(SITE, WORK, "cpuft"))
    container = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert {"name": "CPUFT_MEMO", "value": "/memo"} in container["env"]
    assert {"name": "memo", "mountPath": "/memo"} in container["volumeMounts"]
    memo.mkdir(exist_ok=True)
    done = run_script("sh", expand(container["command"][-1], {}), CPUFT_MEMO=str(memo))
    return done.returncode, done.stderr


def test_a_refused_launch_is_started_once_and_says_why_each_time(tmp_path: Path) -> None:
    program = "echo started >>starts\necho 'cpuft: error: no such task' >&2\nexit 2\n"
    code, said = run_launcher(program, tmp_path / "memo")
    assert (code, said) == (2, "cpuft: error: no such task\n")
    for _ in range(3):
        code, said = run_launcher(program, tmp_path / "memo")
        assert code == 2
        assert said.startswith("cpuft: error: no such task\ncpuft: this launch was refused and is not started again")
    assert Path("starts").read_text() == "started\n"


@pytest.mark.parametrize("code", [0, 1, 75, 137])
def test_a_launch_that_failed_otherwise_is_started_again(code: int, tmp_path: Path) -> None:
    for starts in (1, 2):
        assert run_launcher(f"echo started >>starts\nexit {code}\n", tmp_path / "memo") == (code, "")
        assert Path("starts").read_text() == "started\n" * starts


def test_a_launcher_that_is_told_to_go_waits_for_its_launch(tmp_path: Path) -> None:
    program = "trap 'echo saved >&2; exit 75' TERM\nkill -TERM $PPID\nfor i in $(seq 100); do sleep 0.1; done\n"
    assert run_launcher(program, tmp_path / "memo") == (75, "saved\n")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"image": ""}, "no container image is given: add --image NAME, an image that has cpuft and sshd"),
        ({"name": "a" * 55}, f"--name '{'a' * 55}': use at most 54 small letters, digits and dashes, a letter first"),
        ({"name": "a_b"}, "--name 'a_b': use at most 54 small letters, digits and dashes, a letter first"),
        ({"name": "MRPC"}, "--name 'MRPC': use at most 54 small letters, digits and dashes, a letter first"),
        ({"name": "1a"}, "--name '1a': use at most 54 small letters, digits and dashes, a letter first"),
        ({"name": "a\nb"}, "--name 'a\\nb': use at most 54 small letters, digits and dashes, a letter first"),
        ({"nodes": 9}, "--nodes 9 contradicts --np 8 and --ppn 2: leave --nodes out"),
    ],
)
def test_what_the_operator_would_refuse(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CpuftError) as refusal:
        Kubernetes().render(replace(SITE, **change), WORK, "cpuft")
    assert str(refusal.value) == said


def test_the_longest_name() -> None:
    assert (
        yaml.safe_load(Kubernetes().render(replace(SITE, name="a" * 54), WORK, "cpuft"))["metadata"]["name"] == "a" * 54
    )
