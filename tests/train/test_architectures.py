"""Models of other architectures than BERT's train on several ranks, or are refused with one clear message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cpuft.comm.gradients.embedding_rows import check_lookups, find_embedding
from tests.comm.ranks import mpirun
from tests.train.architectures import SIZES


def train_on_two_ranks(folder: Path, *wanted: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """What became of each training, by "name precision"; the same on both ranks."""
    (folder / "wanted.json").write_text(json.dumps(wanted), encoding="utf-8")
    done = mpirun(2, "tests.train.architectures", str(folder), seconds=280, XDG_CACHE_HOME=str(folder / "cache"))
    assert done.returncode == 0, done.stdout[-3000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert first == second
    return dict(first)


@pytest.mark.real
def test_ranks_stay_equal_where_the_word_embedding_is_looked_up_by_token_types(tmp_path: Path) -> None:
    found = train_on_two_ranks(tmp_path, ("bert", "fp32"), ("gpt2", "fp32"))
    assert {name: one["error"] for name, one in found.items()} == {"bert fp32": "", "gpt2 fp32": ""}
    assert {name: one["by_rows"] for name, one in found.items()} == {"bert fp32": True, "gpt2 fp32": False}


@pytest.mark.parametrize("name, types, by_ids", [("bert", True, True), ("gpt2", False, True), ("gpt2", True, False)])
def test_lookups_by_more_than_input_ids_are_found(name: str, types: bool, by_ids: bool) -> None:
    settings = transformers.AutoConfig.for_model(name, vocab_size=100, **SIZES[name])
    model = transformers.AutoModel.from_config(settings).train()
    ids = torch.tensor([[5, 7, 5, 9]])
    inputs = {"input_ids": ids, "token_type_ids": torch.tensor([[0, 0, 1, 1]])} if types else {"input_ids": ids}
    assert find_embedding(model) is not None
    assert check_lookups(model, ids, lambda: model(**inputs)) == by_ids
    assert (find_embedding(model) is not None) == by_ids
    assert model.training
