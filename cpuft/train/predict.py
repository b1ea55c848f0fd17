"""What a run's model says of rows, on this machine: `python -m cpuft.train.predict --run=...`, by `cpuft predict`."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cpuft.config import PredictConfig, TrainConfig, option_names, parse_arguments
from cpuft.errors import CpuftError, counted, describe_disk, find_full_disk
from cpuft.hardware import choose_precision
from cpuft.record import read_record
from cpuft.serialization import load, parse_json
from cpuft.terminal import keep_streams
from cpuft.train.answers import (
    TABLES,
    Outputs,
    add_input,
    check_output,
    format_submission,
    name_submission,
    write_table,
)
from cpuft.train.checkpoint.final_model import MODEL_DIR
from cpuft.train.data.own import choose_metrics, read_asked
from cpuft.train.data.prepare import UNTAGGED, Prepared, Tokens, tokenize
from cpuft.train.data.rows import name_tests, read_as_glue, read_splits
from cpuft.train.data.tasks import TASKS, Rows, Task
from cpuft.train.model import choose_pad_id, load_tokenizer
from cpuft.train.reporter import format_metrics
from cpuft.train.startup import hurry, settle

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


def read_rows(asked: PredictConfig, run: Trained) -> tuple[Task, dict[str, Rows]]:
    """The rows that are asked for, by what is appended to metrics' names, and the task with their columns.

    Raises CpuftError: they are not there, or not as the task's are.
    """
    like_glue = read_as_glue(run.task, Path(asked.file)) if asked.file and not asked.text_columns else None
    if like_glue:
        return run.task, {"": like_glue}
    if asked.file or run.task.name == "files":
        task, rows = read_asked(run.task, asked, run.train)
        return task, {"": rows}
    train = replace(run.train, data_dir=asked.data_dir or run.train.data_dir)
    splits = name_tests(run.task) if asked.split == "test" else run.task.validation
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
    asked: PredictConfig, run: Trained, prepared: Prepared, splits: dict[str, Rows]
) -> tuple[dict[str, Outputs], dict[str, float]]:
    """The head's outputs of each split, and the metrics of those that have labels."""
    # They bring torch, which bad input need not wait for.
    from cpuft.train.evaluate import ask_all
    from cpuft.train.fast.acceleration import patch_model
    from cpuft.train.objective import make_objective
    from cpuft.train.run import read_cpu

    wanted = run.precision if asked.precision == "auto" else asked.precision
    # 8 bits are for training only.
    precision = choose_precision("fp32" if wanted == "int8" else wanted, True, read_cpu().flags)
    objective, train = make_objective(run.train, prepared), run.train
    model = objective.load_model(replace(train, model=str(run.model), from_config="", dropout=-1.0, lora_rank=0)).eval()
    if train.fast_path and not train.compile and train.engine == "torch":
        patch_model(model, precision.name)
    settle()
    start, outputs, found = time.perf_counter(), dict[str, Outputs](), dict[str, float]()
    for suffix, tokens in prepared.validation.items():
        size = asked.batch_size or train.eval_batch_size
        outputs[suffix] = ask_all(model, objective, tokens, size, run.ranks, precision.name)
        if splits[suffix].labelled:
            labelled = tag_tokens(tokens, splits[suffix]) if prepared.kind == "tags" else tokens
            metrics = objective.measure(objective.decide(outputs[suffix]), labelled)
            found |= {name + suffix: value for name, value in metrics.items()}
    count, seconds = sum(map(len, prepared.validation.values())), time.perf_counter() - start
    why = f": {precision.reason}" * (precision.name == "bf16")
    print(
        f"{counted(count, 'row')}, {count / seconds:.1f} rows/s in {precision.name}{why}", file=sys.stderr, flush=True
    )
    return outputs, found


def number_words(rows: Rows) -> Rows:
    """With words' numbers in the place of tags: of a word that the tokenizer leaves out, or cuts off, none is seen."""
    return replace(rows, labels=[tuple(range(len(words))) for words in rows.texts])


def tag_tokens(tokens: Tokens, rows: Rows) -> Tokens:
    """With the words' tags in the place of their numbers."""
    tags = np.concatenate([np.asarray(tags, np.int32) for tags in rows.labels])
    starts = np.cumsum([0, *map(len, rows.texts)])[:-1]
    places = tokens.labels + np.repeat(starts, tokens.lengths)
    return replace(tokens, labels=np.where(tokens.labels == UNTAGGED, UNTAGGED, tags[np.maximum(places, 0)]))


def main() -> None:
    """Predict; exit 2 with one line for bad input, 74 for a full disk."""
    exit_code = 2
    keep_streams()
    hurry()
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
