"""The comparison of embedding trainings: its data, and both programs on a few steps."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cpuft.train.embedder import Embedder
from scripts.benchmarks.bench_embeddings import parse_arguments, run_cpuft, run_peer, write_pairs


def test_pairs_have_different_lengths_and_are_always_the_same(tmp_path: Path) -> None:
    first, second = (Path(write_pairs(tmp_path / name, 50)) for name in ("a.csv", "b.csv"))
    assert first.read_text() == second.read_text()
    with first.open(newline="") as file:
        header, *rows = csv.reader(file)
    lengths = {len(anchor.split(". ")) for anchor, _ in rows}
    assert (header, len(rows), lengths) == (["anchor", "positive"], 50, {1, 2, 3, 4, 5, 6})


@pytest.mark.proof
def test_both_programs_tell_their_speed_and_metrics(tmp_path: Path) -> None:
    rows = "sentence1,sentence2,score\n" + "".join(f"cat {n},dog {n % 3},{n / 40}\n" for n in range(40))
    Path("rows.csv").write_text(rows)
    files = ["--train-file", "rows.csv", "--validation-file", "rows.csv"]
    options = parse_arguments(["--task", "scored-pairs", *files, "--steps", "8", "--batch-size", "4"])
    own = run_cpuft(options, 0, tmp_path)
    theirs = run_peer(options, 0, tmp_path, Embedder("minilm").source)
    for found in (own, theirs):
        assert found["samples_per_second"] > 0
        assert set(found["metrics"]) == {"spearman", "pearson"}
