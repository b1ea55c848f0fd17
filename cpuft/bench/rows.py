"""MRPC's training rows as token ids, and batches of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpuft.errors import CpuftError
from cpuft.train.data.prepare import Tokens
from cpuft.train.data.rows import parse_tsv
from cpuft.train.data.tasks import TASKS, first_rows

MAX_LENGTH = 128
BATCH = 32
Row = dict[str, Any]


def read_rows(path: Path, tokenizer: Any, count: int = 0) -> list[Row]:
    """The first `count` rows (0: all) of MRPC in GLUE's layout: `input_ids`, `token_type_ids`, `label` of each.

    Raises CpuftError: there is no such file, or a line that is not MRPC's.
    """
    if not path.is_file():
        raise CpuftError(f"{path} is not there: give --data the folder that holds MRPC's train.tsv and dev.tsv")
    rows = first_rows(parse_tsv(path.read_text(encoding="utf-8-sig"), TASKS["mrpc"], str(path)), count)
    first, second = ([texts[at] for texts in rows.texts] for at in (0, 1))
    encoded = tokenizer(first, second, truncation=True, max_length=MAX_LENGTH)
    return [
        {"input_ids": ids, "token_type_ids": types, "label": int(label)}
        for ids, types, label in zip(encoded["input_ids"], encoded["token_type_ids"], rows.labels, strict=True)
    ]


def make_tokens(rows: list[Row]) -> Tokens:
    """The same rows as our own objectives take them."""
    lengths = [len(row["input_ids"]) for row in rows]
    return Tokens(
        np.concatenate([np.asarray(row["input_ids"], np.int32) for row in rows]),
        np.concatenate([np.asarray(row["token_type_ids"], np.int8) for row in rows]),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.asarray([row["label"] for row in rows], np.float32),
    )


def collate(rows: list[Row], length: int = 0) -> dict[str, Tensor]:
    """Rows padded to `length`, or to the longest of them: `input_ids`, `token_type_ids`, `attention_mask`, `labels`."""
    longest = length or max(len(row["input_ids"]) for row in rows)
    ids, types, mask = torch.zeros(3, len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        size = len(row["input_ids"])
        ids[i, :size] = torch.tensor(row["input_ids"])
        types[i, :size] = torch.tensor(row["token_type_ids"])
        mask[i, :size] = 1
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask, "labels": labels}


def collate_to_the_recipe_s_length(rows: list[Row]) -> dict[str, Tensor]:
    """Rows padded to 128, as the well-known recipe does."""
    return collate(rows, MAX_LENGTH)


def length_grouped(rows: list[Row], seed: int) -> list[list[Row]]:
    """Batches of rows of like length, in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    order.sort(key=lambda row: len(row["input_ids"]))
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
