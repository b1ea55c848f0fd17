"""What a script keeps of its training comes back as it was, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cpuft
from cpuft.errors import CpuftError
from cpuft.train.checkpoint.folders import list_checkpoints, write_checkpoint
from cpuft.train.checkpoint.state import pack_tensors
from tests.conftest import run_cpuft
from tests.train.fast.encoders import make_batch, make_model, make_optimizer

SCRIPT = """
import os, pathlib, signal, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import cpuft
dist.init_process_group("gloo")
rank, run = dist.get_rank(), pathlib.Path(os.environ["CPUFT_RUN_DIR"])

def train(disturbed):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    kept = cpuft.load_state(model=model, optimizer=optimizer, scheduler=scheduler) if disturbed else None
    losses = kept["losses"] if kept else []
    for step in range(kept["step"] if kept else 0, 6):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if disturbed and not kept and step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if disturbed and cpuft.interrupted():
            assert cpuft.save_state(step + 1, model=model, optimizer=optimizer, scheduler=scheduler, losses=losses)
            sys.exit(75)
    torch.save([p.detach() for p in model.parameters()], run / f"{disturbed}-{rank}.pt")
    print(losses, flush=True)

if "CPUFT_RESUMED" not in os.environ:
    train(False)
train(True)
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, _nothing_left: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPUFT_RUN_DIR", str(tmp_path))
        yield


def make_pair() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(2)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_all_of_it_comes_back(tmp_path: Path) -> None:
    model, optimizer = make_pair()
    step(model, optimizer)
    values: dict[str, Any] = {
        "best": 0.1 + 0.2,
        "never": float("inf"),
        "names": ["a", ("b", None, True)],
        "by_rank": {0: "x", "y": {"z": []}},
        "random": torch.get_rng_state(),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "nothing": torch.zeros(0),
    }
    assert cpuft.load_state(model=model) is None
    assert cpuft.save_state(7, model=model, optimizer=optimizer, **values)
    step(model, optimizer)
    other, its_optimizer = make_pair()
    kept = cpuft.load_state(model=other, optimizer=its_optimizer)
    assert kept
    assert kept.pop("step") == 7
    for name in ("random", "half", "nothing"):
        assert torch.equal(kept.pop(name), values.pop(name))
    assert kept == values
    step(other, its_optimizer)
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_an_accelerated_model_goes_on_to_the_bit() -> None:
    batch = make_batch((9, 7, 9, 7))

    def accelerate() -> tuple[Any, Any]:
        model = make_model("bert")
        return cpuft.accelerate(model.eval(), make_optimizer(model), precision="bf16")

    def update(model: Any, optimizer: Any) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = accelerate()
    update(model, optimizer)
    cpuft.save_state(1, model=model, optimizer=optimizer)
    update(model, optimizer)
    other, its_optimizer = accelerate()
    cpuft.load_state(model=other, optimizer=its_optimizer)
    update(other, its_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_the_newest_two_stay_and_a_damaged_one_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3):
        cpuft.save_state(number, number=number)
    assert [update for update, _ in list_checkpoints(tmp_path / "checkpoints")] == [3, 2]
    (tmp_path / "checkpoints/000000003.0/values.json").write_text("{}")
    assert cpuft.load_state() == {"step": 2, "number": 2}
    assert "000000003.0 is left out: values.json is damaged (" in capsys.readouterr().err


@pytest.mark.parametrize(
    "things, said",
    [
        ({"model": torch.nn.Linear(3, 5)}, r"the checkpoint of step 1 does not fit model \(Error.* size mismatch"),
        ({"optimizer": make_pair()[1]}, "the checkpoint of step 1 has no optimizer: load what was saved"),
        ({"best": 3}, r"does not fit best \('int' object has no attribute"),
    ],
)
def test_what_does_not_fit_is_one_line(things: dict[str, Any], said: str) -> None:
    cpuft.save_state(1, model=torch.nn.Linear(3, 4), best=1)
    with pytest.raises(CpuftError, match=said):
        cpuft.load_state(**things)


def test_what_only_pickle_could_keep_is_refused() -> None:
    with pytest.raises(CpuftError, match=r"values\.1 is a set, which JSON cannot hold: save tensors"):
        cpuft.save_state(1, values=[1, {2}])
    with pytest.raises(CpuftError, match=r"waves is of type torch\.complex64, which cannot be saved"):
        cpuft.save_state(1, waves=torch.zeros(1, dtype=torch.complex64))


@pytest.mark.parametrize(
    "value, said",
    [
        (torch.zeros(1, dtype=torch.int16), r"counts\.0 is of type torch\.int16, which cannot be saved"),
        (torch.eye(2).to_sparse(), r"counts\.0 is torch\.sparse_coo on cpu, which cannot be saved: make it dense"),
        (torch.ones(2, device="meta"), r"counts\.0 is torch\.strided on meta, which cannot be saved"),
    ],
)
def test_a_rank_that_writes_nothing_refuses_what_cannot_be_kept(
    value: torch.Tensor, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpuft.train.checkpoint.user_loop.choose_writer_ranks", lambda ranks: [])
    with pytest.raises(CpuftError, match=said):
        cpuft.save_state(1, counts=[value])


@pytest.mark.parametrize("step", [-1, 14.0, "2"])
def test_a_step_by_which_no_checkpoint_would_be_found_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=f"the step {step!r} is not valid: give the number of steps"):
        cpuft.save_state(step, model=torch.nn.Linear(3, 4))
    assert not (tmp_path / "checkpoints").exists()
    whole: Any = np.int64(2)
    assert cpuft.save_state(whole, done=True)
    assert cpuft.load_state() == {"step": 2, "done": True}


def test_where_nothing_can_be_kept_the_next_move_is_said() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        for function in (cpuft.interrupted, cpuft.load_state):
            with pytest.raises(CpuftError, match="2 ranks write checkpoints together: call init_process_group"):
                function()
        patch.delenv("CPUFT_RUN_DIR")
        with pytest.raises(CpuftError, match="checkpoints need a folder: start the script with cpuft launch"):
            cpuft.load_state()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_two_ranks_of_a_script_are_interrupted_and_go_on(tmp_path: Path) -> None:
    Path("script.py").write_text(SCRIPT)
    first = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--", "script.py")
    assert first.returncode == 75, first.stderr
    second = run_cpuft("launch", "--np", "2", "--resume", "run", "--", "script.py")
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines()[0] == first.stdout.splitlines()[0]
    for rank in (0, 1):
        whole, resumed = (torch.load(f"run/{disturbed}-{rank}.pt") for disturbed in (False, True))
        assert all(torch.equal(*pair) for pair in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"a": {"odd": 1, "b": 2}}', '{"a": {"tensor": "b"}}'])
def test_a_state_with_damaged_json_is_refused_with_its_place(text: str, tmp_path: Path) -> None:
    """Its checksums are right: it is somebody else's, or another program's."""
    files = {"state.safetensors": pack_tensors({}).numpy().data, "values.json": memoryview(text.encode())}
    write_checkpoint(tmp_path / "checkpoints", 3, 0, files)
    said = r"the checkpoint of step 3 on \S+ is none of cpuft.save_state .*: remove .*checkpoints, and start a new run"
    with pytest.raises(CpuftError, match=said):
        cpuft.load_state()
