"""Rows of a task: from a GLUE download, from the user's own files, from the hub, or made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError, counted
from cpuft.train.data.demo import make_pairs
from cpuft.train.data.own import read_own
from cpuft.train.data.tables import find_column, parse_label, read_text, refuse_empty
from cpuft.train.data.tasks import TASKS, Data, Rows, Task
from cpuft.train.startup import find_hub_problem

_HUB_NAMES = {"dev": "validation", "dev_matched": "validation_matched", "dev_mismatched": "validation_mismatched"}
"""The hub's names of splits, where they are not the files'."""


def read_data(config: TrainConfig) -> Data:
    """Rows of `config.task`. Raises CpuftError for missing files, columns, labels and empty splits."""
    task = TASKS[config.task]
    if task.name == "files":
        return read_own(task, config)
    if task.name == "demo":
        return Data(task, _demo_rows(1600, config.seed), read_splits(task, config, task.validation))
    splits = read_splits(task, config, (("train", "train"), *task.validation))
    return Data(task, splits.pop("train"), splits)


def read_splits(task: Task, config: TrainConfig, splits: Sequence[tuple[str, str]]) -> dict[str, Rows]:
    """Rows of splits of a task that is not the user's own, by what is appended to metrics' names and by file stems."""
    if task.name == "demo":
        return {"": _demo_rows(400, config.seed + 1_000_003)}
    if not config.data_dir:
        return _read_hub(task, splits)
    return {key: _read_glue_split(task, Path(config.data_dir), stem) for key, stem in splits}


def name_tests(task: Task) -> tuple[tuple[str, str], ...]:
    """The splits without labels that GLUE scores, as `validation`; none for what is not GLUE's."""
    return tuple((key, stem.replace("dev", "test")) for key, stem in task.validation) if task.folder else ()


def _demo_rows(count: int, seed: int) -> Rows:
    pairs = make_pairs(count, seed)
    return Rows([(first, second) for first, second, _ in pairs], [float(same) for _, _, same in pairs])


def _read_glue_split(task: Task, folder: Path, stem: str) -> Rows:
    if not folder.is_dir():
        raise CpuftError(
            f"there is no folder {folder}: name the one that holds {task.folder}/{stem}.tsv with --data-dir"
        )
    places = [folder / task.folder / f"{stem}.tsv", folder / f"{stem}.tsv"]
    path = next((place for place in places if place.exists()), places[0])
    # Test files have a header line all, and labels none.
    task = replace(task, columns=(), label="") if stem.startswith("test") else task
    return parse_tsv(read_text(path), task, str(path))


def read_as_glue(task: Task, path: Path) -> Rows | None:
    """Rows of a file in the layout of the task's own, with labels or without; None of one in another."""
    if not task.folder or path.suffix != ".tsv":
        return None
    text = read_text(path, "--file")
    columns = text.partition("\n")[0].rstrip("\r").split("\t")
    if not set(task.texts) <= set(columns):
        return None
    return parse_tsv(text, replace(task, columns=(), label=task.label if task.label in columns else ""), str(path))


def parse_tsv(text: str, task: Task, source: str) -> Rows:
    """Rows of a GLUE file: tabs between columns, no quoting (a lone quotation mark is part of the text).

    Raises CpuftError: a missing column, a row with too few columns or an unknown label (with the line), no rows.
    """
    lines = text.split("\n")
    start = 0 if task.columns else 1
    columns = list(task.columns) or [column.strip() for column in lines[0].rstrip("\r").split("\t")]
    places = [find_column(columns, name, source) for name in (*task.texts, task.label) if name]
    rows = Rows([], [], labelled=bool(task.label))
    for number, line in enumerate(lines[start:], start=start + 1):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) <= max(places):
            raise CpuftError(
                f"{source}, line {number} has {counted(len(cells), 'column')}, {columns[max(places)]!r} is column "
                f"{max(places) + 1}: correct or remove that line"
            )
        rows.texts.append(tuple(cells[place] for place in places[: len(task.texts)]))
        where = f"{source}, line {number}"
        rows.labels.append(parse_label(cells[places[-1]], task, where) if task.label else 0.0)
    refuse_empty(rows.labels, source)
    return rows


def _read_hub(task: Task, splits: Sequence[tuple[str, str]]) -> dict[str, Rows]:
    """GLUE from the Hugging Face hub, through `datasets`."""
    problem = find_hub_problem()
    from datasets import load_dataset

    try:
        tables = load_dataset("nyu-mll/glue", task.name)
    except Exception as error:  # the hub's client raises whatever its layers raise
        if problem:
            raise CpuftError(
                f"the data of --task {task.name} is not in the cache of data sets, and {problem}: check the network "
                f"and the proxy settings, name a folder with a GLUE download with --data-dir, or use --task demo"
            ) from None
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CpuftError(
            f"the hub did not give {task.name} ({said}): name a GLUE download with --data-dir, or use --task demo"
        ) from None
    columns = task.hub_texts or task.texts

    def rows_of(stem: str) -> Rows:
        table: Any = tables[_HUB_NAMES.get(stem, stem)]
        texts = list(zip(*(table[column] for column in columns)))
        labelled = not stem.startswith("test")
        labels = [float(label) if labelled else 0.0 for label in table["label"]]
        return Rows([tuple(map(str, row)) for row in texts], labels, labelled)

    return {key: rows_of(stem) for key, stem in splits}
