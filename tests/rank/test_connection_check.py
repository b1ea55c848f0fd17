"""The check that a script's ranks are connected, and the patches of libraries, with stand-ins for both."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cpuft.comm.watchdog import OperationRegister
from cpuft.launch.rank_variables import script_settings
from cpuft.rank import connection_check
from cpuft.rank.connection_check import (
    ConnectionCheck,
    RefusedScriptError,
    explain_exception,
    list_patches,
    make_check,
    refuse_nccl,
)
from cpuft.rank.script import run_script


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the collective operations that this process seems to have run."""
    names = set[str]()
    monkeypatch.setattr(connection_check, "list_operations", lambda: names)
    return names


def take_steps(check: ConnectionCheck, count: int) -> None:
    for _ in range(count):
        check.before_step(None, (), {})


class Store:
    """As torch's, for ranks of this process."""

    def __init__(self) -> None:
        self.values = dict[str, bytes]()

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value

    def get(self, name: str) -> bytes:
        return self.values[name]

    def check(self, names: list[str]) -> bool:
        return all(name in self.values for name in names)


class Ranks:
    """Two ranks of this process, each with a DistributedDataParallel of its own, which averages nothing."""

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        store = Store()
        self.checks = [ConnectionCheck(2), ConnectionCheck(2)]
        self.models = list[Any]()
        self.optimizers = list[Any]()
        for rank, check in enumerate(self.checks):
            check.note_group(2, store)
            self.torch.manual_seed(0)
            self.models.append(self.wrap(check, self.torch.nn.Linear(2, 1)))
            self.optimizers.append(self.torch.optim.SGD(self.models[rank].parameters(), lr=0.1))

    def wrap(self, check: ConnectionCheck, module: Any) -> Any:
        class DistributedDataParallel:
            def __init__(self, module: Any) -> None:
                self.module, self.parameters, self.training = module, module.parameters, True

            def forward(self, x: Any) -> Any:
                return self.module(x)

        distributed = types.SimpleNamespace(DistributedDataParallel=DistributedDataParallel, torch=self.torch)
        list_patches(check)["torch.nn.parallel.distributed"](distributed)
        return DistributedDataParallel(module)

    def step(self, is_wrapped: bool = True, is_averaged: bool = False) -> None:
        """Train both ranks for a step, on data of their own."""
        for rank, model in enumerate(self.models):
            data = self.torch.ones(1, 2) * (1 if is_averaged else rank + 1)
            (model.forward if is_wrapped else model.module)(data).sum().backward()
        for rank, optimizer in enumerate(self.optimizers):
            os.environ["RANK"] = str(rank)
            self.checks[rank].before_step(optimizer, (), {})
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def ranks(operations: set[str], monkeypatch: pytest.MonkeyPatch) -> Ranks:
    operations.update(("broadcast", "all_reduce"))  # the loss is averaged, too
    monkeypatch.setenv("RANK", "0")
    return Ranks()


def test_a_wrapped_model_that_the_script_does_not_call_is_noticed(ranks: Ranks) -> None:
    ranks.step(is_wrapped=False)
    with pytest.raises(RefusedScriptError) as refused:
        ranks.step(is_wrapped=False)
    assert str(refused.value) == (
        "the script was stopped before optimizer step 2 because each rank trains a copy of its own of Linear: the "
        "model is wrapped in DistributedDataParallel, but the script calls the model inside, so gradients are not "
        "averaged, and parameters differ between ranks. Next: call the wrapped model in the training loop, model(...) "
        "instead of model.module(...) or of the model from before DistributedDataParallel or accelerator.prepare; or "
        "start the script with cpuft launch --independent if its ranks are meant to train apart for some steps"
    )


def test_a_wrapper_that_the_script_throws_away_is_remembered(ranks: Ranks) -> None:
    ranks.models = [types.SimpleNamespace(module=model.module) for model in ranks.models]
    gc.collect()
    ranks.step(is_wrapped=False)
    with pytest.raises(RefusedScriptError, match="each rank trains a copy of its own of Linear"):
        ranks.step(is_wrapped=False)


def test_a_model_that_stops_to_be_called_is_noticed(ranks: Ranks) -> None:
    for _ in range(20):
        ranks.step()
    with pytest.raises(RefusedScriptError, match="before optimizer step 21 because each rank trains a copy"):
        ranks.step(is_wrapped=False)


def test_a_validation_through_the_wrapper_is_no_training(ranks: Ranks) -> None:
    for model in ranks.models:
        model.training = False
    ranks.step(is_wrapped=False)
    for model in ranks.models:
        model.forward(ranks.torch.ones(1, 2))
    with pytest.raises(RefusedScriptError, match="before optimizer step 2 because each rank trains a copy"):
        ranks.step(is_wrapped=False)


def test_a_call_is_enough_for_several_optimizers(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConnectionCheck, "_differs", lambda *_: pytest.fail("parameters are compared"))
    others = [[ranks.torch.optim.SGD([one], lr=0.1) for one in model.parameters()] for model in ranks.models]
    for _ in range(120):
        for model in ranks.models:
            model.forward(ranks.torch.ones(1, 2)).sum().backward()
        for rank, check in enumerate(ranks.checks):
            for optimizer in (*others[rank], ranks.optimizers[rank]):
                check.before_step(optimizer, (), {})


def test_steps_of_a_model_that_one_rank_has_alone_are_not_counted(ranks: Ranks) -> None:
    probe = ranks.torch.nn.Linear(2, 1)
    probe(ranks.torch.ones(1, 2)).sum().backward()
    alone = ranks.torch.optim.SGD(probe.parameters(), lr=0.1)
    for _ in range(30):
        ranks.step(is_wrapped=False, is_averaged=True)
        ranks.checks[0].before_step(alone, (), {})


def test_parameters_that_are_no_plain_tensors_are_not_compared(ranks: Ranks) -> None:
    check = ranks.checks[0]
    assert not check._differs("0/1", [ranks.torch.nn.Parameter(ranks.torch.ones(2, device="meta"))])


def test_models_whose_ranks_differ_on_purpose_or_agree_by_other_means_are_left_alone(ranks: Ranks) -> None:
    for _ in range(120):
        ranks.step()  # as with no_sync and local SGD: parameters differ, but the model is called
    averaged = Ranks()
    for _ in range(120):
        averaged.step(is_wrapped=False, is_averaged=True)  # as with an average of the script's own


def test_a_script_that_starts_its_own_processes_is_refused() -> None:
    check = ConnectionCheck(2)
    spawn = types.SimpleNamespace(start_processes=lambda *args, **kwargs: "started")
    list_patches(check)["torch.multiprocessing.spawn"](spawn)
    with pytest.raises(RefusedScriptError, match=r"processes of its own. Next: cpuft launch has started one process"):
        spawn.start_processes(print, nprocs=2)
    check.note_group(2)
    assert spawn.start_processes(print, nprocs=2) == "started"
    child = os.fork()
    if not child:
        try:
            check.before_group(None, None)
        except RefusedScriptError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    "address, variable, method, is_refused",
    [
        ("198.51.100.1", "localhost", None, True),
        ("198.51.100.1", "127.0.0.1", "env://", True),
        ("198.51.100.1", "198.51.100.1", "tcp://localhost:29500", True),
        ("198.51.100.1", "198.51.100.1", None, False),
        ("198.51.100.1", "198.51.100.2", None, False),
        ("198.51.100.1", "localhost", "file:///tmp/store", False),
        ("127.0.0.1", "localhost", None, False),
        ("", "localhost", None, False),
    ],
)
def test_a_script_that_takes_its_own_host_for_that_of_rank_0_is_refused(
    address: str, variable: str, method: str | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", variable)
    check = ConnectionCheck(2, address)
    check.before_group(method, Store())
    if is_refused:
        with pytest.raises(RefusedScriptError, match=r"rank 0 is on another host, .* Next: do not set MASTER_ADDR"):
            check.before_group(method, None)
    else:
        check.before_group(method, None)


@pytest.mark.parametrize("text", [None, "import os; os.exit(127)"])
def test_an_import_that_no_cpu_needs_names_the_package_of_ours(text: str | None, tmp_path: Path) -> None:
    if text:
        (tmp_path / "intel_extension_for_pytorch.py").write_text(text)
    (tmp_path / "script.py").write_text("import intel_extension_for_pytorch as ipex\n")
    command = [sys.executable, "-m", "cpuft.rank.script", f"{tmp_path}/script.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "cpuft: intel_extension_for_pytorch cannot be imported, and PyTorch itself has what it was for. Remove the "
        'import and calls such as ipex.optimize, and write import cpuft.comm if the script uses the backends "ccl" or '
        '"mpi"'
    )


def test_without_a_group_of_all_ranks_the_first_step_is_refused(operations: set[str]) -> None:
    with pytest.raises(RefusedScriptError) as refused:
        take_steps(ConnectionCheck(2), 1)
    assert str(refused.value) == (
        "the script was stopped before its first optimizer step because its 2 ranks are not connected: they formed no "
        "process group of 2 ranks, so each rank works on a copy of its own. Next: let the script form one process "
        "group (torch.distributed.init_process_group, Accelerate, the Hugging Face Trainer or Lightning), or start it "
        "with cpuft launch --independent if its ranks are meant to be independent"
    )
    small = ConnectionCheck(4)
    small.note_group(2)
    with pytest.raises(RefusedScriptError, match=r"no process group of 4 ranks \(only one of 2\)"):
        take_steps(small, 1)


@pytest.mark.parametrize("seen", [(), ("barrier",)])
def test_a_group_without_exchange_stops_the_script_after_some_steps_and_at_its_end(
    operations: set[str], seen: tuple[str, ...]
) -> None:
    operations.update(seen)
    check = ConnectionCheck(2)
    check.note_group(2)
    take_steps(check, 99)
    with pytest.raises(RefusedScriptError, match=r"ended with an error .* exchanged no gradients or parameters"):
        check.check_end()
    with pytest.raises(RefusedScriptError, match=r"stopped before optimizer step 100 .* exchanged no gradients"):
        take_steps(check, 1)


def test_a_single_exchange_is_enough(operations: set[str]) -> None:
    operations.add("all_reduce")
    check = ConnectionCheck(2)
    check.note_group(2)
    take_steps(check, 2)
    operations.clear()
    take_steps(check, 200)
    check.check_end()


def test_a_script_without_optimizer_steps_needs_a_group_only(operations: set[str]) -> None:
    check = ConnectionCheck(2)
    with pytest.raises(RefusedScriptError, match="ended with an error because its 2 ranks are not connected"):
        check.check_end()
    check.note_group(2)
    check.check_end()


def test_ranks_that_exchange_by_mpi4py_are_connected(operations: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = types.SimpleNamespace(
        Is_initialized=lambda: True,
        Is_finalized=lambda: False,
        COMM_WORLD=types.SimpleNamespace(Get_size=lambda: 2),
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    check = ConnectionCheck(2)
    take_steps(check, 101)
    check.check_end()
    with pytest.raises(RefusedScriptError):
        take_steps(ConnectionCheck(3), 1)


def test_operations_of_cpufts_own_groups_are_seen_however_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    register = OperationRegister()
    monkeypatch.setattr(connection_check, "read_operations", register.report)
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d", raising=False)
    register.begin("the world", "all_reduce", 8, (0, 1), 60.0)
    for _ in range(100):
        register.begin("the world", "barrier", 0, (0, 1), 60.0)
    assert connection_check.list_operations() == {"all_reduce", "barrier"}


def test_the_end_of_a_script_is_checked_unless_it_failed_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "script.py"
    for text, code in (("", 2), ("raise SystemExit(7)", 7), ("raise SystemExit(75)", 75)):
        script.write_text(text)
        assert run_script([str(script)], check=ConnectionCheck(2)) == code
        assert run_script([str(script)]) == (0 if code == 2 else code)
    assert capsys.readouterr().err.count("cpuft: error: the script ended with an error because its 2 ranks") == 1


def test_only_what_the_launcher_starts_with_several_connected_ranks_is_checked() -> None:
    def environ(np: int, independent: bool) -> dict[str, str]:
        settings = {setting.name: setting.value for setting in script_settings(np, independent)}
        return {"WORLD_SIZE": str(np), **settings}

    assert environ(2, False)["ACCELERATE_USE_CPU"] == "true"
    check = make_check(environ(2, False))
    assert check is not None
    assert check.size == 2
    assert make_check(environ(2, True)) is None
    assert make_check(environ(1, False)) is None


@pytest.mark.parametrize("backend", ["nccl", "NCCL", "cuda:nccl"])
def test_nccl_without_a_gpu_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_torch(has_gpu: bool) -> object:
        return types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: has_gpu))

    monkeypatch.setitem(sys.modules, "torch", make_torch(False))
    with pytest.raises(RuntimeError, match=r'needs GPUs: use "gloo", or after "import cpuft.comm" also "mpi" or "ccl"'):
        refuse_nccl(backend)
    for other in ("gloo", "ccl", None, "cpu:gloo,cuda:nccl"):
        refuse_nccl(other)
    monkeypatch.setitem(sys.modules, "torch", make_torch(True))
    refuse_nccl(backend)


class CPUAccelerator:
    """As Lightning's: one device."""


class Connector:
    """As Lightning's."""

    def __init__(self, devices: object, nodes: int) -> None:
        self._devices_flag, self._num_nodes_flag, self.accelerator = devices, nodes, CPUAccelerator()
        self._set_devices_flag_if_auto_passed()

    def _set_devices_flag_if_auto_passed(self) -> None:
        if self._devices_flag == "auto":
            self._devices_flag = 1

    @property
    def devices(self) -> object:
        return self._devices_flag


@pytest.mark.parametrize(
    "module", ["lightning.fabric.connector", "pytorch_lightning.trainer.connectors.accelerator_connector"]
)
def test_automatic_devices_of_lightning_are_all_ranks(module: str) -> None:
    own = type("Own", (Connector,), {"_set_devices_flag_if_auto_passed": Connector._set_devices_flag_if_auto_passed})
    name = "_Connector" if "fabric" in module else "_AcceleratorConnector"
    check = ConnectionCheck(4)
    list_patches(check)[module](types.SimpleNamespace(**{name: own}))
    assert [own(*given).devices for given in (("auto", 1), ("auto", 2), ("4", 1), (2, 2))] == [4, 2, "4", 2]
    assert check.advice == ""
    assert own(3, 1).devices == 3
    assert explain_exception(ValueError("devices=3"), check) == check.advice
    with pytest.raises(
        RefusedScriptError, match="Next: leave out devices=3 of Lightning's Trainer or Fabric, or write"
    ):
        take_steps(check, 1)
    # A script may test what it has trained with devices=1.
    assert explain_exception(OSError("no such file"), check) == ""


def test_accelerate_and_the_trainer_use_cpus_where_there_is_no_gpu() -> None:
    class PartialState:
        def __init__(self, cpu: bool = False, backend: str = "") -> None:
            self.given = cpu, backend

    class TrainingArguments:
        use_cpu = False

        def __post_init__(self) -> None:
            self.seen = self.use_cpu

    for has_gpu in (False, True):
        torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda has_gpu=has_gpu: has_gpu))
        state = types.SimpleNamespace(torch=torch, PartialState=type("State", (PartialState,), {}))
        arguments = types.SimpleNamespace(torch=torch, TrainingArguments=type("Own", (TrainingArguments,), {}))
        changed = list_patches(ConnectionCheck(2))
        changed["accelerate.state"](state)
        changed["transformers.training_args"](arguments)
        assert state.PartialState(backend="gloo").given == (not has_gpu, "gloo")
        made = arguments.TrainingArguments()
        made.__post_init__()
        assert made.seen is not has_gpu
