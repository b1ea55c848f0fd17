"""Tokenizers: a model's own, one that is named, or one made of the texts that a model is trained on from nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cpuft.config import TrainConfig
from cpuft.files import cache_folder, hash_text, write_text
from cpuft.serialization import load, parse_json
from cpuft.train.model import check_tokenizer, find_model, load_settings, load_tokenizer

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)
_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_ALPHABET = 1000
"""Characters that BERT's own tokenizer keeps apart; all others are unknown words."""


def name_tokenizer(config: TrainConfig) -> str:
    """Whose tokenizer it is; empty for one that is to be made."""
    return config.tokenizer or ("" if config.from_config else config.model)


def is_checked(config: TrainConfig) -> bool:
    """Whether tokenizer and model may be such as do not belong together."""
    return bool(config.tokenizer or config.from_config) or config.task == "text"


def digest_tokenizer(config: TrainConfig) -> bytes:
    """All that decides which tokenizer it is, but for texts that one is made of, and what batches are padded with."""
    name = name_tokenizer(config)
    if not name:
        return repr((config.from_config, config.vocab_size)).encode()
    folder = Path(find_model(name))
    files = [(folder / file).read_bytes() if (folder / file).exists() else b"-" for file in _FILES]
    return b"".join([name.encode() if not folder.is_dir() else b"", *files, _digest_settings(config)])


def _digest_settings(config: TrainConfig) -> bytes:
    """What `choose_pad_id` and the check of token ids read of the model's configuration, where it is here."""
    path = Path(config.from_config) if config.from_config else Path(find_model(config.model), "config.json")
    try:
        settings = load(dict[str, Any], parse_json(path.read_text(encoding="utf-8")))
        names = ("model_type", "pad_token_id", "eos_token_id", "vocab_size")
        return repr([settings.get(name) for name in names]).encode()
    except (OSError, ValueError):  # a hub name, or one of SIZES
        return (config.from_config or config.model).encode()


def choose_tokenizer(
    config: TrainConfig, list_texts: Callable[[], Iterator[str]], key: str, words: bool = False
) -> tuple[Any, str]:
    """The tokenizer, for texts or for `words` one by one; and what it is, where it is made of these texts, which is
    done once for each key.

    Raises CpuftError: it cannot be had, or does not fit the model.
    """
    made, name = "", name_tokenizer(config)
    if name:
        tokenizer = load_tokenizer(name, words)
    else:
        most = min(config.vocab_size, load_settings(config, {}, config.vocab_size).vocab_size)
        path = cache_folder(os.environ) / f"tokenizer-{hash_text(f'{most} {key}', 16)}.json"
        if not path.exists():
            write_text(path, make_tokenizer(list_texts, most))
        made = path.read_text(encoding="utf-8")
        tokenizer = wrap_tokenizer(made)
    if is_checked(config):
        check_tokenizer(config, count_words(tokenizer))
    return tokenizer, made


def make_tokenizer(list_texts: Callable[[], Iterator[str]], words: int) -> str:
    """A WordPiece tokenizer as BERT's uncased one, of at most so many words of these texts; as JSON.

    The same texts give the same words with the same numbers. By itself the library numbers letters inside of words by
    chance, and by that decides between pairs that come equally often: it is told these letters in order beforehand.
    """
    from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer
    from tokenizers.processors import TemplateProcessing

    def train(most: int, *letters: str) -> dict[str, int]:
        tokenizer = BertWordPieceTokenizer()
        first: list[Any] = [*_SPECIAL.values(), *letters]
        tokenizer.train_from_iterator(
            list_texts(), most, limit_alphabet=_ALPHABET, special_tokens=first, show_progress=False
        )
        return dict(tokenizer.get_vocab())

    inside = sorted(letter for letter in train(len(_SPECIAL)) if letter.startswith("##"))
    tokenizer = BertWordPieceTokenizer(train(words, *inside))
    numbers = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", numbers)
    return str(tokenizer.to_str())


def wrap_tokenizer(text: str) -> Any:
    """A tokenizer of transformers', from what `make_tokenizer` made."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), model_input_names=inputs, **_SPECIAL)


def count_words(tokenizer: Any) -> int:
    """Rows that an embedding of its tokens needs."""
    return 1 + int(max(tokenizer.get_vocab().values()))
