"""How many runs of a sweep train at a time on this machine (`--parallel auto`): the first configuration is measured."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cpuft import execute
from cpuft.argv import module_command
from cpuft.errors import CpuftError, counted
from cpuft.record import FILE_NAME, StepLine, parse_lines
from cpuft.serialization import is_count
from cpuft.sweep.places import Place
from cpuft.sweep.queue import find_reason, interrupt

AUTO = "auto"
_MANY_CORES = 16
"""With so many cores, four runs at a time are measured, too."""
_MOST_STEPS = 5000
"""Updates of a measured run. It is stopped long before, so that it does not evaluate."""
_WARM_UP_STEPS = 2
"""The first updates of a run are not measured, because memory is allocated and kernels are chosen in them."""
_LEAST_STEPS = 3
"""Updates that each run makes while it is measured, even if they take long."""
_SECONDS = 6.0
"""The least time of a measurement, after all runs have warmed up."""
_MOST_SECONDS = 60.0
"""The most time of a measurement."""
_START_SECONDS = 600.0
"""How long runs may take to start; the first one prepares the examples, which the sweep then reuses."""
_END_SECONDS = 15.0
"""How long runs may take to end after a signal, before they are killed. Their checkpoints are not needed."""
_POLL_SECONDS = 0.5


def parse_parallel(text: str) -> int | None:
    """Return the number of --parallel: 0 for "", None for "auto". Raises CpuftError: another text."""
    if text == AUTO:
        return None
    if text and not is_count(text, least=0):
        raise CpuftError(f"--parallel {text[:60]!r} is not a number of runs: give a whole number, or {AUTO}")
    return int(text or "0")


def list_candidates(cores: Sequence[tuple[int, ...]], runs: int) -> list[int]:
    """Return the numbers of runs at a time to try, up to `runs`: 1, 2 with two hardware threads, 4 with 16 cores."""
    numbers = [1] + [2] * (sum(map(len, cores)) >= 2) + [4] * (len(cores) >= _MANY_CORES)
    return [number for number in numbers if number <= max(1, runs)]


def choose_parallel(rates: Mapping[int, float]) -> int:
    """Return the number of runs at a time with the most samples per second; of equal ones, the smallest."""
    return max(sorted(rates), key=lambda number: rates[number])


def describe_choice(rates: Mapping[int, float]) -> str:
    """Return one line with the samples per second, or "not measured" for 0, and the number that was chosen."""
    told = {number: f"{rate:.1f} samples/s" if rate else "not measured" for number, rate in sorted(rates.items())}
    parts = ", ".join(f"{counted(number, 'run')} at a time {text}" for number, text in told.items())
    best = choose_parallel(rates)
    return f"--parallel {AUTO}, measured with the first configuration: {parts}; chosen: {best} at a time"


def measure_parallel(
    divided: Mapping[int, Sequence[Place]], options: Sequence[str], say: Callable[[str], None]
) -> dict[int, float]:
    """Train some seconds with each number of runs at a time; return by number the samples/s of all, 0 if one fails."""
    rates = dict[int, float]()
    for number, places in divided.items():
        say(f"--parallel {AUTO}: measuring {counted(number, 'run')} at a time")
        with tempfile.TemporaryDirectory(prefix="cpuft-parallel-", ignore_cleanup_errors=True) as folder:
            names = [f"run-{place}" for place in range(1, number + 1)]
            commands = [
                [
                    *(*place.prefix, *module_command(sys.executable, "cpuft"), "launch", *options, *place.options),
                    *(f"--max-steps={_MOST_STEPS}", "--no-save-model", "--report-to=", "--no-check"),
                    *("--run-dir", str(Path(folder, name))),
                ]
                for place, name in zip(places, names, strict=True)
            ]
            rates[number] = _measure(folder, names, commands)
            if not rates[number]:
                reason = find_reason(Path(folder, f"{names[0]}.log"))
                say(f"--parallel {AUTO}: {counted(number, 'run')} at a time could not be measured ({reason})")
    return rates


def _measure(folder: str, names: Sequence[str], commands: Sequence[Sequence[str]]) -> float:
    """Start runs at the same time, and return their samples per second while all of them train; 0 if one does not."""
    processes = list[execute.Process]()
    with execute.signals_raise():
        try:
            for name, command in zip(names, commands, strict=True):
                processes.append(execute.start_with_log(command, os.environ, str(Path(folder, f"{name}.log"))))
            return _watch([Path(folder, name, FILE_NAME) for name in names], processes)
        finally:
            _end(processes)


def _watch(records: Sequence[Path], processes: Sequence[execute.Process]) -> float:
    """Return the samples per second of all runs together while all train; 0 if one ends too early or starts late."""
    started = time.monotonic()
    while time.monotonic() < started + _START_SECONDS:
        before = [len(read_steps(path)) for path in records]
        if min(before) >= _WARM_UP_STEPS:
            break
        if any(process.poll() is not None for process in processes):
            return 0.0
        time.sleep(_POLL_SECONDS)
    else:
        return 0.0
    begun = time.monotonic()
    while True:
        has_ended = any(process.poll() is not None for process in processes)
        steps = [read_steps(path)[count:] for path, count in zip(records, before, strict=True)]
        passed, least = time.monotonic() - begun, min(map(len, steps))
        if has_ended or passed > _MOST_SECONDS or (passed > _SECONDS and least >= _LEAST_STEPS):
            return sum(map(find_rate, steps)) if least else 0.0
        time.sleep(_POLL_SECONDS)


def read_steps(record: Path) -> list[StepLine]:
    """Return the updates in a record that is still being written; [] if the file is missing or damaged."""
    with suppress(OSError, CpuftError):
        return [line for line in parse_lines(record.read_text(errors="replace"), str(record)) if type(line) is StepLine]
    return []


def find_rate(steps: Sequence[StepLine]) -> float:
    """Return the samples per second of some updates; 0 for none."""
    seconds = sum(line.step_seconds for line in steps)
    return sum(line.samples for line in steps) / seconds if seconds > 0 else 0.0


def _end(processes: Sequence[execute.Process]) -> None:
    """End launches: the first signal lets them save a checkpoint, the second one does not wait for that."""
    try:
        for _ in range(2):
            interrupt(processes, _END_SECONDS / 2)
    finally:
        execute.stop_processes(processes)
