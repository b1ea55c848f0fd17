"""Export a run's model to ONNX or OpenVINO: `python -m cpuft.train.export --run=...`, started by `cpuft export`."""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuft.config.export import ExportConfig
from cpuft.config.fields import parse_arguments
from cpuft.config.predict import PredictConfig
from cpuft.errors import CpuftError, counted, describe_error
from cpuft.files import refuse_filled, write_folder_atomically, write_text
from cpuft.tasks import EMBEDDING_KINDS, Task
from cpuft.terminal import align
from cpuft.train.data.archive import Prepared, read_prepared
from cpuft.train.data.prepare import prepare
from cpuft.train.data.sources import Examples
from cpuft.train.data.tokenizer import load_tokenizer
from cpuft.train.embedding_form import read_form
from cpuft.train.predict import (
    FinishedRun,
    Outputs,
    choose_run_precision,
    make_run_model,
    read_examples,
    read_finished_run,
    tokenize_splits,
    use_fast_path,
)
from cpuft.train.startup import resume_garbage_collection, run_as_process

if TYPE_CHECKING:
    from cpuft.train.graphs import Graph
    from cpuft.train.objective.base import Objective

VALIDATION_FILE = "validation.json"
"""File with the results of --validate in the folder of the exported model."""
MAX_DIFFERENCE = 1e-4
"""Largest difference of a logit of an fp32 graph from the model's, relative to the largest logit if that is above 1."""
MAX_METRIC_DROP = 0.01
"""Drop of a metric above which a line of its own warns of it."""
_ROUNDS = 3
_ROUND_SECONDS = 10.0
"""The passes over the validation examples are timed up to _ROUNDS times, until they have taken this long in all."""
_SAMPLE = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_TRACED_LENGTHS, _CHECKED_LENGTHS = (3, 5), ((1,), (2, 12, 200), (7, 1, 30, 4, 90))
"""Words of the examples with which a model is traced, and of the batches by which the graph is compared with it."""


@dataclass(frozen=True)
class ValidatedModel:
    """The run's model, or the exported one, on the validation examples."""

    name: str
    precision: str
    samples_per_second: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Validation:
    """What --validate measured."""

    run: ValidatedModel
    export: ValidatedModel
    examples: int
    batch_size: int
    threads: int
    cpu: str
    largest_difference: float
    """Of an output of the exported model from the same output of the run's model."""
    versions: dict[str, str]
    """Versions of the packages that made and ran the models."""


def choose_export_folder(request: ExportConfig) -> Path:
    """Return the folder that the export makes: --output, else FORMAT or FORMAT-int8 in the folder of the run."""
    return Path(request.output or Path(request.run, request.format + "-int8" * (request.precision == "int8")))


def export(request: ExportConfig) -> None:
    """Export the model of a run, and print where it is; with --validate, also compare it with the run's model and print
    that. Raises CpuftError: the run is not finished, the output folder is not empty, a package is missing, or the graph
    computes other outputs.
    """
    run, target = read_finished_run(request.run), choose_export_folder(request)
    refuse_filled(target)
    # Imported here because it imports torch, for which an error about bad input should not wait.
    wanted = PredictConfig(run=request.run, split="validation", data_dir=request.data_dir)
    is_embedding = run.task.kind in EMBEDDING_KINDS
    found = read_examples(wanted, run) if request.validate and not is_embedding else None
    if found and not all(split.has_labels for split in found[1].values()):
        raise CpuftError(
            f"--validate needs labels, and {run.train.validation_file or run.train.train_file} lacks some: leave it out"
        )
    from cpuft.train.graphs import GRAPHS, SentenceEncoder, check_packages, write_graph

    check_packages(request.format)
    with write_folder_atomically(target) as folder:
        sample = tokenize_splits(run, run.task, make_sample(run.task))
        objective, model = make_run_model(run, sample)
        resume_garbage_collection()
        if is_embedding:
            model = SentenceEncoder(model, read_form(str(run.model)))
        write_graph(model, _make_batch(objective, sample, "traced"), folder, request.format, request.precision)
        (model.encoder if is_embedding else model).config.save_pretrained(folder)
        load_tokenizer(str(run.model), run.task.kind == "tags").save_pretrained(folder)
        graph = GRAPHS[request.format](folder)
        check_graph(request, model, graph, objective, sample)
        size = sum(path.stat().st_size for path in folder.iterdir())
        lines = [f"exported to {target}: {request.format}, {request.precision}, {size / 1e6:.1f} MB"]
        if request.validate:
            prepared = tokenize_splits(run, *found) if found else read_prepared(str(prepare(run.train)))
            validation = _validate(request, run, model, graph, prepared)
            write_text(folder / VALIDATION_FILE, json.dumps(asdict(validation), indent=2) + "\n")
            lines += format_validation(validation)
    print("\n".join(lines))


def make_sample(task: Task) -> dict[str, Examples]:
    """Return made-up examples of the task's form, 1 to 5 for each of the splits "traced", "0", "1", "2" and ""."""
    names = {"traced": _TRACED_LENGTHS, **{str(n): lengths for n, lengths in enumerate(_CHECKED_LENGTHS)}, "": (1,)}
    return {name: _make_examples(lengths, task) for name, lengths in names.items()}


def _make_examples(lengths: tuple[int, ...], task: Task) -> Examples:
    words = [tuple(_SAMPLE[place % len(_SAMPLE)] for place in range(length)) for length in lengths]
    if task.kind == "tags":
        return Examples(words, [(0,) * len(one) for one in words], False)
    texts: list[tuple[str, ...]] = [(" ".join(one), " ".join(one[::-1]))[: max(1, len(task.texts))] for one in words]
    return Examples(texts, [() if task.kind == "labels" else 0.0 for _ in words], False)


def _make_batch(objective: Objective, prepared: Prepared, split: str) -> Any:
    tokens = prepared.validation[split]
    return objective.make_batch(tokens, np.arange(len(tokens)))


def check_graph(request: ExportConfig, model: Any, graph: Graph, objective: Objective, sample: Prepared) -> None:
    """Raise CpuftError if the graph cannot run the batches of `sample` (see `make_sample`), or its outputs have another
    shape than the model's, are not finite, or in fp32 differ by over MAX_DIFFERENCE (of the largest output if above 1).
    """
    from cpuft.train.graphs import measure_difference

    kind, advice = type(model).__name__, "serve the model with transformers, or train another one"
    for number in range(len(_CHECKED_LENGTHS)):
        batch = _make_batch(objective, sample, str(number))
        try:
            difference, size = measure_difference(model, graph, batch)
        except Exception as error:  # the runtimes raise errors of their own classes
            shape = "x".join(map(str, batch.inputs["input_ids"].shape))
            raise CpuftError(
                f"the exported {kind} cannot run a batch of {shape} tokens ({describe_error(error)}): {advice}"
            ) from None
        limit = MAX_DIFFERENCE * max(1.0, size) if request.precision == "fp32" else math.inf
        if not difference <= limit or difference == math.inf:
            raise CpuftError(f"the exported {kind} computes other outputs (by {difference:.3g}): {advice}")


def _validate(request: ExportConfig, run: FinishedRun, model: Any, graph: Any, prepared: Prepared) -> Validation:
    import torch

    from cpuft.train.evaluate import compute_outputs, plan_batches, predict_batches
    from cpuft.train.graphs import EmbeddingsAsStates, SentenceEncoder, largest_difference
    from cpuft.train.objective.table import make_objective
    from cpuft.train.precision import autocast, read_cpu

    objective, precision = make_objective(run.saved, prepared), choose_run_precision(run, "auto").name
    kind, splits = type(graph), prepared.validation
    use_fast_path(run, model, precision)
    if isinstance(model, SentenceEncoder):
        model, graph = EmbeddingsAsStates(model), EmbeddingsAsStates(graph)
    size = request.batch_size or run.train.eval_batch_size
    both = {"run": (model, precision), request.format: (graph, request.precision)}
    # The batch of the longest examples comes first, so that memory is there when time is measured.
    longest = plan_batches(splits[""], size, 1)[0][-1:]
    for validated, its_precision in both.values():
        with autocast(its_precision):
            predict_batches(partial(objective.outputs, validated), objective, splits[""], longest)
    outputs: dict[str, dict[str, Outputs]] = {}
    seconds = dict.fromkeys(both, math.inf)
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        for name, (validated, its_precision) in both.items():
            start = time.perf_counter()
            outputs[name] = {
                suffix: compute_outputs(validated, objective, tokens, size, run.ranks, its_precision)
                for suffix, tokens in splits.items()
            }
            seconds[name] = min(seconds[name], time.perf_counter() - start)
        if time.perf_counter() - begin > _ROUND_SECONDS:
            break
    examples = sum(map(len, splits.values()))
    own, exported = (
        ValidatedModel(name, its_precision, examples / seconds[name], _measure(objective, prepared, outputs[name]))
        for name, (_, its_precision) in both.items()
    )
    difference = max(
        largest_difference(outputs["run"][suffix], outputs[request.format][suffix], tokens.lengths)
        for suffix, tokens in splits.items()
    )
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", *kind.packages)}
    return Validation(own, exported, examples, size, torch.get_num_threads(), read_cpu().model, difference, versions)


def _measure(objective: Objective, prepared: Prepared, outputs: dict[str, Outputs]) -> dict[str, float]:
    return {
        name + suffix: value
        for suffix, tokens in prepared.validation.items()
        for name, value in objective.compute_metrics(objective.reduce_outputs(outputs[suffix]), tokens).items()
    }


def format_validation(validation: Validation) -> list[str]:
    """Return a table of metrics and speed as lines, and a warning for each metric that drops by over 0.01."""
    both = (validation.run, validation.export)
    rows = [("", *(f"{one.name} {one.precision}" for one in both))]
    rows += [(name, *(f"{one.metrics[name]:.4f}" for one in both)) for name in validation.run.metrics]
    rows.append(("samples/s", *(f"{one.samples_per_second:.1f}" for one in both)))
    lines = align(rows)
    where = f"on {counted(validation.examples, 'validation example')} with {counted(validation.threads, 'thread')}"
    lines.append(f"{where}; the largest difference of an output is {validation.largest_difference:.2g}")
    for name, value in validation.run.metrics.items():
        if (drop := value - validation.export.metrics[name]) > MAX_METRIC_DROP:
            lines.append(f"warning: the exported model loses {drop:.4f} of {name}: consider --precision fp32")
    return lines


if __name__ == "__main__":
    run_as_process(lambda: export(parse_arguments(ExportConfig, sys.argv[1:])))
