"""Operations in torch's flight recorder, and stack dumps of a rank from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpuft.argv import module_command
from cpuft.rank.diagnostics import parse_recorder
from cpuft.rank.dump_stacks import dump_stacks, find_workers
from cpuft.rank.script import is_timeout

NOW = 1_795_326_590_000_000_000


def entry(sequence: int, name: str, retired: bool, **more: object) -> dict[str, object]:
    plain = {"collective_seq_id": sequence, "profiling_name": f"gloo:{name}", "retired": retired, "is_p2p": False}
    return plain | {"process_group": ["0", "default_pg"], "p2p_seq_id": 0, "time_created_ns": NOW - 3 * 10**9} | more


def test_the_flight_recorders_entries_become_pending_operations_and_progress() -> None:
    entries = [
        entry(10, "all_reduce", True),
        entry(11, "barrier", False),
        entry(2, "broadcast", True, process_group=["1", "undefined"]),
        entry(11, "recv", True, is_p2p=True, p2p_seq_id=4),
    ]
    assert parse_recorder({"entries": entries}, NOW) == {
        "pending": [{"channel": "the world", "sequence": 11, "name": "barrier", "seconds": 3.0}],
        "progress": {
            "the world": (11, "barrier"),
            "group 1": (2, "broadcast"),
            "the world, between two": (4, "recv"),
        },
        "last": [{"channel": "the world, between two", "sequence": 4, "name": "recv", "seconds": 0.0}],
    }
    assert parse_recorder({}, NOW) == {"pending": [], "progress": {}, "last": []}


WAITS = """
import cpuft.rank.diagnostics as diagnostics, time
diagnostics.WAIT_SECONDS = 2.0
seconds = iter([1.0, 3.0, 3.5, 4.0, 7.0, 9.0])
def read():
    barrier = {"channel": "the world", "name": "barrier", "sequence": 6, "seconds": next(seconds, 0.0)}
    return {"pending": [barrier, {**barrier, "channel": "the world from 0 to 1", "seconds": 99.0}]}
diagnostics.start_reporting(read, reports_waits=True)
time.sleep(3.5)
"""


@pytest.mark.parametrize("supervised, lines", [("1", 2), ("", 0)])
def test_long_waits_are_reported_to_a_supervisor_and_later_only_longer_ones(supervised: str, lines: int) -> None:
    environ = {**os.environ, "CPUFT_SUPERVISED": supervised}
    done = subprocess.run(
        [sys.executable, "-c", WAITS], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == "cpuft-rank-waits: barrier #6\n" * lines


@pytest.mark.parametrize(
    "error, waited",
    [
        (RuntimeError("[gloo/buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"), True),
        (RuntimeError("Rank 1 timed out in monitoredBarrier after 5000 ms."), True),
        (RuntimeError("wait timeout after 5000ms, keys: /a"), True),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("timed out"), False),
    ],
)
def test_torchs_timeouts_are_recognized(error: BaseException, waited: bool) -> None:
    assert is_timeout(error) is waited


SCRIPT = """
import itertools, signal, sys, threading
{block}; print("here", flush=True)
{line}
"""
BLOCK = (
    "threading.Thread(target=lambda: (signal.pthread_sigmask(0, [signal.SIGURG]), signal.pause()), daemon=True).start()"
)
"""A thread that always blocks the signal for stacks, as those of some libraries do."""


@pytest.mark.parametrize(
    "line, file",
    [("while True: pass", "script.py"), ("sum(itertools.repeat(0))", "script.py"), ("sys.stdin.read()", "script.py")],
)
def test_stacks_can_be_dumped_whatever_holds_the_gil(line: str, file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(SCRIPT.format(block=BLOCK, line=line), encoding="utf-8")
    starter = [*module_command(sys.executable, "cpuft.rank"), "-m", "cpuft.rank.script", f"{tmp_path}/{file}"]
    environ = {**os.environ, "CPUFT_RUN_DIR": str(tmp_path), "CPUFT_HOSTNAME": socket.gethostname()}
    pipe = subprocess.PIPE
    with subprocess.Popen(starter, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "here\n"
            limit, stands = time.monotonic() + 60, f'File "{tmp_path}/{file}", line 4 in <module>'
            (first,) = dump_stacks(str(tmp_path), 20.0)
            while stands not in first["stack"] and time.monotonic() < limit:
                (first,) = dump_stacks(str(tmp_path), 20.0)  # it may still be in print
            begun = time.monotonic()
            (second,) = dump_stacks(str(tmp_path), 20.0)
            assert time.monotonic() - begun < 15
            assert find_workers(str(tmp_path), "elsewhere") == find_workers("/none", socket.gethostname()) == {}
        finally:
            for pid in find_workers(str(tmp_path), socket.gethostname()):
                os.kill(pid, signal.SIGKILL)
    assert (first["rank"], first["pid"]) == (second["rank"], second["pid"])
    assert first["rank"] == 0
    for sight in (first, second):
        assert sight["stack"].count(stands) == 1
        assert json.loads(sight["report"])["raised"] == []
