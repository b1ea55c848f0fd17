"""Calls of AWS Batch: what botocore says of them, what the main node starts, and a region that takes them."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cpuft.cli import main
from cpuft.errors import CpuftError
from cpuft.schedulers.aws_batch import AwsBatch, BatchOptions
from cpuft.schedulers.base import NODE_COMMAND, JobLaunch
from tests.conftest import Golden
from tests.schedulers.programs import AWKWARD_MORE, SAY, add_program, make_launch, run_script, told_of, words_said
from tests.test_plans import AWKWARD

SECRET = "arn:aws:secretsmanager:us-east-1:111122223333:secret:cpuft-AbCdEf"
ROLE = "arn:aws:iam::111122223333:role/ecsTaskExecutionRole"
SITE = BatchOptions(
    name="mrpc-np8",
    image="registry.example/cpuft:0.1.0",
    queue="cpu",
    cores=16,
    memory=64,
    secret=SECRET,
    role=ROLE,
)
FULL = replace(SITE, efs="fs-0123456789abcdef0", seconds=3600, region="us-east-1")
ALONE = replace(SITE, secret="", role="")
WORK = JobLaunch(("--np", "8", "--ppn", "2", "--task", "mrpc"), np=8, ppn=2)


def test_the_calls(golden: Golden) -> None:
    golden("submit-batch.yaml", AwsBatch().render(FULL, WORK, "cpuft"))


def find_faults(calls: dict[str, Any]) -> str:
    """What botocore would refuse before it sends anything."""
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.Session().get_service_model("batch")
    names = {"register_job_definition": "RegisterJobDefinition", "submit_job": "SubmitJob"}
    shapes = {method: model.operation_model(name).input_shape for method, name in names.items()}
    assert calls.keys() == shapes.keys()
    return "".join(
        ParamValidator().validate(calls[method], shape).generate_report() for method, shape in shapes.items()
    )


@pytest.mark.parametrize(
    "config, launch", [(SITE, WORK), (FULL, WORK), (replace(SITE, secret="", role=""), JobLaunch(()))]
)
def test_botocore_takes_them(config: BatchOptions, launch: JobLaunch) -> None:
    """One node alone needs no secret."""
    assert find_faults(yaml.safe_load(AwsBatch().render(config, launch, "cpuft"))) == ""


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda calls: calls["submit_job"].pop("jobQueue"), 'Missing required parameter in input: "jobQueue"'),
        (lambda calls: calls["submit_job"].update(jobqueue="a"), 'Unknown parameter in input: "jobqueue"'),
        (
            lambda calls: calls["register_job_definition"]["nodeProperties"].update(numNodes="4"),
            "Invalid type for parameter nodeProperties.numNodes, value: 4",
        ),
    ],
)
def test_it_would_not_take_others(change: Callable[[Any], Any], said: str) -> None:
    calls = copy.deepcopy(yaml.safe_load(AwsBatch().render(SITE, WORK, "cpuft")))
    change(calls)
    assert said in find_faults(calls)


def script_of(config: BatchOptions, launch: JobLaunch) -> str:
    """What the main node runs in its folder."""
    nodes = yaml.safe_load(AwsBatch().render(config, launch, "cpuft"))["register_job_definition"]["nodeProperties"]
    *words, text = nodes["nodeRangeProperties"][0]["container"]["command"]
    assert words == [*NODE_COMMAND, "sh", "-c"]
    return str(text)


@pytest.mark.parametrize("value", [*AWKWARD, *AWKWARD_MORE])
def test_every_word_arrives_as_it_is(value: str) -> None:
    add_program("cpuft", SAY)
    done = run_script("sh", script_of(replace(SITE, name="x"), make_launch(value)), AWS_BATCH_JOB_ATTEMPT="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert words_said() == told_of(value, "--grace-period", "20")


@pytest.mark.parametrize("attempt, told", [("1", ["--run-dir", "runs/mrpc-np8"]), ("2", ["--resume", "runs/mrpc-np8"])])
def test_another_attempt_goes_on(attempt: str, told: list[str]) -> None:
    add_program("cpuft", SAY)
    Path("runs/mrpc-np8").mkdir(parents=True)
    Path("runs/mrpc-np8/record.jsonl").write_text("{}")
    assert run_script("sh", script_of(SITE, WORK), AWS_BATCH_JOB_ATTEMPT=attempt).returncode == 0
    assert words_said()[9:11] == told


@pytest.mark.parametrize(
    "config, launch, said",
    [
        (
            replace(SITE, image=""),
            WORK,
            "no container image is given: add --image NAME, an image",
        ),
        (replace(SITE, queue=""), WORK, "no job queue is given: add --queue NAME"),
        (replace(SITE, secret=""), WORK, "several nodes need a secret: add --secret ARN"),
        (replace(SITE, role=""), WORK, "several nodes need a secret: add --secret ARN"),
        (
            SITE,
            make_launch("Ref::a"),
            "the launch contains Ref::, which AWS Batch would replace",
        ),
        (replace(SITE, nodes=9), WORK, "--nodes 9 contradicts --np 8 and --ppn 2: leave --nodes out"),
    ],
)
def test_what_batch_would_refuse(config: BatchOptions, launch: JobLaunch, said: str) -> None:
    with pytest.raises(CpuftError) as refusal:
        AwsBatch().render(config, launch, "cpuft")
    assert str(refusal.value).startswith(said)


@pytest.fixture
def queue() -> Iterator[str]:
    """A job queue of a region in this process."""
    from moto import mock_aws

    settings = {
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in (settings | {"MOTO_EC2_LOAD_DEFAULT_AMIS": "false"}).items():
            patch.setenv(name, value)
        with mock_aws(config={"batch": {"use_docker": False}}):
            yield make_queue()


def make_queue() -> str:
    import boto3

    batch, iam, ec2 = (boto3.client(name) for name in ("batch", "iam", "ec2"))
    role = iam.create_role(RoleName="batch", AssumeRolePolicyDocument=json.dumps({}))["Role"]["Arn"]
    profile = iam.create_instance_profile(InstanceProfileName="batch")["InstanceProfile"]["Arn"]
    resources = {
        "type": "EC2",
        "minvCpus": 0,
        "maxvCpus": 64,
        "instanceTypes": ["m7i.4xlarge"],
        "subnets": [ec2.describe_subnets()["Subnets"][0]["SubnetId"]],
        "securityGroupIds": [ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]],
        "instanceRole": profile,
    }
    made = batch.create_compute_environment(
        computeEnvironmentName="cpu", type="MANAGED", state="ENABLED", serviceRole=role, computeResources=resources
    )
    order = [{"order": 1, "computeEnvironment": made["computeEnvironmentArn"]}]
    batch.create_job_queue(jobQueueName="cpu", state="ENABLED", priority=1, computeEnvironmentOrder=order)
    return "cpu"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code, and both streams."""
    with pytest.raises(SystemExit) as ended:
        main(["submit", *words])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out + said.err


def test_a_region_takes_them(queue: str, capsys: pytest.CaptureFixture[str]) -> None:
    import boto3

    launch = ("--name", "x", "--", "launch", "--np", "2")
    known = ("--secret", SECRET, "--role", ROLE)
    code, said = run(capsys, "batch", "--image", "i", "--queue", queue, *known, *launch)
    assert (code, said[:16]) == (0, "batch:us-east-1/")
    job = said.strip()
    (made,) = boto3.client("batch").describe_jobs(jobs=[job.rpartition("/")[2]])["jobs"]
    assert (made["jobName"], made["nodeProperties"]["numNodes"]) == ("x", 2)
    code, said = run(capsys, "status", job)
    assert (code, said.split()[0]) == (0, job)
    assert run(capsys, "cancel", job) == (0, "")
    theirs = boto3.client("batch").submit_job(jobName="y", jobQueue=queue, jobDefinition="x")["jobId"]
    assert run(capsys, "cancel", f"batch:us-east-1/{theirs}")[0] == 2
    code, said = run(capsys, "batch", "--image", "i", "--queue", "other", *known, *launch)
    assert (code, said.count("\n")) == (2, 1)
    assert re.match(
        r"cpuft: error: AWS refused submit_job \(An error .* Job queue other does not exist\): correct", said
    )
    gone = "cpuft: error: AWS Batch has no job 0 any more: CloudWatch may still have its log\n"
    assert run(capsys, "cancel", "batch:us-east-1/0") == (2, gone)


def test_an_empty_page_in_the_middle_does_not_end_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """CloudWatch ends a log by the token of the page before, and may return empty pages until then."""
    pages = {None: (["one"], "f/1"), "f/1": ([], "f/2"), "f/2": (["two", "three"], "f/3"), "f/3": ([], "f/3")}

    def call(self: AwsBatch, service: str, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if method == "describe_jobs":
            main_node = {"jobId": "7#0", "container": {"logStreamName": "stream"}}
            return {"jobs": [{"jobId": "7", "status": "RUNNING"}, main_node]}
        messages, token = pages[parameters.get("nextToken")]
        return {"events": [{"message": message} for message in messages], "nextForwardToken": token}

    monkeypatch.setattr(AwsBatch, "_call", call)
    assert AwsBatch().status("7").log == "one\ntwo\nthree\n"
