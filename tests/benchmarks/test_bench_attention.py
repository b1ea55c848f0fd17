"""scripts/bench-attention: its table, and options without sense."""

from __future__ import annotations

import re

import pytest

from cpuft.errors import CpuftError
from scripts.benchmarks.bench_attention import parse_arguments, run


@pytest.mark.parametrize("window", ["8", "-1"])
def test_each_length_is_compared_with_the_first(window: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lengths", "16,32", "--window", window, "--heads", "2", "--head-size", "8", "--turns", "3"]
    run(parse_arguments([*words, "--threads", "1"]))
    first, second, cpu = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"16 tokens: [\d.]+ ms, 1\.00 times that of 16 \(1\.00 to 1\.00, 3 turns\)", first)
    assert re.fullmatch(r"32 tokens: [\d.]+ ms, [\d.]+ times that of 16 \([\d.]+ to [\d.]+, 3 turns\)", second)
    assert cpu.startswith("measured on ")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--lengths", "16,many"], "--lengths 16,many is no list of numbers such as 2048,4096"),
        (["--lengths", "0"], "--lengths 0 is no list of numbers such as 2048,4096"),
        (["--turns", "0"], "--turns, --threads, --heads and --head-size must be at least 1, and --window at least -1"),
    ],
)
def test_options_without_sense_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(CpuftError) as error:
        parse_arguments(words)
    assert str(error.value) == message
