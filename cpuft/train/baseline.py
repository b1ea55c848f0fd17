"""The baseline of a run: what simple counts reach on the run's own rows, computed in a process of its own.

`python -m cpuft.train.baseline PARENT --task=... (training options)` prints a `BaselineLine` as JSON, or
`{"error": ...}`, and ends with its parent process, whose number is PARENT. It loads no torch and no pandas, because it
is to need at most 300 MB beside a training.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from cpuft.config.fields import parse_arguments
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, describe_error, requires
from cpuft.files import cache_folder, write_text
from cpuft.judge.metrics import (
    LEAST_RELEVANT,
    average_searches,
    compute_label_metrics,
    compute_tag_metrics,
    measure_rankings,
    measure_searches,
)
from cpuft.judge.simple_models import (
    KINDS,
    MOST_CLASSES,
    Bm25,
    Encode,
    Predict,
    encode_columns,
    fit,
    fit_linear_model,
    mark_classes,
    name_baseline,
)
from cpuft.rank.process import end_with_parent
from cpuft.record import BaselineLine
from cpuft.serialization import load, parse_json
from cpuft.tasks import Task, find_task
from cpuft.train.data.embedding_pairs import RetrievalExamples
from cpuft.train.data.prepare import read_task_data
from cpuft.train.data.sources import Examples, TaskData
from cpuft.train.startup import find_hub_problem

_FORMAT = 1
"""Part of the checksum: to be raised when the same rows get another baseline."""
_MOST_CHARACTERS = 7_000_000
"""Characters of the texts that are counted: of training rows with up to ten classes, or of documents to search."""
_CLASSES_AT_ONCE = 10
"""Number of classes up to which a linear model is fitted to _MOST_CHARACTERS; with more, it is fitted to fewer."""


def find_baseline(config: TrainConfig) -> BaselineLine:
    """Return the baseline of a task on its own rows: from the user's cache folder, or computed and written there if it
    can be. Raises CpuftError: the task has none, there are too many classes or texts, or the examples cannot be read.
    """
    data = _read(config)
    train = _select_rows(data)
    path = cache_folder(os.environ) / f"baseline-{_checksum(data, train)}.json"
    with suppress(OSError, ValueError):
        return load(BaselineLine, parse_json(path.read_text(encoding="utf-8")))
    # The import of pandas takes 60 MB and half a second, and scikit-learn does without it.
    modules = cast(dict[str, Any], sys.modules)
    hides = modules.setdefault("pandas", None) is None
    import sklearn.linear_model  # noqa: F401

    if hides:
        del modules["pandas"]

    kind, classes = data.task.kind, len(data.task.labels)
    with _one_thread() as measure_seconds:
        if kind in ("pairs", "relevance"):
            metrics = _search(data)
        else:
            metrics = _measure(data, fit(kind, train.texts, train.labels, classes))
        found = BaselineLine(name_baseline(kind), metrics, measure_seconds(), len(train), len(data.train))
    with suppress(OSError):
        write_text(path, json.dumps(asdict(found)))
    return found


def find_static_baseline(config: TrainConfig, model: str) -> BaselineLine:
    """Return what a linear model of the mean static embeddings of model2vec's `model`, a folder or hub name, reaches on
    a task's own rows. Raises CpuftError: the task's kind is neither class nor labels, there are too many classes, the
    examples cannot be read, or model2vec or the model is missing.
    """
    data = _read(config)
    kind, classes = data.task.kind, len(data.task.labels)
    if kind not in ("class", "labels"):
        raise CpuftError("--static-model is for tasks with classes of texts: leave it out")
    train, encode = _select_rows(data), _load_static_model(model)
    with _one_thread() as measure_seconds:
        columns = encode_columns(encode, train.texts)
        predict = fit_linear_model(encode, columns, train.labels, classes if kind == "labels" else 0)
        metrics = _measure(data, predict)
        name = f"static embeddings of {model} with a linear model"
        return BaselineLine(name, metrics, measure_seconds(), len(train), len(data.train))


def _load_static_model(name: str) -> Encode:
    problem = "" if Path(name).exists() else find_hub_problem()
    with requires("static", "--static-model needs model2vec"):
        from model2vec import StaticModel
    try:
        model = StaticModel.from_pretrained(name, force_download=False)
    except Exception as error:  # the hub's client and model2vec raise many kinds of errors
        reason = problem or describe_error(error)
        raise CpuftError(f"the static model {name} cannot be loaded ({reason}): give one of model2vec") from None
    return lambda texts: model.encode(texts, use_multiprocessing=False)


def _read(config: TrainConfig) -> TaskData:
    """Read the rows of a task. Raises CpuftError: it has no baseline, or the rows cannot be read."""
    kind = find_task(config.task, config.causal).kind
    if kind not in KINDS:
        raise CpuftError(f"--task {config.task} has none")
    if kind == "pairs":
        config = replace(config, hard_negatives=0)  # only training rows have them, and finding them needs a model
    data = read_task_data(config, check_labels=False)
    if data.task.kind in ("class", "labels") and len(data.task.labels) > MOST_CLASSES:
        raise CpuftError(f"it is for at most {MOST_CLASSES} classes, and there are {len(data.task.labels):,}")
    return data


def _select_rows(data: TaskData) -> Examples:
    """Return the training rows for a baseline: all, or every second, fourth and so on, for short enough texts."""
    most, step, count, number = _MOST_CHARACTERS, 1, 0, 0
    if data.task.kind in ("class", "labels"):
        most //= max(1, len(data.task.labels) // _CLASSES_AT_ONCE)
    texts, labels = list[tuple[str, ...]](), list[Any]()
    for batch in data.train.batches() if data.task.kind not in ("pairs", "relevance") else ():
        for row, label in zip(batch.texts, batch.labels):
            if number % step == 0:
                texts.append(row)
                labels.append(label)
                count += sum(map(len, row))
            number += 1
            while count > most and len(texts) > 1:
                texts, labels, step = texts[::2], labels[::2], 2 * step
                count = sum(len(text) for row in texts for text in row)
    return Examples(texts, labels)


@contextmanager
def _one_thread() -> Iterator[Callable[[], float]]:
    """Let libraries compute with one thread, and yield a function that returns the processor time so far."""
    from threadpoolctl import threadpool_limits

    start = time.process_time()
    with threadpool_limits(1):
        yield lambda: time.process_time() - start


def _checksum(data: TaskData, train: Examples) -> str:
    task, versions = data.task, [importlib.metadata.version(name) for name in ("scikit-learn", "scipy", "seqeval")]
    parts = (_FORMAT, versions, task.kind, task.labels, task.metrics, train.checksum, len(data.train))
    digest = hashlib.sha256(repr(parts).encode())
    for suffix, split in data.validation.items():
        digest.update(f"{suffix} {split.checksum}\n".encode())
    return digest.hexdigest()[:16]


def _measure(data: TaskData, predict: Predict) -> dict[str, float]:
    metrics, task = dict[str, float](), data.task
    for suffix, split in data.validation.items():
        predicted, labels = list[Any](), list[Any]()
        for batch in split.batches():
            predicted += list(predict(batch.texts))
            labels += batch.labels
        metrics |= {name + suffix: value for name, value in _compare(task, predicted, labels).items()}
    return metrics


def _compare(task: Task, predicted: Sequence[Any], labels: Sequence[Any]) -> dict[str, float]:
    if task.kind == "tags":
        tags = ([[task.labels[number] for number in row] for row in rows] for rows in (predicted, labels))
        return compute_tag_metrics(task.metrics, *tags)
    wanted = mark_classes(labels, len(task.labels)) if task.kind == "labels" else np.asarray(labels, np.float32)
    return compute_label_metrics(task.metrics, np.asarray(predicted), wanted)


def _search(data: TaskData) -> dict[str, float]:
    """Return the metrics of BM25 among the documents of the validation split."""
    split, names = data.validation[""].load(), data.task.metrics
    if sum(map(len, split.list_texts())) > _MOST_CHARACTERS:
        raise CpuftError(f"it searches among texts of at most {_MOST_CHARACTERS:,} characters, and these have more")
    if isinstance(split, RetrievalExamples):
        queries, documents = split.queries, [text for (text,) in split.texts[len(split.queries) :]]
        bm25 = Bm25(documents)
        _, values = measure_searches(
            names,
            split.relevant,
            len(documents),
            lambda asked, count: bm25.rank([queries[number] for number in asked], count),
        )
        return average_searches(values)
    numbers = {text: number for number, text in enumerate(dict.fromkeys(text for _, text in split.texts))}
    places = np.asarray([numbers[text] for _, text in split.texts])
    scores = Bm25([*numbers]).score([query for query, _ in split.texts], places)
    labels, asked = np.asarray(split.labels).T
    relevant = labels >= LEAST_RELEVANT
    return {name: float(np.mean(measure_rankings(name, scores, relevant, asked.astype(np.int64)))) for name in names}


def main() -> None:
    """Compute the baseline for the options in the arguments after PARENT, and print it or what went wrong as JSON."""
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it ended before the line above
        os._exit(1)
    os.nice(19)
    with suppress(OSError):
        # If memory runs out, the kernel is to kill this process, and not the training.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        text = json.dumps(asdict(find_baseline(parse_arguments(TrainConfig, sys.argv[2:]))))
    except Exception as error:  # whatever it is, the run is to go on
        text = json.dumps({"error": describe_error(error)})
    print(text, flush=True)


if __name__ == "__main__":
    main()
