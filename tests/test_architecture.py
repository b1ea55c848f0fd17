"""Which folder of the package may import which, and a few other rules for the whole tree."""

from __future__ import annotations

import ast
import configparser
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cpuft"

PURE = {
    "argv",
    "compiler",
    "compressions",
    "errors",
    "files",
    "hardware",
    "instance_types",
    "model_files",
    "network_speed",
    "retry",
    "host_memory",
    "secret_variables",
    "serialization",
    "tasks",
    "terminal",
    "transfer",
}
TOLD = PURE | {"config", "embedding_files", "record", "plans"}
HOSTS = TOLD | {"execute", "hosts"}
ON_A_RANK = PURE | {"config", "embedding_files", "record", "trackers"}
ALLOWED: dict[str, set[str]] = {
    "argv": set(),
    "compiler": {"errors", "hardware"},
    "compressions": set(),
    "errors": set(),
    "files": {"errors", "transfer"},
    "hardware": {"errors"},
    "instance_types": {"errors"},
    # Not a small module: it imports torch.
    "kernels": {"compiler", "errors", "files", "hardware", "serialization", "transfer"},
    "model_files": set(),
    "network_speed": {"errors"},
    "retry": {"errors"},
    "host_memory": {"serialization"},
    "secret_variables": {"errors", "files", "serialization", "transfer"},
    "serialization": set(),
    "tasks": set(),
    "terminal": {"errors"},
    "transfer": set(),
    "config": PURE,
    "embedding_files": PURE | {"config"},
    "plans": PURE,
    "record": PURE | {"config"},
    "trackers": PURE | {"config", "record"},
    "execute": PURE | {"plans"},
    "hosts": HOSTS,
    # Supervising a run is reading what its ranks wrote when they failed.
    "launch": HOSTS | {"rank"},
    "provision": HOSTS | {"launch", "rank"},
    "doctor": HOSTS | {"launch", "rank"},
    "rank": ON_A_RANK,
    "comm": ON_A_RANK | {"rank", "kernels"},
    "judge": PURE | {"record", "config"},
    "train": ON_A_RANK | {"rank", "comm", "kernels", "judge"},
    "report": PURE | {"record", "config", "judge"},
    "schedulers": HOSTS | {"launch", "rank"},
    "sweep": HOSTS | {"launch", "rank", "report", "judge"},
    "cli": HOSTS | {"launch", "schedulers", "rank", "provision", "doctor", "report", "judge", "trackers", "sweep"},
    # A user's own process, which has torch if it loads a model.
    "api": HOSTS
    | {"launch", "rank", "doctor", "report", "judge", "cli", "trackers", "sweep", "comm", "train", "kernels"},
    "__main__": HOSTS
    | {"launch", "schedulers", "rank", "provision", "doctor", "report", "judge", "trackers", "sweep", "cli"},
}
"""What each folder or module may import, also indirectly."""

TYPE_IGNORES = 36
"""Most `type: ignore` comments that the whole tree may hold."""

FILES = sorted(path for folder in ("cpuft", "scripts", "tests") for path in (ROOT / folder).rglob("*.py"))
# This file tells what it counts.
IGNORE = "# type: " + "ignore"


def name_of(path: Path) -> str:
    """`cpuft.comm.group` for cpuft/comm/group/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES if path.is_relative_to(PACKAGE)}


def with_packages(name: str) -> set[str]:
    """A module and the packages around it, whose __init__ is imported on the way. The outermost holds a version only,
    and `accelerate` for those who ask for it."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(2, len(parts) + 1)} & MODULES.keys()


@functools.cache
def imports_of(name: str) -> set[str]:
    """Return the modules of cpuft that a module imports anywhere in its text."""
    found = with_packages(name) - {name}
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found |= with_packages(f"{node.module}.{alias.name}") | with_packages(node.module)
        elif isinstance(node, ast.Import):
            found |= {module for alias in node.names for module in with_packages(alias.name)}
    return found


def find_all_imports(name: str) -> set[str]:
    """Return all modules that importing and using this one may import."""
    found, waiting = {name}, [name]
    for module in waiting:
        new = imports_of(module) - found
        found |= new
        waiting += sorted(new)
    return found - {name}


def folder_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"cpuft"}))
def test_a_module_imports_only_what_its_folder_may(name: str) -> None:
    folder = folder_of(name)
    assert (
        sorted(module for module in find_all_imports(name) if folder_of(module) not in ALLOWED[folder] | {folder}) == []
    )


def test_the_package_itself_imports_only_its_public_api() -> None:
    face = {
        "cpuft.api",
        "cpuft.errors",
        "cpuft.train",
        "cpuft.train.fast",
        "cpuft.train.fast.acceleration",
        "cpuft.train.checkpoint",
        "cpuft.train.checkpoint.user_loop",
    }
    assert imports_of("cpuft") <= face


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_execute_starts_processes(name: str) -> None:
    text = MODULES[name].read_text(encoding="utf-8")
    # Four have the standard library alone, on hosts or in steps; ranks, too, start processes and may not import it.
    allowed = {"execute.py", "facts.py", "probe.py", "transfer.py", "kernels.py", "compiler.py", "tracker_process.py"}
    allowed |= {"baseline_process.py", "local_files.py"}
    assert MODULES[name].name in allowed or ("import subprocess" not in text and "os.system" not in text)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_public_function_returns_a_private_type(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    outer: list[ast.Module | ast.ClassDef] = [tree]
    outer += [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    functions = [node for one in outer for node in one.body if isinstance(node, ast.FunctionDef)]
    returned = {one.name: ast.unparse(one.returns) for one in functions if one.returns and not one.name.startswith("_")}
    private = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("_")]
    assert {name for name, types in returned.items() if set(re.findall(r"\w+", types)).intersection(private)} == set()


def test_types_are_honest() -> None:
    assert sum(path.read_text(encoding="utf-8").count(IGNORE) for path in FILES) <= TYPE_IGNORES


def test_every_file_is_installed_with_its_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    patterns = {name: re.split(r"[,\s]+", names) for name, names in setup["options.package_data"].items()}
    found = [path for path in PACKAGE.rglob("*.*") if path.suffix not in (".py", ".pyc", ".so") and path.is_file()]
    assert [
        path.relative_to(ROOT).as_posix()
        for path in found
        if not any(path.match(pattern) for pattern in patterns.get(".".join(path.relative_to(ROOT).parent.parts), []))
    ] == []


TESTED_ELSEWHERE = {
    "hosts/rank_counts.py": "hosts/test_cluster.py",
    "launch/secret_files.py": "launch/test_inputs.py",
    "launch/rank_output.py": "launch/test_supervise.py",
    "train/early_stopping.py": "train/test_evaluate.py",
    "train/checkpoint/resume.py": "train/checkpoint/test_timing.py",
    "train/checkpoint/writer_thread.py": "train/checkpoint/test_timing.py",
    "schedulers/dstack.py": "schedulers/test_clouds.py",
    "schedulers/skypilot.py": "schedulers/test_clouds.py",
    "cli/attach.py": "launch/test_detached.py",
    "cli/bench.py": "comm/test_bench.py",
    "cli/common.py": "cli/test_main.py",
    "cli/compare.py": "launch/test_compare.py",
    "cli/detached.py": "launch/test_detached.py",
    "cli/doctor.py": "doctor/test_doctor.py",
    "cli/env.py": "launch/test_plan.py",
    "cli/launch.py": "launch/test_run.py",
    "cli/logs.py": "launch/test_detached.py",
    "cli/provision.py": "provision/test_base.py",
    "cli/report.py": "report/test_comparison.py",
    "cli/runs.py": "launch/test_detached.py",
    "cli/stacks.py": "launch/test_stack_dumps.py",
    "cli/stop.py": "launch/test_detached.py",
    "cli/submit.py": "schedulers/test_submit.py",
    "comm/arguments.py": "comm/test_process_group.py",
    "comm/backends/base.py": "comm/test_process_group.py",
    "comm/backends/gloo.py": "comm/test_process_group.py",
    "comm/compression/powersgd.py": "comm/compression/test_error_feedback.py",
    "comm/collectives.py": "comm/test_process_group.py",
    "comm/watched_group.py": "comm/test_watchdog.py",
    "compressions.py": "comm/compression/test_table.py",
    "config/bench.py": "comm/test_bench.py",
    "config/compare.py": "launch/test_compare.py",
    "config/export.py": "cli/test_export.py",
    "config/fields.py": "cli/test_options.py",
    "config/launch.py": "cli/test_options.py",
    "config/mine.py": "cli/test_mine.py",
    "config/predict.py": "cli/test_predict.py",
    "config/sweep.py": "cli/test_sweep.py",
    "config/table_files.py": "train/data/test_delimited.py",
    "config/train.py": "cli/test_options.py",
    "doctor/finding.py": "doctor/test_checks.py",
    "embedding_files.py": "train/test_write_embeddings.py",
    "execute.py": "launch/test_supervise.py",
    "hosts/mpi_implementations.py": "launch/test_mpirun.py",
    "judge/metrics.py": "train/objective/test_labels.py",
    "judge/resampling.py": "judge/test_difference.py",
    "judge/weighted_metrics.py": "judge/test_judgement.py",
    "kernels.py": "train/fast/test_kernels.py",
    "launch/find_runs.py": "launch/test_detached.py",
    "instance_types.py": "report/test_estimate.py",
    "model_files.py": "cli/test_push.py",
    "network_speed.py": "provision/test_simulated.py",
    "provision/aws/options.py": "provision/aws/test_plan.py",
    "provision/options.py": "provision/test_simulated.py",
    "rank/describe_run.py": "launch/test_resume.py",
    "rank/dump_stacks.py": "rank/test_diagnostics.py",
    "report/plots.py": "report/test_page.py",
    "report/seeds.py": "report/test_comparison.py",
    "report/comparison_tables.py": "report/test_comparison.py",
    "retry.py": "launch/test_restart.py",
    "host_memory.py": "train/test_memory_estimate.py",
    "schedulers/base.py": "schedulers/test_submit.py",
    "tasks.py": "train/data/test_sources.py",
    "train/data/describe.py": "train/data/test_prepare.py",
    "train/result_warnings.py": "train/test_run_warnings.py",
    "train/baseline_process.py": "train/test_baseline.py",
    "train/control_messages.py": "train/test_loop.py",
    "train/data/demo.py": "train/data/test_sources.py",
    "train/data/hard_negatives.py": "train/data/test_relevance.py",
    "train/data/labels.py": "train/data/test_sources.py",
    "train/data/tables.py": "train/data/test_sources.py",
    "train/engines/deepspeed.py": "train/test_engines.py",
    "train/engines/ipex.py": "train/test_engines.py",
    "train/engines/ort.py": "train/test_engines.py",
    "train/exchange/base.py": "train/exchange/test_exchange.py",
    "train/exchange/data_parallel.py": "train/exchange/test_exchange.py",
    "train/exchange/local_sgd.py": "train/exchange/test_exchange.py",
    "train/exchange/table.py": "train/exchange/test_exchange.py",
    "train/fast/architectures.py": "train/test_architectures.py",
    "train/fast/frozen.py": "train/test_base_weights.py",
    "train/fast/gradient_checkpointing.py": "train/test_gradient_checkpointing.py",
    "train/fast/layout.py": "train/fast/test_layers.py",
    "train/fast/projection.py": "train/fast/test_pieces.py",
    "train/fast/stack.py": "train/fast/test_coverage.py",
    "train/model.py": "train/test_architectures.py",
    "train/objective/base.py": "train/objective/test_labels.py",
    "train/objective/table.py": "train/test_run.py",
    "train/passes.py": "train/test_loop.py",
    "train/setup.py": "train/test_loop.py",
    "train/training.py": "train/test_loop.py",
}
"""Modules without a test file of their own name, and the file that tests them. All others are tested in the file of
the same path: `cpuft/launch/plan.py` in `tests/launch/test_plan.py`."""


def test_the_tests_of_every_module_are_found_from_its_path() -> None:
    modules = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES.values()
        if path.name not in ("__init__.py", "__main__.py")
    }

    def mirror(module: str) -> Path:
        path = Path(module)
        return ROOT / "tests" / path.parent / f"test_{path.name}"

    assert {module for module in modules if not mirror(module).exists()} == set(TESTED_ELSEWHERE)
    assert [test for test in TESTED_ELSEWHERE.values() if not (ROOT / "tests" / test).exists()] == []
