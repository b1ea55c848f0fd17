"""scripts/bench-memory: that memory which goes back to the kernel is found by its page faults, and bad options."""

from __future__ import annotations

import re

import pytest

from cpuft.errors import CpuftError
from scripts.benchmarks.bench_memory import parse_arguments, run


@pytest.mark.real
@pytest.mark.proof
@pytest.mark.alone  # other programs change when the kernel gives large pages
def test_a_process_faults_unless_it_keeps_freed_memory(capsys: pytest.CaptureFixture[str]) -> None:
    run(parse_arguments(["--rounds", "3", "--repeats", "20"]))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    # The most of three processes, because one that has freed nothing large may keep its memory after some time.
    faults = {line.split("  ")[0]: float(line.split()[-1].rstrip(")")) for line in lines if line.startswith("has ")}
    pages = 3 * 1728 * 1536 * 2 / 4096  # of the three results, in bf16; fewer faults if the kernel gives large pages
    kept = faults["has cpuft's settings"]
    assert kept < pages / 8
    assert faults["has freed nothing large"] > max(4, 4 * kept)
    assert re.search(r", \d+ cores?$", lines[-1])


@pytest.mark.parametrize("option", ["--rounds", "--repeats", "--threads"])
def test_options_without_sense_are_refused(option: str) -> None:
    with pytest.raises(CpuftError) as error:
        parse_arguments([option, "0"])
    assert str(error.value) == "--rounds, --repeats and --threads must be at least 1"
