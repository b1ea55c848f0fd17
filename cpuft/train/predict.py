"""What a run's model predicts: `python -m cpuft.train.predict --run=...`, started by `cpuft predict`."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config.fields import option_names, parse_arguments
from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, counted
from cpuft.files import refuse_special, write_atomically
from cpuft.hardware import Precision, choose_precision
from cpuft.record import format_metrics, read_record
from cpuft.serialization import load, parse_json
from cpuft.tasks import DECODER_KINDS, EMBEDDING_KINDS, TASKS, Task, find_task
from cpuft.train.checkpoint.final_model import MODEL_DIR
from cpuft.train.data.archive import UNTAGGED, Prepared, Tokens
from cpuft.train.data.prepare import tokenize
from cpuft.train.data.relevance import read_documents_to_predict
from cpuft.train.data.sources import (
    LABEL_SEPARATOR,
    SCORE_KINDS,
    Examples,
    choose_metrics,
    list_test_splits,
    read_file_to_predict,
    read_glue_file,
    read_splits,
)
from cpuft.train.data.tokenizer import choose_pad_id, load_tokenizer
from cpuft.train.startup import resume_garbage_collection, run_as_process

if TYPE_CHECKING:
    from cpuft.train.objective.base import Objective

Outputs = NDArray[np.float32]
"""A head's outputs for all examples: shape (examples, classes); for tags (examples, longest example, classes)."""
Cells = tuple[object, ...]
"""A row of a table: its cells in the order of the columns."""

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_MAX_SCORE = 5.0
"""The scores of STS-B, GLUE's only regression task, are from 0 to this."""


def format_predictions(task: Task, examples: Examples, outputs: Outputs, tokens: Tokens) -> Iterator[Cells]:
    """Yield the table of the predictions for examples, or of tags for their words; first its header.

    Scores of rerankers have nine digits, which tell all fp32 numbers apart. Words that were cut off, or that the
    tokenizer drops, have empty cells in place of tag and probabilities. `tokens` has effect for tags only: the tokens
    of these examples with the numbers of words as labels, made from `number_words`.
    """
    labels = [guard_formula(label) for label in task.labels]
    classes = [f"p_{label}" for label in task.labels]
    if task.kind in SCORE_KINDS:
        digits = 9 if task.kind == "relevance" else 6
        yield ("index", "score")
        for index, (score,) in enumerate(outputs.tolist()):
            yield (index, f"{score:.{digits}g}")
    elif task.kind == "class":
        yield ("index", "label", *classes)
        for index, probabilities in enumerate(_softmax(outputs)):
            yield (index, labels[probabilities.argmax()], *_format(probabilities))
    elif task.kind == "labels":
        yield ("index", "labels", *classes)
        for index, probabilities in enumerate(1 / (1 + np.exp(-outputs.astype(np.float64)))):
            likely = (label for label, probability in zip(task.labels, probabilities) if probability > 0.5)
            yield (index, guard_formula(LABEL_SEPARATOR.join(likely)), *_format(probabilities))
    else:
        yield ("index", "token", "tag", *classes)
        for index, words in enumerate(examples.texts):
            numbers = tokens.labels[tokens.offsets[index] : tokens.offsets[index + 1]]
            places = np.flatnonzero(numbers != UNTAGGED)
            seen = zip(numbers[places].tolist(), _softmax(outputs[index, places]))
            predicted = {number: (labels[one.argmax()], *_format(one)) for number, one in seen}
            for number, word in enumerate(words):
                yield (index, guard_formula(word), *predicted.get(number, [""] * (1 + len(labels))))


def guard_formula(text: str) -> str:
    """Return the text, with an apostrophe in front if a spreadsheet would run it as a formula; numbers stay."""
    if len(text) < 2 or not text.startswith(_FORMULA_STARTS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def add_input(examples: Examples, names: Sequence[str], table: Iterator[Cells]) -> Iterator[Cells]:
    """Yield a table with the texts of each example after its index; a column name that is taken becomes input_NAME."""
    header = next(table)
    yield (header[0], *(guard_formula(f"input_{name}" if name in header else name) for name in names), *header[1:])
    for texts, cells in zip(examples.texts, table, strict=True):
        yield (cells[0], *map(guard_formula, texts), *cells[1:])


def format_submission(task: Task, outputs: Outputs) -> Iterator[Cells]:
    """Yield the table that the GLUE benchmark takes, with a header: each label as in its files, or a score, 0 to 5."""
    yield ("index", "prediction")
    for index, output in enumerate(outputs):
        score = f"{min(max(float(output[0]), 0.0), _MAX_SCORE):.3f}"
        yield (index, task.labels[int(output.argmax())] if task.labels else score)


def name_submission(task: Task, suffix: str) -> str:
    """Return the name of a split's file in a GLUE submission, for example MRPC.tsv, MNLI-m.tsv or MNLI-mm.tsv."""
    part = {"": "-m", "_mismatched": "-mm"}[suffix] if len(task.validation) > 1 else ""
    return f"{task.folder}{part}.tsv"


def _softmax(outputs: Outputs) -> NDArray[np.float64]:
    powers = np.exp(outputs - outputs.max(-1, keepdims=True), dtype=np.float64)
    probabilities: NDArray[np.float64] = powers / powers.sum(-1, keepdims=True)
    return probabilities


def _format(probabilities: NDArray[np.float64]) -> list[str]:
    return [f"{probability:.6f}" for probability in probabilities]


def check_output(path: Path, overwrite: bool = False, has_json_lines: bool = False) -> None:
    """Raise CpuftError if predictions may not be written to `path`; with `overwrite`, predictions may be replaced."""
    refuse_special(path)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            begin = file.read(9)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CpuftError(f"{path} cannot be written ({error.strerror}): give another --output") from None
    if begin and not begin.startswith('{"index":' if has_json_lines else ("index,", "index\t")):
        raise CpuftError(f"{path} exists and holds no predictions: give another --output")
    if begin and not overwrite:
        raise CpuftError(f"{path} holds predictions already: add --overwrite to replace them, or give another --output")


def write_table(path: Path, rows: Iterator[Cells]) -> None:
    """Write a table completely or not at all: as CSV, or with tabs if the name ends in .tsv."""
    with write_atomically(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, "excel-tab" if path.suffix == ".tsv" else "excel", lineterminator="\n").writerows(rows)


_TASK_KINDS = {
    "single_label_classification": "class",
    "regression": "score",
    "multi_label_classification": "labels",
}
"""The kind of the task by `problem_type` in the model's configuration."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that has saved a model."""

    model: Path
    train: TrainConfig
    precision: str
    """The precision in which the run, or its last resumption, computed: fp32, bf16 or int8."""
    ranks: int
    """Number of ranks that have evaluated the model."""
    task: Task
    """The task, with its kind and, for tasks that are not GLUE's, the labels that the model knows."""

    @property
    def saved(self) -> TrainConfig:
        """The options with which the saved model is loaded. Its adapters are merged into their base model."""
        return replace(self.train, model=str(self.model), from_config="", dropout=-1.0, lora_rank=0)


def read_finished_run(run: str) -> FinishedRun:
    """Read a run's record and its model's configuration, no weights. Raises CpuftError: no model was saved there."""
    record = read_record(run)
    header, model = record.header, Path(run, MODEL_DIR)
    last = record.resumptions[-1] if record.resumptions else header
    try:
        options = {name: value for name, value in header.options.items() if name in option_names(TrainConfig)}
        train = load(TrainConfig, options, "the record")
        settings = load(dict[str, Any], parse_json((model / "config.json").read_text(encoding="utf-8")))
        if header.task in TASKS and find_task(header.task, train.causal).kind in DECODER_KINDS:
            task = find_task(header.task, train.causal)
            return FinishedRun(model, train, last.precision, last.world_size, task)
        named = load(dict[str, str], settings.get("id2label", {}))
        labels = tuple(named[str(number)] for number in range(len(named)))
        (architecture,) = load(list[str], settings.get("architectures"))
    except (OSError, ValueError, KeyError) as error:
        raise CpuftError(f"{run} holds no model that was trained here ({error}): give a finished run") from None
    if header.task in TASKS and TASKS[header.task].kind in EMBEDDING_KINDS:
        # How the model makes embeddings is in the files beside it, whatever the options of the training were.
        own = replace(train, model=str(model), pooling="auto", query_prompt="auto", document_prompt="auto")
        return FinishedRun(model, own, last.precision, last.world_size, TASKS[header.task])
    kind = (
        "tags"
        if architecture.endswith("ForTokenClassification")
        else _TASK_KINDS.get(str(settings.get("problem_type")), "")
    )
    if header.task in TASKS and TASKS[header.task].kind == "relevance":
        kind = "relevance"
    if not kind or header.task not in TASKS:
        raise CpuftError(
            f"{run} trained a {architecture} on --task {header.task}, which predicts no labels: give another run"
        )
    task = TASKS[header.task]
    if not task.folder:
        labels = () if kind in SCORE_KINDS else labels
        metrics = task.metrics if kind == "relevance" else choose_metrics(kind, labels)
        task = replace(task, labels=labels, kind=kind, metrics=metrics)
    return FinishedRun(model, train, last.precision, last.world_size, task)


def read_examples(request: PredictConfig, run: FinishedRun) -> tuple[Task, dict[str, Examples]]:
    """Read the examples of --file, else of --split; for a run of --task files, that is its validation file.

    Returns the task with the columns of the examples, and the examples of each split, by the suffix of its metrics'
    names (`""`, and for MNLI also `_mismatched`). Raises CpuftError: they cannot be read, or do not fit the task.
    """
    glue_examples = read_glue_file(run.task, Path(request.file)) if request.file and not request.text_columns else None
    if glue_examples:
        return run.task, {"": glue_examples}
    if run.task.kind == "relevance":
        task, examples = read_documents_to_predict(run.task, request, run.train)
        return task, {"": examples}
    if request.file or run.task.name == "files":
        task, examples = read_file_to_predict(run.task, request, run.train)
        return task, {"": examples}
    train = replace(run.train, data_dir=request.data_dir or run.train.data_dir)
    splits = list_test_splits(run.task) if request.split == "test" else run.task.validation
    return run.task, read_splits(run.task, train, splits)


def _name_outputs(request: PredictConfig, run: FinishedRun, suffixes: list[str]) -> dict[str, Path]:
    """Return for each suffix of a split's metrics the file for its predictions, after `check_output`."""
    output, paths = Path(request.output), dict[str, Path]()
    for suffix in suffixes:
        if request.output:
            paths[suffix] = output.parent / f"{output.stem}{suffix}{output.suffix}"
        else:
            is_test = request.split == "test"
            name = name_submission(run.task, suffix) if is_test else f"predictions{suffix}.csv"
            paths[suffix] = Path(request.run, name)
        check_output(paths[suffix], request.overwrite)
    return paths


def predict(request: PredictConfig) -> None:
    """Predict all examples, write the predictions of each split to its file, and print metrics and the names of the
    files. Raises CpuftError: the run, the examples or the output cannot be used.
    """
    run = read_finished_run(request.run)
    task, splits = read_examples(request, run)
    paths = _name_outputs(request, run, list(splits))
    numbered = {suffix: number_words(split) if task.kind == "tags" else split for suffix, split in splits.items()}
    prepared = tokenize_splits(run, task, numbered)
    tokens = prepared.validation
    outputs, metrics = _compute_predictions(request, run, prepared, splits)
    for suffix, examples in splits.items():
        table = format_predictions(task, examples, outputs[suffix], tokens[suffix])
        # A table of tags contains the words anyway.
        if request.with_input and task.kind != "tags":
            table = add_input(examples, task.texts, table)
        write_table(paths[suffix], format_submission(task, outputs[suffix]) if request.split == "test" else table)
    if metrics:
        print(format_metrics(metrics))
    print(f"predictions: {', '.join(map(str, paths.values()))}")


def tokenize_splits(run: FinishedRun, task: Task, splits: dict[str, Examples]) -> Prepared:
    """Tokenise splits of examples as the run did; return them as `Prepared.validation`, with the same suffixes.
    `splits` must have the suffix "", whose tokens are also `Prepared.train`; the checksum is left empty. Raises
    CpuftError: the tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(str(run.model), task.kind == "tags")
    tokens = {suffix: tokenize(split, tokenizer, run.train.max_length, task) for suffix, split in splits.items()}
    pad_id = choose_pad_id(run.saved, tokenizer)
    return Prepared(task.labels, task.metrics, "", pad_id, tokens[""], tokens, task.kind)


def make_run_model(run: FinishedRun, prepared: Prepared) -> tuple[Objective, Any]:
    """Return the objective for these examples, and the run's model (evaluation mode, fp32, no fast path). Raises
    CpuftError: it cannot be loaded.
    """
    from cpuft.train.objective.table import make_objective  # imports torch

    objective = make_objective(run.saved, prepared)
    return objective, objective.load_model(run.saved).eval()


def choose_run_precision(run: FinishedRun, requested: str) -> Precision:
    """Return the precision to predict in: for auto that of the run (fp32 for int8); bf16 also where it is emulated."""
    from cpuft.train.precision import read_cpu  # imports torch

    wanted = run.precision if requested == "auto" else requested
    return choose_precision("fp32" if wanted == "int8" else wanted, True, read_cpu().flags)  # int8 is for training only


def use_fast_path(run: FinishedRun, model: Any, precision: str) -> None:
    """Put the layers of the fast path into the model, in place, if the run trained with them."""
    from cpuft.train.fast.acceleration import patch_model  # imports torch

    if run.train.fast_path and not run.train.compile and run.train.engine == "torch":
        patch_model(model, precision)


def _compute_predictions(
    request: PredictConfig, run: FinishedRun, prepared: Prepared, splits: dict[str, Examples]
) -> tuple[dict[str, Outputs], dict[str, float]]:
    """Return the outputs of each split by its suffix, and the metrics of splits with labels; print the speed."""
    # Imported here because it imports torch, for which an error about bad input should not wait.
    from cpuft.train.evaluate import compute_outputs

    precision = choose_run_precision(run, request.precision)
    objective, model = make_run_model(run, prepared)
    use_fast_path(run, model, precision.name)
    resume_garbage_collection()
    start, outputs, metrics = time.perf_counter(), dict[str, Outputs](), dict[str, float]()
    for suffix, tokens in prepared.validation.items():
        size = request.batch_size or run.train.eval_batch_size
        outputs[suffix] = compute_outputs(model, objective, tokens, size, run.ranks, precision.name)
        if splits[suffix].has_labels:
            labelled = tag_tokens(tokens, splits[suffix]) if prepared.kind == "tags" else tokens
            found = objective.compute_metrics(objective.reduce_outputs(outputs[suffix]), labelled)
            metrics |= {name + suffix: value for name, value in found.items()}
    count, seconds = sum(map(len, prepared.validation.values())), time.perf_counter() - start
    reason = f": {precision.reason}" * (precision.name == "bf16")
    speed = f"{counted(count, 'example')}, {count / seconds:.1f} examples/s in {precision.name}{reason}"
    print(speed, file=sys.stderr, flush=True)
    return outputs, metrics


def number_words(examples: Examples) -> Examples:
    """Return the examples with the numbers of words as labels, which show after tokenising which words were kept."""
    return replace(examples, labels=[tuple(range(len(words))) for words in examples.texts])


def tag_tokens(tokens: Tokens, examples: Examples) -> Tokens:
    """Return tokens, made of `number_words`, with the tags of the numbered words as labels; UNTAGGED stays."""
    tags = np.concatenate([np.asarray(tags, np.int32) for tags in examples.labels])
    starts = np.cumsum([0, *map(len, examples.texts)])[:-1]
    places = tokens.labels + np.repeat(starts, tokens.lengths)
    return replace(tokens, labels=np.where(tokens.labels == UNTAGGED, UNTAGGED, tags[np.maximum(places, 0)]))


def main() -> None:
    """Predict as the command line says; the exit code is that of `run_as_process`."""
    run_as_process(lambda: predict(parse_arguments(PredictConfig, sys.argv[1:])))


if __name__ == "__main__":
    main()
