"""Run by scripts/check-conformance: tests that other projects wrote for their backends, on each backend of cpuft.

PyTorch's distributed suite is in its wheel. What passes on torch's own gloo must pass here, too, apart from the tests
that docs/contributing/conformance.md lists with a reason. torch-ccl's tests come from a checkout that the user names.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.comm.ranks import mpirun

_BACKENDS = ("gloo", "ccl", "mpi")
_GUIDE = Path(__file__).parents[2] / "docs/contributing/conformance.md"
_SECONDS = 300

Outcomes = dict[str, str]
"""Test -> "passed", "skipped", or what went wrong."""


def read_exceptions() -> dict[str, tuple[str, ...]]:
    """Return the tests that may fail, and on which backends: the table in docs/contributing/conformance.md."""
    rows = re.findall(r"^\| (`test_.*?) \| ([\w, ]+) \|", _GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: tuple(backends.split(", ")) for names, backends in rows for name in re.findall(r"\w+", names)}


def may_break_group(test: str, outcome: str) -> bool:
    """Return whether later tests may fail because of this one: gloo closes connections after a time limit."""
    return "timeout" in test or outcome not in ("passed", "skipped")


def run_suite(backend: str, ranks: int, suite: str, only: str) -> Outcomes:
    """Run all tests of a suite, with new ranks behind each test that may have broken the group."""
    outcomes: Outcomes = {}
    names = [""]
    while len(outcomes) < len(names):
        with tempfile.TemporaryDirectory() as folder:
            try:
                arguments = backend, folder, suite, str(len(outcomes)), only
                said = mpirun(ranks, "tests.comm.conformance", *arguments, seconds=_SECONDS).stdout
            except subprocess.TimeoutExpired:
                said = f"no end after {_SECONDS} s"
            found = [_read(Path(folder, f"{rank}.jsonl")) for rank in range(ranks)]
        if not all(found):
            sys.exit(f"check-conformance: {backend} did not start:\n{said[-3000:]}")
        names, begun, is_broken = found[0][0], len(outcomes), False
        for results in zip(*(rows[1:] for rows in found)):
            worst = max(results, key=lambda outcome: (outcome != "passed", outcome != "skipped"))
            is_broken = len({one.partition(":")[0] for one in results}) > 1
            is_broken |= may_break_group(names[len(outcomes)], worst)
            outcomes[names[len(outcomes)]] = worst
            _tell(f"{backend} {list(outcomes)[-1]}: {worst}")
        if len(outcomes) < len(names) and not is_broken:
            # A rank ended within the next test; another one may have said why.
            last = [outcome for rows in found for outcome in rows[1 + len(outcomes) - begun :][:1]]
            errors = [outcome for outcome in last if outcome not in ("passed", "skipped")]
            outcomes[names[len(outcomes)]] = errors[0] if errors else f"ended: {said.strip()[-400:]}"
            _tell(f"{backend} {list(outcomes)[-1]}: ended")
    return outcomes


def _read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _tell(text: str) -> None:
    print(text[:200].replace("\n", " "), file=sys.stderr, flush=True)


def _count(outcomes: Outcomes) -> str:
    counts = Counter(outcome if outcome in ("passed", "skipped") else "failed" for outcome in outcomes.values())
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))


def main() -> None:
    """Print a table of all suites and backends, and each test that fails here only. Exit with 1 if there is one."""
    parser = argparse.ArgumentParser(prog="check-conformance", description=__doc__)
    parser.add_argument("--torch-ccl", default="", metavar="FILE", help="test_c10d_ccl.py of a checkout of torch-ccl")
    parser.add_argument("--backends", default=" ".join(_BACKENDS), help="backends to test, in one word (default: all)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3], help="numbers of ranks for PyTorch's suite")
    parser.add_argument("--only", default="", help="only tests whose name contains this text")
    options = parser.parse_args()
    backends, may_fail, faults = options.backends.split(), read_exceptions(), 0
    for suite, ranks in [("torch", ranks) for ranks in options.ranks] + [(options.torch_ccl, 2)]:
        if not suite:
            continue
        label = "PyTorch" if suite == "torch" else "torch-ccl"
        # torch-ccl's tests end torch's own gloo by a signal.
        wanted = run_suite("torch", ranks, suite, options.only) if suite == "torch" else {}
        if wanted:
            print(f"{label}, {ranks} ranks, torch's gloo: {_count(wanted)}", flush=True)
        for backend in backends:
            outcomes = run_suite(backend, ranks, suite, options.only)
            print(f"{label}, {ranks} ranks, {backend}: {_count(outcomes)}", flush=True)
            for name, outcome in outcomes.items():
                if outcome in ("passed", "skipped") or wanted.get(name, "passed") != "passed":
                    continue
                is_known = backend in may_fail.get(name, ())
                faults += not is_known
                print(f"  {'known' if is_known else 'FAULT'}: {name}: {outcome}", flush=True)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
