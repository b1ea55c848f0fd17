"""Run by scripts/check-fit: compare the memory that `cpuft launch` estimates with what ranks use."""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from cpuft.config.train import TrainConfig
from cpuft.record import Record, drop_warm_up, read_record
from cpuft.serialization import load
from cpuft.terminal import format_table
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.prepare import prepare
from cpuft.train.memory_estimate import estimate_rank
from cpuft.train.model import find_model
from cpuft.train.model_shape import find_shape

MOST_WRONG = 0.10
COLUMNS = ("model", "rows", "length", "precision", "ranks", "options", "s a step", "GB", "foretold", "off by")
_TEXT = "the river runs by a house of stone and under old trees " * 50


@dataclass(frozen=True)
class Case:
    """A training whose examples all have the full length."""

    model: str
    batch: int
    length: int
    precision: str
    ranks: int = 1
    options: tuple[str, ...] = ()
    task: str = "files"


CASES = (
    Case("minilm", 32, 128, "bf16"),
    Case("minilm", 32, 128, "fp32"),
    Case("minilm", 32, 512, "bf16", 1, ("--gradient-checkpointing",)),
    Case("bert-base", 8, 512, "bf16"),
    Case("bert-base", 8, 512, "bf16", 1, ("--gradient-checkpointing",)),
    Case("bert-base", 8, 128, "fp32"),
    Case("bert-base", 8, 128, "bf16", 2),
    Case("bert-base", 8, 128, "bf16", 2, ("--shard", "optimizer")),
    Case("minilm", 32, 128, "bf16", 1, (), "text"),
    Case("bert-base", 8, 128, "bf16", 1, (), "text"),
)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options, and the remaining arguments, which are for `cpuft launch`."""
    parser = argparse.ArgumentParser(prog="scripts/check-fit", description=__doc__, epilog="Others: cpuft launch's.")
    parser.add_argument("--steps", type=int, default=4, help="updates of each training [4]")
    parser.add_argument("--only", default="", help="numbers of cases, from 1, separated by commas [all]")
    known, others = parser.parse_known_args(words)
    known.options = others
    return known


def write_rows(path: Path, count: int) -> None:
    """Write examples that are longer than any maximum length."""
    lines = [f"{_TEXT},{number % 2}" for number in range(count)]
    path.write_text("\n".join(["text,label", *lines, ""]), encoding="utf-8")
    path.with_suffix(".txt").write_text("\n".join([_TEXT] * count), encoding="utf-8")


def make_base(folder: Path) -> None:
    """Save a model of the size of BERT-base with random weights and MiniLM's tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification

    for path in Path(find_model("minilm")).glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy(Path(find_model("minilm"), "vocab.txt"), folder)
    BertForSequenceClassification(BertConfig()).save_pretrained(folder)


def plan_launch(case: Case, folder: Path, asked: argparse.Namespace, run_dir: Path) -> list[str]:
    """Return the arguments of `cpuft launch` for a case."""
    model = str(folder / "base") if case.model == "bert-base" else case.model
    kind = {"files": "csv", "text": "txt"}[case.task]
    rows = ["--task", case.task, "--train-file", str(folder / f"train.{kind}")]
    rows += ["--validation-file", str(folder / f"validation.{kind}"), "--max-length", str(case.length)]
    size = ["--batch-size", str(case.batch), "--precision", case.precision, "--np", str(case.ranks)]
    own = ["--max-steps", str(asked.steps), "--no-save-model", "--no-check", "--run-dir", str(run_dir)]
    return ["launch", "--model", model, *rows, *size, *case.options, *own, *asked.options]


def estimate(case: Case, record: Record) -> dict[str, int]:
    """Return the memory estimate of the first rank by part, as the preparation of a run reports it."""
    config = replace(load(TrainConfig, record.header.options), precision=record.header.precision)
    prepared = read_prepared(str(prepare(config)))
    return estimate_rank(find_shape(config, prepared.vocab_size), config, prepared, case.ranks, True)


def format_row(case: Case, record: Record, foretold: int) -> list[str]:
    """Return the cells of a case."""
    assert record.footer, "the run broke off"
    measured = record.footer.peak_memory_bytes
    seconds = statistics.median(line.step_seconds for line in drop_warm_up(record.steps)[1:])
    options = " ".join([*case.options, *(["--task text"] if case.task == "text" else [])])
    sizes = [str(case.batch), str(case.length), case.precision, str(case.ranks), options]
    figures = [f"{seconds:.2f}", f"{measured / 1e9:.2f}", f"{foretold / 1e9:.2f}", f"{foretold / measured - 1:+.1%}"]
    return [case.model, *sizes, *figures]


def is_wrong(row: list[str]) -> bool:
    """Return whether the estimate of a case is too wrong."""
    return abs(float(row[-1].rstrip("%"))) > 100 * MOST_WRONG


def main() -> None:
    """Exit with 1 if an estimate is wrong by more than `MOST_WRONG`."""
    asked, rows = parse(), []
    numbers = [int(number) for number in asked.only.split(",") if number] or range(1, len(CASES) + 1)
    with tempfile.TemporaryDirectory(prefix="check-fit-") as name:
        folder = Path(name)
        (folder / "base").mkdir()
        make_base(folder / "base")
        write_rows(folder / "train.csv", 256)
        write_rows(folder / "validation.csv", 32)
        for number in numbers:
            run_dir, case = folder / f"run-{number}", CASES[number - 1]
            words = plan_launch(case, folder, asked, run_dir)
            subprocess.run([sys.executable, "-m", "cpuft", *words], check=True, stdout=subprocess.DEVNULL)
            record = read_record(str(run_dir))
            parts = estimate(case, record)
            rows.append(format_row(case, record, sum(parts.values())))
            print(" ".join(rows[-1]), {part: f"{size / 1e9:.2f}" for part, size in parts.items()}, flush=True)
    print(format_table(COLUMNS, rows, "Peak memory of a rank, measured and foretold", left=1))
    sys.exit(any(map(is_wrong, rows)))


if __name__ == "__main__":
    main()
