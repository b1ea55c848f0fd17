"""Models of other architectures than BERT's train on several ranks, or are refused with one clear message."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cpuft.comm.gradients.embedding_rows import check_lookups, find_embedding
from cpuft.errors import CpuftError
from cpuft.train.data.prepare import prepare, read_prepared, warn_of_unknown
from cpuft.train.objective.kinds import make_objective
from tests.comm.ranks import mpirun
from tests.train.architectures import SIZES, save_architecture
from tests.train.tiny import make_config, save_tokenizer


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


CLS, SEP = 101, 102
"""Of MiniLM's tokenizer."""


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "own, special, pad_id",
    [
        ({"pad_token_id": SEP}, {}, SEP),  # as many who train GPT-2 set it, with its tokenizer, which has none
        ({"pad_token_id": None}, {"pad_token": "[PAD]"}, 0),
        ({"pad_token_id": None, "eos_token_id": SEP}, {}, SEP),
        ({"pad_token_id": None, "eos_token_id": None}, {"eos_token": "[CLS]"}, CLS),
    ],
)
def test_a_padded_text_gets_the_same_answer_as_alone(
    tmp_path: Path, own: dict[str, Any], special: dict[str, str], pad_id: int
) -> None:
    config = replace(make_config(tmp_path, "class"), model=save_architecture(tmp_path / "gpt2", "gpt2", **own))
    save_tokenizer(tmp_path / "gpt2", unk_token="[UNK]", **special)
    prepared = read_prepared(str(prepare(config)))
    assert prepared.pad_id == pad_id
    objective = make_objective(config, prepared)
    model = objective.load_model(config).eval()
    rows = np.asarray([prepared.train.lengths.argmin(), prepared.train.lengths.argmax()])
    with torch.no_grad():
        alone, both = (
            objective.outputs(model, objective.make_batch(prepared.train, some)) for some in (rows[:1], rows)
        )
    assert both[0] == pytest.approx(alone[0], abs=1e-6)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "own, special, message",
    [
        (
            {"pad_token_id": None, "eos_token_id": None},
            {},
            "neither the tokenizer nor the configuration of gpt2 names a padding token or a token that ends a text: "
            "set pad_token_id in its config.json",
        ),
        (
            {},
            {"pad_token": "[MORE]"},
            "the padding token of gpt2 has the id 30522, and the model embeds the ids from 0 to 30521 only: set "
            "pad_token in tokenizer_config.json to a token that the model knows",
        ),
    ],
)
def test_padding_that_a_model_does_not_know_is_refused(
    tmp_path: Path, own: dict[str, Any], special: dict[str, str], message: str
) -> None:
    save_architecture(tmp_path / "gpt2", "gpt2", **own)
    save_tokenizer(tmp_path / "gpt2", unk_token="[UNK]", **special)
    with pytest.raises(CpuftError) as caught:
        prepare(replace(make_config(tmp_path, "class"), model="gpt2"))
    assert str(caught.value) == message


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "kept, message",
    [
        (
            (),
            "holds no whole tokenizer (no tokenizer.json, vocab.txt (WordPiece), vocab.json with merges.txt (BPE) or ",
        ),
        (("tokenizer_config.json",), "holds no whole tokenizer (no tokenizer.json, vocab.txt (WordPiece), "),
        (("vocab.json",), "holds no whole tokenizer (vocab.json without merges.txt, and no tokenizer.json): save "),
        (("vocab.txt",), "knows nothing but its special tokens, so that every text would be unknown: save "),
    ],
)
def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, kept: tuple[str, ...], message: str) -> None:
    config = make_config(tmp_path, "class")
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if file not in kept:
            Path(config.model, file).unlink()
    for file in ("vocab.txt", "vocab.json"):
        if file in kept:
            Path(config.model, file).write_text("{}" if file == "vocab.json" else "", encoding="utf-8")
    with pytest.raises(CpuftError) as caught:
        prepare(config)
    assert message in str(caught.value)
    assert str(caught.value).endswith("by --tokenizer")
    assert read_prepared(str(prepare(replace(config, tokenizer="minilm")))).unknown == 0


@pytest.mark.usefixtures("own_cache")
def test_many_unknown_tokens_are_warned_of_and_only_unknown_ones_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, "class")
    assert warn_of_unknown(read_prepared(str(prepare(config)))) == ""
    rows = [{"text": "the old cat \U0001f995 is red \U0001f996", "label": f"{number % 2}"} for number in range(8)]
    Path(config.train_file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = replace(config, validation_file=config.train_file)
    prepared = read_prepared(str(prepare(config)))
    assert prepared.unknown == pytest.approx(2 / 7)
    assert warn_of_unknown(prepared).startswith(
        "warning: 29% of the tokens of the training texts are unknown to the tokenizer (more than 5%): the "
    )
    rows = [row | {"text": "\U0001f995 \U0001f996"} for row in rows]
    Path(config.train_file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(CpuftError, match="knows no token of the training texts: name the tokenizer that the model was"):
        prepare(config)
