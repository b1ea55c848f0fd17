"""Run by mpirun: tests that other projects wrote for their backends, one after another in one process group.

Usage: conformance.py BACKEND FOLDER SUITE FIRST ONLY. BACKEND is one of cpuft's, or "torch" for torch's own gloo. SUITE
is "torch" or the path of torch-ccl's test_c10d_ccl.py. ONLY is a part of the names of tests. Each rank writes to
FOLDER/RANK.jsonl a list of all tests, then the outcome of each from the number FIRST on. It ends behind a test
that may have broken the group: one with a time limit, one that fails, or one whose outcome differs by rank.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
import types
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

import cpuft.comm  # noqa: F401, registers the backends
from cpuft.rank.process import remove_shared_memory
from scripts.benchmarks.check_conformance import may_break_group
from tests.comm.ranks import become_rank

SECONDS = 30
_utils: Any = common_utils  # whose functions have no types


def load_torch_suite(backend: str) -> type[Any]:
    """Return PyTorch's class of tests, which runs a test on the ranks that are there instead of starting some."""
    os.environ |= {"BACKEND": backend, "INIT_METHOD": "env://"}
    features = common_distributed.DistTestCases.backend_feature
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        features[feature].add(backend)
    # The module asks at its import whether torch was built with MPI.
    is_available, dist.is_mpi_available = dist.is_mpi_available, lambda: True
    from torch.testing._internal.distributed import distributed_test

    dist.is_mpi_available = is_available
    base = distributed_test.DistributedTest._DistTestBase
    suite = type("Suite", (distributed_test.TestDistBackend, base), {})
    _utils.instantiate_parametrized_tests(suite)
    return suite


def load_ccl_suite(path: str) -> type[Any]:
    """Return torch-ccl's class of tests, for which every process group is the one of all ranks."""
    sys.modules["oneccl_bindings_for_pytorch"] = types.ModuleType("oneccl_bindings_for_pytorch")
    vars(dist)["ProcessGroupCCL"] = lambda store, rank, size: dist.group.WORLD
    spec = importlib.util.spec_from_file_location("test_c10d_ccl", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite: type[Any] = module.ProcessGroupCCLTest
    return suite


def run(suite: type[Any], name: str, folder: Path) -> str:
    """Run a test; return "passed", "skipped" or the error."""
    case = suite(name)
    case.rank, case.file_name = dist.get_rank(), str(folder / f"store-{name}")
    # As these suites do in each process that they start.
    _utils.set_rng_seed(_utils.SEED)
    try:
        getattr(case, name)()
    except unittest.SkipTest:
        return "skipped"
    except SystemExit as end:  # how these suites say that a test needs more ranks or a GPU
        codes = {skip.exit_code for skip in common_distributed.TEST_SKIPS.values()}
        return "skipped" if end.code in codes else f"exit code {end.code}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error).strip()}"[:500]
    return "passed"


def main() -> None:
    backend, folder, chosen, first = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    only = sys.argv[5] if len(sys.argv) > 5 else ""
    become_rank()
    torch.set_num_threads(1)
    place = folder / f"temporary-{chosen == 'torch'}-{first}"
    for name in ("barrier", "test_dir"):
        (place / name).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = tempfile.tempdir = str(place)
    name = {"torch": "gloo"}.get(backend) or {"gloo": "cpuft_gloo"}.get(backend, backend)
    suite = load_torch_suite(name) if chosen == "torch" else load_ccl_suite(chosen)
    # Those for GPUs are left out: some of them fail on a host without one, instead of being skipped.
    names = sorted(one for one in dir(suite) if re.fullmatch(f"test_(?!.*(cuda|nccl|xpu)).*{only}.*", one))
    dist.init_process_group(name, timeout=timedelta(seconds=SECONDS))
    # The store works, too, if a group is broken.
    store = dist.distributed_c10d._get_default_store()
    with (folder / f"{dist.get_rank()}.jsonl").open("a") as file:
        print(json.dumps(names), file=file, flush=True)
        for test in names[first:]:
            outcome = run(suite, test, place)
            print(json.dumps(outcome), file=file, flush=True)
            store.set(f"{test} {dist.get_rank()}", outcome.partition(":")[0])
            kinds = {store.get(f"{test} {rank}") for rank in range(dist.get_world_size())}
            if len(kinds) > 1 or may_break_group(test, outcome):
                break
    # Without exit handlers, because a broken group may wait in them.
    remove_shared_memory(os.getpid())
    os._exit(0)


if __name__ == "__main__":
    main()
