"""What a run's model predicts: `python -m cpuft.train.predict --run=...`, started by `cpuft predict`."""

from __future__ import annotations

import csv
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config import PredictConfig, TrainConfig, option_names, parse_arguments
from cpuft.errors import CpuftError, counted, describe_disk, find_full_disk
from cpuft.files import refuse_special, written_beside
from cpuft.hardware import choose_precision
from cpuft.record import read_record
from cpuft.serialization import load, parse_json
from cpuft.tasks import TASKS, Task
from cpuft.terminal import keep_streams
from cpuft.train.checkpoint.final_model import MODEL_DIR
from cpuft.train.data.archive import UNTAGGED, Prepared, Tokens
from cpuft.train.data.prepare import tokenize
from cpuft.train.data.sources import (
    LABEL_SEPARATOR,
    Examples,
    choose_metrics,
    list_test_splits,
    read_file_to_predict,
    read_glue_file,
    read_splits,
)
from cpuft.train.data.tokenizer import choose_pad_id, load_tokenizer
from cpuft.train.reporter import format_metrics
from cpuft.train.startup import pause_garbage_collection, resume_garbage_collection

Outputs = NDArray[np.float32]
"""A head's, of all rows: shape (rows, classes), of tags (rows, longest row, classes)."""
Cells = tuple[object, ...]

_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_MOST_SCORE = 5.0
"""GLUE's only scores, STS-B's, are from 0 to this."""


def format_classes(task: Task, rows: Examples, outputs: Outputs, tokens: Tokens) -> Iterator[Cells]:
    """A row's likeliest class, and the probability of each."""
    yield ("index", "label", *_name_classes(task))
    for index, chances in enumerate(_softmax(outputs)):
        yield (index, guard_formula(task.labels[int(chances.argmax())]), *_format(chances))


def format_scores(task: Task, rows: Examples, outputs: Outputs, tokens: Tokens) -> Iterator[Cells]:
    """A row's score."""
    yield ("index", "score")
    for index, (score,) in enumerate(outputs.tolist()):
        yield (index, f"{score:.6g}")


def format_several(task: Task, rows: Examples, outputs: Outputs, tokens: Tokens) -> Iterator[Cells]:
    """A row's classes that are likelier than not, and the probability of each by itself."""
    yield ("index", "labels", *_name_classes(task))
    for index, chances in enumerate(1 / (1 + np.exp(-outputs.astype(np.float64)))):
        likely = (label for label, chance in zip(task.labels, chances) if chance > 0.5)
        yield (index, guard_formula(LABEL_SEPARATOR.join(likely)), *_format(chances))


def format_tags(task: Task, rows: Examples, outputs: Outputs, tokens: Tokens) -> Iterator[Cells]:
    """A line a word: its likeliest tag, and the probability of each; nothing of words that the model did not see.

    `tokens` has words' numbers for labels.
    """
    yield ("index", "token", "tag", *_name_classes(task))
    for index, words in enumerate(rows.texts):
        numbers = tokens.labels[tokens.offsets[index] : tokens.offsets[index + 1]]
        places = np.flatnonzero(numbers != UNTAGGED)
        seen = zip(numbers[places].tolist(), _softmax(outputs[index, places]))
        labels = [guard_formula(label) for label in task.labels]
        told = {number: (labels[chances.argmax()], *_format(chances)) for number, chances in seen}
        for number, word in enumerate(words):
            yield (index, guard_formula(word), *told.get(number, [""] * (1 + len(task.labels))))


TABLES: dict[str, Callable[[Task, Examples, Outputs, Tokens], Iterator[Cells]]] = {
    "class": format_classes,
    "score": format_scores,
    "labels": format_several,
    "tags": format_tags,
}
"""By the task's kind."""


def guard_formula(text: str) -> str:
    """The text, with an apostrophe in front where a spreadsheet would run it as a formula.

    That is a text of two characters or more that begins with =, +, -, @, a tab or a carriage return, and is no number.
    """
    if len(text) < 2 or not text.startswith(_FORMULAS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def add_input(rows: Examples, names: Sequence[str], table: Iterator[Cells]) -> Iterator[Cells]:
    """The table with each row's texts behind its index, under `names`; input_NAME where a column has the name."""
    header = next(table)
    yield (header[0], *(guard_formula(f"input_{name}" if name in header else name) for name in names), *header[1:])
    for texts, cells in zip(rows.texts, table, strict=True):
        yield (cells[0], *map(guard_formula, texts), *cells[1:])


def format_submission(task: Task, outputs: Outputs) -> Iterator[Cells]:
    """What the GLUE benchmark takes: each row's label as its files have it, or its score."""
    yield ("index", "prediction")
    for index, row in enumerate(outputs):
        answer = task.labels[int(row.argmax())] if task.labels else f"{min(max(float(row[0]), 0.0), _MOST_SCORE):.3f}"
        yield (index, answer)


def name_submission(task: Task, suffix: str) -> str:
    """The file's name among those that GLUE takes, of a split by what is appended to its metrics' names."""
    part = {"": "-m", "_mismatched": "-mm"}[suffix] if len(task.validation) > 1 else ""
    return f"{task.folder}{part}.tsv"


def _name_classes(task: Task) -> tuple[str, ...]:
    return tuple(f"p_{label}" for label in task.labels)


def _softmax(outputs: Outputs) -> NDArray[np.float64]:
    """Over the last axis."""
    powers = np.exp(outputs - outputs.max(-1, keepdims=True), dtype=np.float64)
    shares: NDArray[np.float64] = powers / powers.sum(-1, keepdims=True)
    return shares


def _format(chances: NDArray[np.float64]) -> list[str]:
    return [f"{chance:.6f}" for chance in chances]


def check_output(path: Path, overwrite: bool = False) -> None:
    """Do nothing when predictions may be written to `path`.

    Raises
    ------
    CpuftError: something is there; with `overwrite` only if it is something else than predictions.
    """
    refuse_special(path)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            begin = file.read(6)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CpuftError(f"{path} cannot be written ({error.strerror}): name another --output") from None
    if begin not in ("index,", "index\t", ""):
        raise CpuftError(f"{path} is there already, and holds no predictions: name another --output")
    if begin and not overwrite:
        raise CpuftError(f"{path} holds predictions already: add --overwrite to replace them, or name another --output")


def write_table(path: Path, rows: Iterator[Cells]) -> None:
    """Write a table whole or not at all: CSV, or with tabs between where the name ends in .tsv."""
    with written_beside(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, "excel-tab" if path.suffix == ".tsv" else "excel", lineterminator="\n").writerows(rows)


_KINDS = {
    "single_label_classification": "class",
    "regression": "score",
    "multi_label_classification": "labels",
}
"""By the head's `problem_type`."""


@dataclass(frozen=True)
class Trained:
    """A run that has a model."""

    model: Path
    train: TrainConfig
    precision: str
    ranks: int
    """Of its evaluation."""
    task: Task
    """With the labels that the model knows."""


def read_trained(run: str) -> Trained:
    """A run and its model. Raises CpuftError: there is none, or it answers no question of rows."""
    record = read_record(run)
    header, model = record.header, Path(run, MODEL_DIR)
    try:
        options = {name: value for name, value in header.options.items() if name in option_names(TrainConfig)}
        train = load(TrainConfig, options, "the record")
        settings = load(dict[str, Any], parse_json((model / "config.json").read_text(encoding="utf-8")))
        named = load(dict[str, str], settings.get("id2label", {}))
        labels = tuple(named[str(number)] for number in range(len(named)))
        (made_as,) = load(list[str], settings.get("architectures"))
    except (OSError, ValueError, KeyError) as error:
        raise CpuftError(f"{run} holds no model that was trained here ({error}): name a finished run") from None
    kind = "tags" if made_as.endswith("ForTokenClassification") else _KINDS.get(str(settings.get("problem_type")), "")
    if not kind or header.task not in TASKS:
        raise CpuftError(f"{run} trained a {made_as} on --task {header.task}, which gives rows no labels: name another")
    task = TASKS[header.task]
    if not task.folder:
        labels = () if kind == "score" else labels
        task = replace(task, labels=labels, kind=kind, metrics=choose_metrics(kind, labels))
    last = record.resumptions[-1] if record.resumptions else header
    return Trained(model, train, last.precision, last.world_size, task)


def read_rows(asked: PredictConfig, run: Trained) -> tuple[Task, dict[str, Examples]]:
    """The rows that are asked for, by what is appended to metrics' names, and the task with their columns.

    Raises CpuftError: they are not there, or not as the task's are.
    """
    like_glue = read_glue_file(run.task, Path(asked.file)) if asked.file and not asked.text_columns else None
    if like_glue:
        return run.task, {"": like_glue}
    if asked.file or run.task.name == "files":
        task, rows = read_file_to_predict(run.task, asked, run.train)
        return task, {"": rows}
    train = replace(run.train, data_dir=asked.data_dir or run.train.data_dir)
    splits = list_test_splits(run.task) if asked.split == "test" else run.task.validation
    return run.task, read_splits(run.task, train, splits)


def name_outputs(asked: PredictConfig, run: Trained, suffixes: list[str]) -> dict[str, Path]:
    """The file of each split's answers. Raises CpuftError: it holds something else."""
    wanted, paths = Path(asked.output), dict[str, Path]()
    for suffix in suffixes:
        if asked.output:
            paths[suffix] = wanted.parent / f"{wanted.stem}{suffix}{wanted.suffix}"
        else:
            test = asked.split == "test"
            paths[suffix] = Path(asked.run, name_submission(run.task, suffix) if test else f"predictions{suffix}.csv")
        check_output(paths[suffix], asked.overwrite)
    return paths


def predict(asked: PredictConfig) -> None:
    """Answer all rows, write that, and print metrics where rows have labels. Raises CpuftError for bad input."""
    run = read_trained(asked.run)
    task, splits = read_rows(asked, run)
    paths = name_outputs(asked, run, list(splits))
    tokenizer = load_tokenizer(str(run.model), task.kind == "tags")
    splits_seen = {suffix: number_words(rows) if task.kind == "tags" else rows for suffix, rows in splits.items()}
    tokens = {suffix: tokenize(rows, tokenizer, run.train.max_length, task) for suffix, rows in splits_seen.items()}
    pad_id = choose_pad_id(replace(run.train, model=str(run.model), from_config=""), tokenizer)
    prepared = Prepared(task.labels, task.metrics, "", pad_id, tokens[""], tokens, task.kind)
    outputs, found = answer(asked, run, prepared, splits)
    for suffix, rows in splits.items():
        test = asked.split == "test"
        table = TABLES[task.kind](task, rows, outputs[suffix], tokens[suffix])
        # The words that tags are for stand in the table anyway.
        if asked.with_input and task.kind != "tags":
            table = add_input(rows, task.texts, table)
        write_table(paths[suffix], format_submission(task, outputs[suffix]) if test else table)
    if found:
        print(format_metrics(found))
    print(f"predictions: {', '.join(map(str, paths.values()))}")


def answer(
    asked: PredictConfig, run: Trained, prepared: Prepared, splits: dict[str, Examples]
) -> tuple[dict[str, Outputs], dict[str, float]]:
    """The head's outputs of each split, and the metrics of those that have labels."""
    # They bring torch, which bad input need not wait for.
    from cpuft.train.evaluate import compute_outputs
    from cpuft.train.fast.acceleration import patch_model
    from cpuft.train.objective.table import make_objective
    from cpuft.train.precision import read_cpu

    wanted = run.precision if asked.precision == "auto" else asked.precision
    # 8 bits are for training only.
    precision = choose_precision("fp32" if wanted == "int8" else wanted, True, read_cpu().flags)
    objective, train = make_objective(run.train, prepared), run.train
    model = objective.load_model(replace(train, model=str(run.model), from_config="", dropout=-1.0, lora_rank=0)).eval()
    if train.fast_path and not train.compile and train.engine == "torch":
        patch_model(model, precision.name)
    resume_garbage_collection()
    start, outputs, found = time.perf_counter(), dict[str, Outputs](), dict[str, float]()
    for suffix, tokens in prepared.validation.items():
        size = asked.batch_size or train.eval_batch_size
        outputs[suffix] = compute_outputs(model, objective, tokens, size, run.ranks, precision.name)
        if splits[suffix].has_labels:
            labelled = tag_tokens(tokens, splits[suffix]) if prepared.kind == "tags" else tokens
            metrics = objective.compute_metrics(objective.reduce_outputs(outputs[suffix]), labelled)
            found |= {name + suffix: value for name, value in metrics.items()}
    count, seconds = sum(map(len, prepared.validation.values())), time.perf_counter() - start
    why = f": {precision.reason}" * (precision.name == "bf16")
    print(
        f"{counted(count, 'row')}, {count / seconds:.1f} rows/s in {precision.name}{why}", file=sys.stderr, flush=True
    )
    return outputs, found


def number_words(rows: Examples) -> Examples:
    """With words' numbers in the place of tags: of a word that the tokenizer leaves out, or cuts off, none is seen."""
    return replace(rows, labels=[tuple(range(len(words))) for words in rows.texts])


def tag_tokens(tokens: Tokens, rows: Examples) -> Tokens:
    """With the words' tags in the place of their numbers."""
    tags = np.concatenate([np.asarray(tags, np.int32) for tags in rows.labels])
    starts = np.cumsum([0, *map(len, rows.texts)])[:-1]
    places = tokens.labels + np.repeat(starts, tokens.lengths)
    return replace(tokens, labels=np.where(tokens.labels == UNTAGGED, UNTAGGED, tags[np.maximum(places, 0)]))


def main() -> None:
    """Predict; exit 2 with one line for bad input, 74 for a full disk."""
    exit_code = 2
    keep_streams()
    pause_garbage_collection()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing half-written stays
    try:
        predict(parse_arguments(PredictConfig, sys.argv[1:]))
    except CpuftError as error:
        said, exit_code = str(error), error.exit_code
    except OSError as error:
        full = find_full_disk(error)
        said, exit_code = (str(full), full.exit_code) if full else (describe_disk(error), 2)
        if not said:
            raise
    else:
        return
    print(f"cpuft: error: {said}", file=sys.stderr, flush=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
