"""Tokenizers that are trained on texts, and tokenizers that do not fit the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.tokenizer import (
    choose_tokenizer,
    get_vocab_size,
    make_tokenizer,
    train_tokenizer,
)
from cpuft.train.model import check_positions

TEXTS = ["The nurse called the pilot at noon.", "The pilot called the nurse at night.", "Nurses and pilots."] * 3


def list_texts() -> Iterator[str]:
    return iter(TEXTS)


def list_none() -> Iterator[str]:
    raise AssertionError("one is there already")


def test_a_tokenizer_that_is_trained_on_texts_works_like_berts() -> None:
    made = train_tokenizer(list_texts, 60)
    assert {train_tokenizer(list_texts, 60) for _ in range(20)} == {made}
    tokenizer = make_tokenizer(made)
    assert get_vocab_size(tokenizer) <= 60
    found = tokenizer("The NURSE!", "the pilot")
    words = tokenizer.convert_ids_to_tokens(found["input_ids"])
    assert words == ["[CLS]", "the", "nurse", "[UNK]", "[SEP]", "the", "pilot", "[SEP]"]
    assert found["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert (tokenizer.pad_token_id, tokenizer.mask_token) == (0, "[MASK]")


def test_a_trained_tokenizer_is_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertConfig

    tokenizer = make_tokenizer(train_tokenizer(list_texts, 60))
    tokenizer.save_pretrained(tmp_path)
    BertConfig().save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("The pilot", "a nurse") == tokenizer("The pilot", "a nurse")
    assert (again.mask_token_id, again.pad_token_id) == (tokenizer.mask_token_id, tokenizer.pad_token_id)


def test_a_tokenizer_is_trained_once_for_the_same_texts(own_cache: None) -> None:
    config = TrainConfig(from_config="bert-base", vocab_size=60)
    _, made = choose_tokenizer(config, list_texts, "texts")
    assert choose_tokenizer(config, list_none, "texts")[1] == made
    _, other = choose_tokenizer(config, lambda: iter(["Something else."]), "others")
    assert other != made


def test_a_tokenizer_that_is_named_is_loaded(own_cache: None) -> None:
    tokenizer, made = choose_tokenizer(TrainConfig(from_config="bert-base", tokenizer="minilm"), list_none, "")
    assert (get_vocab_size(tokenizer), made) == (30522, "")


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"vocab_size": 1000},
            "the tokenizer has 30522 tokens, and small.json embeds only 1000: leave --tokenizer out, or name the one",
        ),
        (
            {"max_position_embeddings": 64},
            "small.json has 64 positions: give --max-length 64 or less",
        ),
        ({"model_type": "bort"}, "no model can be made of small.json (Unrecognized model identifier: bort."),
        ({"hidden_size": "x"}, "no model can be made of small.json ("),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(
    settings: dict[str, object], message: str, own_cache: None
) -> None:
    Path("small.json").write_text(json.dumps({"vocab_size": 30522, **settings}))
    config = TrainConfig(from_config="small.json", tokenizer="minilm")

    def check() -> None:
        check_positions(config)
        choose_tokenizer(config, list_none, "")

    with pytest.raises(CpuftError) as error:
        check()
    assert str(error.value).startswith(message)
