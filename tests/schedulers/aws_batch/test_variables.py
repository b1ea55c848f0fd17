"""What Batch tells a node, read; and keys made of a secret."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cpuft.errors import CpuftError
from cpuft.schedulers.aws_batch.meeting import parse_meet
from cpuft.schedulers.aws_batch.variables import Keys, Node, choose_address, parse_node

SECRET = "0123456789abcdef" * 2
CHILD = {
    "AWS_BATCH_JOB_ID": "7f#2",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
    "CPUFT_BATCH_TOKEN": SECRET,
}
MAIN = CHILD | {"AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""}
NODE = Node("7f", 2, 0, 3, "10.0.0.7", 600, SECRET)


def test_a_nodes_place_is_read() -> None:
    assert parse_node(CHILD) == NODE
    assert parse_node(MAIN | {"CPUFT_MEET_SECONDS": "9"}) == replace(NODE, index=0, address="", seconds=9)
    alone = {"AWS_BATCH_JOB_NUM_NODES": "1", "CPUFT_BATCH_TOKEN": ""}
    assert parse_node(MAIN | alone) == replace(NODE, index=0, count=1, address="", token="")


@pytest.mark.parametrize(
    "environ, said",
    [
        ({}, "this is no node of a multi-node job of AWS Batch (AWS_BATCH_JOB_NODE_INDEX='', "),
        (CHILD | {"AWS_BATCH_JOB_ID": ""}, "this is no node of a multi-node job of AWS Batch"),
        (CHILD | {"AWS_BATCH_JOB_NODE_INDEX": "-1"}, "this is no node of a multi-node job of AWS Batch"),
        (CHILD | {"AWS_BATCH_JOB_NUM_NODES": "9" * 5000}, "this is no node of a multi-node job of AWS Batch"),
        (
            CHILD | {"AWS_BATCH_JOB_NODE_INDEX": "3"},
            "Batch's variables contradict each other (AWS_BATCH_JOB_NODE_INDEX",
        ),
        (CHILD | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "3"}, "Batch's variables contradict each other"),
        (MAIN | {"AWS_BATCH_JOB_NODE_INDEX": "1"}, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS='' is no address"),
        (
            CHILD | {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "0.0.0.0"},
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS='0.0.0.0' is no address of a main node",
        ),
        (CHILD | {"CPUFT_BATCH_TOKEN": ""}, "CPUFT_BATCH_TOKEN is not set: give cpuft submit batch --secret one of 32"),
        (CHILD | {"CPUFT_BATCH_TOKEN": "a"}, "CPUFT_BATCH_TOKEN is too short a secret: give cpuft submit batch"),
        (CHILD | {"CPUFT_MEET_SECONDS": "0"}, "CPUFT_MEET_SECONDS='0': give whole seconds"),
    ],
)
def test_what_is_no_place(environ: dict[str, str], said: str) -> None:
    with pytest.raises(CpuftError) as refusal:
        parse_node(environ)
    assert str(refusal.value).startswith(said)
    assert SECRET not in str(refusal.value)


def test_nobody_sees_the_secret_by_chance() -> None:
    assert SECRET not in repr(NODE)


def test_keys_are_those_of_the_job_and_its_secret() -> None:
    """Whichever node makes them; and no client is taken for a server."""
    main, child, job, secret = (
        Keys(node) for node in (parse_node(MAIN), NODE, replace(NODE, job="8"), replace(NODE, token="b" * 32))
    )
    assert (main.server, main.client, main.mark) == (child.server, child.client, child.mark)
    assert len({one.server_line for one in (main, job, secret)}) == 3
    assert main.server != main.client


@pytest.mark.parametrize(
    "interfaces, routed, address",
    [
        ({"lo": "127.0.0.1", "eth0": "10.0.0.7", "ecs-eth0": "169.254.172.2"}, "", "10.0.0.7"),
        ({"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "10.1.0.7"}, "10.1.0.7", "10.1.0.7"),
    ],
)
def test_the_main_node_finds_its_address(interfaces: dict[str, str], routed: str, address: str) -> None:
    assert choose_address(interfaces, routed) == address


@pytest.mark.parametrize("interfaces", [{"lo": "127.0.0.1"}, {"eth0": "10.0.0.7", "eth1": "10.1.0.7"}])
def test_or_says_which_there_are(interfaces: dict[str, str]) -> None:
    (name, address), *_ = interfaces.items()
    said = f"the main node cannot tell its address among {name} {address}"
    with pytest.raises(CpuftError, match=re.escape(said)):
        choose_address(interfaces, "127.0.0.1")


def test_what_a_node_says_when_it_comes() -> None:
    assert parse_meet("meet 2 4711 yes") == (2, 4711, True)


@pytest.mark.parametrize("line", ["", "meet 2 4711", "meet -1 1 no", "meet 1 65536 no", "meet 1 1 no\n", "meet ٣ 1 no"])
def test_what_else_is_refused(line: str) -> None:
    with pytest.raises(CpuftError, match="nothing that a node of this job says"):
        parse_meet(line)
