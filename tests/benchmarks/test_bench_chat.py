"""scripts/bench-chat: its conversations, a turn of cpuft on a decoder of one layer, and options without sense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.bench_chat import main, write_conversations


def read_lengths(texts: str) -> list[int]:
    """The number of messages of each conversation."""
    return [len(json.loads(line)["messages"]) for line in Path(texts).read_text(encoding="utf-8").splitlines()]


def test_conversations_of_full_length_have_more_tokens_than_are_trained(tmp_path: Path) -> None:
    mixed = read_lengths(write_conversations(tmp_path / "mixed", 20, 600))
    full = read_lengths(write_conversations(tmp_path / "full", 20, 600, True))
    # A pair of messages has about 30 tokens.
    assert min(mixed) < 20 < max(mixed) <= 40
    assert full == [80] * 20


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.benchmarks.bench_chat", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.real
@pytest.mark.proof
def test_a_turn_of_cpuft_alone_has_a_speed_and_no_ratio() -> None:
    words = ["--model", "gemma-3-270m", "--layers", "1", "--max-length", "64", "--batch-size", "2", "--full-length"]
    words += ["--steps", "2", "--warm-up", "1", "--rounds", "1", "--contestants", "cpuft", "--gradient-checkpointing"]
    done = run(*words, "--cpuft-options", "--base-precision bf16")
    assert done.returncode == 0, done.stderr
    turn, cpu = done.stdout.splitlines()
    found = json.loads(turn)
    assert found.keys() == {"seed", "cpuft"}
    assert found["cpuft"]["samples_per_second"] > 0
    assert found["cpuft"]["peak_megabytes"] > 100
    assert cpu.startswith("measured on ")


@pytest.mark.parametrize(
    "words, message",
    [
        (("--contestants", "cpuft,TLR"), "--contestants: 'TLR' is unknown: did you mean TRL?"),
        (("--steps", "2", "--warm-up", "2"), "--warm-up 2 leaves no update to measure of --steps 2: raise --steps"),
        (("--vocabulary", "100"), "--vocabulary must be at least 30522, the size of MiniLM's vocabulary"),
        (("--max-length", "30"), "--max-length must be at least 60, about two questions with their answers"),
    ],
)
def test_options_without_sense_are_one_line(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench-chat", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"bench-chat: {message}\n")
