"""What a run's model predicts: `python -m cpuft.train.predict --run=...`, started by `cpuft predict`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config.fields import option_names, parse_arguments
from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, counted, describe_error
from cpuft.hardware import Precision, choose_precision
from cpuft.judge.predictions import FILE_NAME, About, RunPredictions
from cpuft.judge.tables import describe_judgement
from cpuft.judge.threshold import DEFAULT, find_threshold
from cpuft.record import format_metrics, read_record
from cpuft.serialization import load, parse_json
from cpuft.tasks import DECODER_KINDS, EMBEDDING_KINDS, TASKS, Task, find_task
from cpuft.train.checkpoint.final_model import MODEL_DIR
from cpuft.train.data.archive import UNTAGGED, Prepared, Tokens
from cpuft.train.data.labels import SCORE_KINDS, choose_metrics
from cpuft.train.data.prepare import tokenize
from cpuft.train.data.relevance import read_documents_to_predict
from cpuft.train.data.sources import Examples, list_test_splits, read_file_to_predict, read_glue_file, read_splits
from cpuft.train.data.tokenizer import choose_pad_id, load_tokenizer
from cpuft.train.data.write_tables import Column, check_output, write_table
from cpuft.train.startup import resume_garbage_collection, run_as_process

if TYPE_CHECKING:
    from cpuft.train.objective.base import Objective

Outputs = NDArray[np.float32]
"""A head's outputs for all examples: shape (examples, classes); for tags (examples, longest example, classes)."""
Cells = tuple[Any, ...]
"""A row of a table: its cells in the order of the columns."""
Table = tuple[list[Column], Iterator[Cells]]
Given = Sequence[tuple[str, Sequence[Any]]]
"""Columns of the input that are written beside the predictions: their names, and a cell for each example."""

_INDEX = Column("index", "int64")
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_MAX_SCORE = 5.0
"""The scores of STS-B, GLUE's only regression task, are from 0 to this."""


def tabulate_predictions(
    task: Task, examples: Examples, outputs: Outputs, tokens: Tokens, given: Given, threshold: float = DEFAULT
) -> Table:
    """Return the columns and rows of a file of predictions: a row for each example, or for tags for each word.

    The columns are index, those of `given`, token for tags, label if the examples have labels, prediction, and the
    probability p_NAME of each class. Words that were cut off, or that the tokenizer drops, have no prediction (None).
    `threshold` is for tasks of kind labels. `tokens`, for tags only, are made from `number_words`.
    """
    kind = {"labels": "list", **dict.fromkeys(SCORE_KINDS, "float64")}.get(task.kind, "string")
    # Nine digits tell all fp32 numbers apart, so that documents keep their order.
    form = ".9g" if task.kind == "relevance" else ".6g" if kind == "float64" else ""
    own = [
        *([Column("token")] if task.kind == "tags" else []),
        *([Column("label", kind)] if examples.has_labels else []),
        Column("prediction", kind, form),
        *(Column(f"p_{label}", "float32", ".6f") for label in task.labels),
    ]
    columns = [*name_given(own, given), *own]

    def list_rows() -> Iterator[Cells]:
        for index, (output, label) in enumerate(zip(outputs, examples.labels, strict=True)):
            first = (index, *(cells[index] for _, cells in given))
            truth = (_name_labels(task, label),) if examples.has_labels else ()
            if task.kind != "tags":
                yield (*first, *truth, *_predict(task, output, threshold))
                continue
            numbers = tokens.labels[tokens.offsets[index] : tokens.offsets[index + 1]]
            seen = {int(numbers[place]): output[place] for place in np.flatnonzero(numbers != UNTAGGED)}
            for number, word in enumerate(examples.texts[index]):
                tag = (truth[0][number],) if truth else ()
                cells = _predict(task, seen[number]) if number in seen else (None,) * (1 + len(task.labels))
                yield (*first, word, *tag, *cells)

    return columns, list_rows()


def name_given(own: Sequence[Column], given: Given) -> list[Column]:
    """Return the columns that stand before `own`: the index, and those of `given`, which have a row or more. A name
    that is taken becomes input_NAME.
    """
    columns, taken = [_INDEX], {column.name for column in (_INDEX, *own)}
    for name, cells in given:
        while name in taken:
            name = f"input_{name}"
        taken.add(name)
        columns.append(Column(name, "int64" if isinstance(cells[0], int) else "string"))
    return columns


def give_ids(id_column: str, ids: Sequence[str]) -> Given:
    """Return the ids' column, as ints if all are whole numbers of at most 18 digits (not 007); [] without a name."""
    if not id_column:
        return []
    return [(id_column, [*map(int, ids)] if all(map(_WHOLE_NUMBER.fullmatch, ids)) else ids)]


def _name_labels(task: Task, label: Any) -> Any:
    """Return an example's true label as it is written: a class name, a list of them, or a score."""
    if task.kind in SCORE_KINDS:
        return float(label[0] if task.kind == "relevance" else label)
    if task.kind == "class":
        return task.labels[int(label)]
    return [task.labels[number] for number in label]


def _predict(task: Task, output: Outputs, threshold: float = DEFAULT) -> Cells:
    """Return the prediction for the outputs of an example or word, and the probabilities of all classes."""
    if task.kind in SCORE_KINDS:
        return (float(output[0]),)
    if task.kind == "labels":
        likely = [
            label for label, is_likely in zip(task.labels, subtract_threshold(output, threshold) > 0) if is_likely
        ]
        return (likely, *(1 / (1 + np.exp(-output.astype(np.float64)))).tolist())
    powers = np.exp(output - output.max(), dtype=np.float64)
    return (task.labels[int(output.argmax())], *(powers / powers.sum()).tolist())


def subtract_threshold(logits: Outputs, threshold: float) -> NDArray[np.float64]:
    """Return logits minus the logit of the threshold (0 to 1), fp64: those of a probability above it are above 0."""
    shifted: NDArray[np.float64] = logits.astype(np.float64) - np.log(threshold / (1 - threshold))
    return shifted


def tabulate_submission(task: Task, outputs: Outputs) -> Table:
    """Return GLUE's table of index and prediction: a label as in its files, or a score that is cut to 0 to 5."""
    if task.labels:
        predictions: Iterator[Any] = (task.labels[number] for number in outputs.argmax(-1))
    else:
        predictions = (min(max(float(score), 0.0), _MAX_SCORE) for (score,) in outputs)
    prediction = Column("prediction") if task.labels else Column("prediction", "float64", ".3f")
    return [_INDEX, prediction], enumerate(predictions)


def name_submission(task: Task, suffix: str) -> str:
    """Return a split's file in a GLUE submission: MRPC.tsv, or MNLI-m.tsv, and MNLI-mm.tsv for "_mismatched"."""
    part = {"": "-m", "_mismatched": "-mm"}[suffix] if len(task.validation) > 1 else ""
    return f"{task.folder}{part}.tsv"


def check_predictions_file(path: Path, request: PredictConfig) -> None:
    """Raise CpuftError if predictions may not be written to `path`: it ends in none of .csv, .tsv, .jsonl and .parquet,
    or in .parquet without pyarrow; it is a folder, --file or the run's own predictions, or exists without --overwrite.
    """
    check_output(path, request.overwrite, request.file)
    if path.resolve() == Path(request.run, FILE_NAME).resolve():
        raise CpuftError(f"{path} has the run's predictions for its validation examples: give another --output")


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
    """Read a run's record and its model's configuration, no weights. Raises CpuftError: no model was saved there, or
    the model predicts neither labels, scores nor tokens and makes no embeddings.
    """
    record = read_record(run)
    header, model = record.header, Path(run, MODEL_DIR)
    last = record.resumptions[-1] if record.resumptions else header
    try:
        options = {name: value for name, value in header.options.items() if name in option_names(TrainConfig)}
        train = load(TrainConfig, options, "the record")
        settings = load(dict[str, Any], parse_json((model / "config.json").read_text(encoding="utf-8")))
        task = find_task(header.task, train.causal) if header.task in TASKS else None
        if task and task.kind in DECODER_KINDS:
            return FinishedRun(model, train, last.precision, last.world_size, task)
        named = load(dict[str, str], settings.get("id2label", {}))
        labels = tuple(named[str(number)] for number in range(len(named)))
        (architecture,) = load(list[str], settings.get("architectures"))
    except (OSError, ValueError, KeyError) as error:
        raise CpuftError(f"{run} holds no model that was trained here ({error}): give a finished run") from None
    if task and task.kind in EMBEDDING_KINDS:
        # How the model makes embeddings is in the files beside it, whatever the options of the training were.
        own = replace(train, model=str(model), pooling="auto", query_prompt="auto", document_prompt="auto")
        return FinishedRun(model, own, last.precision, last.world_size, task)
    kind = _TASK_KINDS.get(str(settings.get("problem_type")), "")
    if task and task.kind == "relevance":
        kind = "relevance"
    elif architecture.endswith("ForTokenClassification"):
        kind = "tags"
    if not kind or not task:
        raise CpuftError(f"{run} trained a {architecture} (--task {header.task}) without labels: give another run")
    if not task.folder:
        labels = () if kind in SCORE_KINDS else labels
        metrics = task.metrics if kind == "relevance" else choose_metrics(kind, labels)
        task = replace(task, labels=labels, kind=kind, metrics=metrics)
    return FinishedRun(model, train, last.precision, last.world_size, task)


def read_examples(request: PredictConfig, run: FinishedRun) -> tuple[Task, dict[str, Examples]]:
    """Read the examples of --file, else of --split; for a run of --task files, that is its validation file.

    Returns the task with the columns of the examples, and the examples of each split by the suffix of its metrics'
    names. Raises CpuftError: they cannot be read, or do not fit the task.
    """
    glue_examples = None
    if request.file and not request.text_columns:
        glue_examples = read_glue_file(run.task, Path(request.file), request.id_column)
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
    """Return for each suffix of a split's metrics the file for its predictions, after `check_predictions_file`."""
    output, paths = Path(request.output), dict[str, Path]()
    for suffix in suffixes:
        if request.output:
            paths[suffix] = output.parent / f"{output.stem}{suffix}{output.suffix}"
        else:
            is_test = request.split == "test"
            name = name_submission(run.task, suffix) if is_test else f"predictions{suffix}.csv"
            paths[suffix] = Path(request.run, name)
        check_predictions_file(paths[suffix], request)
    return paths


def predict(request: PredictConfig) -> None:
    """Predict all examples; write each split's predictions to --output, with its suffix before the ending, else to the
    run's predictions.csv or GLUE's file (--split test); print metrics and the files' names. Raises CpuftError: the run,
    the examples or the output cannot be used.
    """
    run = read_finished_run(request.run)
    task, splits = read_examples(request, run)
    paths = _name_outputs(request, run, list(splits))
    threshold = resolve_threshold(request, task)
    numbered = {suffix: number_words(split) if task.kind == "tags" else split for suffix, split in splits.items()}
    prepared = tokenize_splits(run, task, numbered)
    outputs, metrics, describe_failures = _compute_predictions(request, run, prepared, splits, threshold)
    for suffix, examples in splits.items():
        given = give_ids(request.id_column, examples.ids)
        if request.with_input and task.kind != "tags":  # a table of tags contains the words anyway
            columns = [[texts[place] for texts in examples.texts] for place in range(len(task.texts))]
            given = [*given, *zip(task.texts, columns)]
        table = tabulate_predictions(task, examples, outputs[suffix], prepared.validation[suffix], given, threshold)
        write_table(paths[suffix], *(tabulate_submission(task, outputs[suffix]) if request.split == "test" else table))
    if metrics:
        print(format_metrics(metrics), flush=True)
    for line in describe_failures():  # after the files, because it takes a while
        print(line, file=sys.stderr, flush=True)
    print(f"predictions: {', '.join(map(str, paths.values()))}")


def resolve_threshold(request: PredictConfig, task: Task) -> float:
    """Return the threshold of --threshold and say it, with the reason, on standard error.

    For "auto" it is the best one for the run's validation examples, or 0.5 if there is none. For a task of another kind
    than `labels` it is 0.5, and nothing is said. Raises CpuftError: --threshold is neither auto nor a number above 0
    and below 1, or it is given for such a task.
    """
    if task.kind != "labels":
        if request.threshold != PredictConfig().threshold:
            raise CpuftError(f"--threshold is for several labels, and {request.run} predicts none: leave it out")
        return DEFAULT
    value, reason = _find_best(request) if request.threshold == "auto" else (_parse_threshold(request.threshold), "")
    print(f"labels with a probability above {value:g} are predicted{reason}", file=sys.stderr, flush=True)
    return value


def _find_best(request: PredictConfig) -> tuple[float, str]:
    """Return the best threshold for the run's validation examples, and the reason for it; 0.5 if there is none."""
    try:
        found = find_threshold(request.run)
    except CpuftError as error:
        return DEFAULT, f", because {error}"
    reason = f": of all thresholds it has the best f1_micro {found.f1:.4f} on the run's "
    reason += counted(found.examples, "validation example")
    if found.value != DEFAULT:
        reason += f", and 0.5 has {found.usual_f1:.4f}"
    if request.split:
        reason += "; it was chosen on these examples, so that their metrics are too good"
    return found.value, reason


def _parse_threshold(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < 1:
            return value
    raise CpuftError(f"--threshold {text!r:.40} is not valid: give auto, or a number above 0 and below 1")


def tokenize_splits(run: FinishedRun, task: Task, splits: dict[str, Examples]) -> Prepared:
    """Tokenise splits of examples, one of them with the suffix "", as the run did; return them as
    `Prepared.validation`, with the same suffixes, without a checksum. Raises CpuftError: the tokenizer cannot be used.
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
    """Return the precision to predict in: for auto that of the run; fp32 for int8; bf16 also where it is emulated."""
    from cpuft.train.precision import read_cpu  # imports torch

    wanted = run.precision if requested == "auto" else requested
    return choose_precision("fp32" if wanted == "int8" else wanted, True, read_cpu().flags)  # int8 is for training only


def use_fast_path(run: FinishedRun, model: Any, precision: str) -> None:
    """Put the layers of the fast path into the model, in place, if the run trained with them."""
    from cpuft.train.fast.acceleration import patch_model  # imports torch

    if run.train.uses_fast_path:
        patch_model(model, precision)


def _compute_predictions(
    request: PredictConfig, run: FinishedRun, prepared: Prepared, splits: dict[str, Examples], threshold: float
) -> tuple[dict[str, Outputs], dict[str, float], Callable[[], list[str]]]:
    """Return outputs by suffix, metrics of splits with labels, and what describes failures; print the speed."""
    # Imported here because it imports torch, for which an error about bad input should not wait.
    from cpuft.train.evaluate import compute_outputs

    precision = choose_run_precision(run, request.precision)
    objective, model = make_run_model(run, prepared)
    use_fast_path(run, model, precision.name)
    resume_garbage_collection()
    start, outputs, metrics = time.perf_counter(), dict[str, Outputs](), dict[str, float]()
    describe: Callable[[], list[str]] = list
    for suffix, tokens in prepared.validation.items():
        size = request.batch_size or run.train.eval_batch_size
        outputs[suffix] = compute_outputs(model, objective, tokens, size, run.ranks, precision.name)
        if splits[suffix].has_labels:
            labelled = tag_tokens(tokens, splits[suffix]) if prepared.kind == "tags" else tokens
            reduced: Any = objective.reduce_outputs(outputs[suffix])
            if prepared.kind == "labels":
                reduced = subtract_threshold(reduced, threshold)
            found = objective.compute_metrics(reduced, labelled)
            metrics |= {name + suffix: value for name, value in found.items()}
            if not suffix:  # as at the end of a run
                describe = partial(_describe_failures, run, prepared, objective, reduced, labelled, found)
    count, seconds = sum(map(len, prepared.validation.values())), time.perf_counter() - start
    reason = f": {precision.reason}" * (precision.name == "bf16")
    speed = f"{counted(count, 'example')}, {count / seconds:.1f} examples/s in {precision.name}{reason}"
    print(speed, file=sys.stderr, flush=True)
    return outputs, metrics, describe


def _describe_failures(
    run: FinishedRun, prepared: Prepared, objective: Objective, reduced: Any, tokens: Tokens, metrics: dict[str, float]
) -> list[str]:
    from cpuft.train.saved_predictions import join_columns, make_columns  # imports torch

    try:
        import pyarrow

        from cpuft.judge.judgement import judge

        columns = make_columns(run.train, prepared, "", objective.list_predictions(reduced, tokens))
        table = pyarrow.table(join_columns([columns]))
        about = About(prepared.kind, prepared.labels, metrics, "", 0)
        return describe_judgement(judge(RunPredictions(about, table)), is_run=False)
    except Exception as error:  # the predictions are worth more than what is said of them
        return [f"warning: where the model fails could not be found out ({describe_error(error)})"]


def number_words(examples: Examples) -> Examples:
    """Return the examples with each word's place (from 0) as label, to tell after tokenising what words were kept."""
    return replace(examples, labels=[tuple(range(len(words))) for words in examples.texts])


def tag_tokens(tokens: Tokens, examples: Examples) -> Tokens:
    """Return tokens, made of `number_words`, with the tags of the numbered words as labels; UNTAGGED stays."""
    tags = np.concatenate([np.asarray(tags, np.int32) for tags in examples.labels])
    starts = np.cumsum([0, *map(len, examples.texts)])[:-1]
    places = tokens.labels + np.repeat(starts, tokens.lengths)
    return replace(tokens, labels=np.where(tokens.labels == UNTAGGED, UNTAGGED, tags[np.maximum(places, 0)]))


if __name__ == "__main__":
    run_as_process(lambda: predict(parse_arguments(PredictConfig, sys.argv[1:])))
