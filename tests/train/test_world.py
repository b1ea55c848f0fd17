"""The proof that ranks form one job."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cpuft.errors import CpuftError
from cpuft.record import RankPlace
from cpuft.train.world import checksum_parameters, find_misplaced, meeting_variables


def rank(number: int, host: str = "a", cpus: tuple[int, ...] = (0,), pid: int = 0, **planned: Any) -> Any:
    plan = {"size": "2", "host": host, "cpus": list(cpus)} | planned
    return RankPlace(number, host, list(cpus)), plan, pid or 100 + number


@pytest.mark.parametrize(
    "found, problem",
    [
        ([rank(0), rank(1, cpus=(1,))], ""),
        ([rank(0), rank(0, pid=7)], "rank 0 is there 2 times: start the run with one mpirun"),
        ([rank(0, pid=7), rank(1, pid=7)], "process 7 on a holds 2 ranks: start the run with cpuft launch"),
        ([rank(0), rank(1, size="4")], "rank 1 was planned for 4 ranks and finds 2: check mpirun's -n"),
    ],
)
def test_what_is_misplaced_is_named(found: list[Any], problem: str) -> None:
    assert find_misplaced(2, found)[: len(problem) or None] == problem


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}


def test_ranks_of_a_world_of_many_do_not_train_alone() -> None:
    with pytest.raises(CpuftError, match="rank 1 of 2 was not told where rank 0 is: export MASTER_ADDR"):
        meeting_variables(STEP)
    told = STEP | {"MASTER_ADDR": "n1", "MASTER_PORT": "40000"}
    assert [meeting_variables(told)[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")] == ["1", "2", "n1"]
    assert [meeting_variables({})[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")] == ["0", "1", "127.0.0.1"]
    assert meeting_variables(STEP | {"RANK": "0", "WORLD_SIZE": "1"})["WORLD_SIZE"] == "1"


def test_wrong_host_and_cores_name_the_rank() -> None:
    place = RankPlace(1, "c", [0, 1])
    wrong_host = (place, {"size": "2", "host": "b", "cpus": [0, 1]}, 5)
    wrong_cores = (place, {"size": "2", "host": "c", "cpus": [2]}, 5)
    assert find_misplaced(2, [rank(0), wrong_host]).startswith("rank 1 is on c, planned on b")
    assert find_misplaced(2, [rank(0), wrong_cores]).startswith(
        "rank 1 on c sits on hardware threads [0, 1], planned [2]"
    )


def test_a_checksum_sees_every_bit_of_every_parameter() -> None:
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), norm)
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0)))
    before = checksum_parameters(model)
    assert before == checksum_parameters(model)
    with torch.no_grad():
        norm.bias[2] += 1e-7
    assert checksum_parameters(model) != before
    assert checksum_parameters(model.to(torch.bfloat16)) != before
