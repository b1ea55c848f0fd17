"""Tokenizers: a model's own, one that is named, or one made of the texts that a model is trained on from nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError
from cpuft.files import cache_folder, hash_text, write_text
from cpuft.serialization import load, parse_json
from cpuft.train.fast.architectures import POSITIONS_AFTER_PADDING
from cpuft.train.model import describe_load_failure, find_model, load_settings, name_model
from cpuft.train.startup import find_hub_problem

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


_TOKENIZER_FILES = ("tokenizer.json", "vocab*", "*.model", "*.spm", "*.codes", "*.tiktoken", "tekken.json")
"""Patterns of the files that hold a tokenizer's vocabulary. Other files, as tokenizer_config.json, hold none."""


def check_tokenizer(config: TrainConfig, words: int) -> None:
    """Raises CpuftError: the model embeds fewer tokens than a tokenizer of so many words makes."""
    settings = load_settings(config, {}, words)
    if words > settings.vocab_size:
        raise CpuftError(
            f"the tokenizer has {words} words, and {name_model(config)} embeds {settings.vocab_size}: "
            f"leave --tokenizer out, or name the one that the model was made with"
        )


def choose_pad_id(config: TrainConfig, tokenizer: Any, words: int = 0) -> int:
    """Return the id of the token that batches are padded with.

    It is the tokenizer's padding token, else the one of the model's configuration, else the token that ends a text:
    models that need the padding token look for the last token that is another one, and attention masks hide padding
    from all others. RoBERTa's kind counts positions from its own padding token, which stays.

    Raises CpuftError: neither the tokenizer nor the model knows such a token, or the model does not know this one.
    """
    settings = load_settings(config, {}, words)
    own, ends = getattr(settings, "pad_token_id", None), getattr(settings, "eos_token_id", None)
    first = [own] if settings.model_type in POSITIONS_AFTER_PADDING else []
    ends = ends if isinstance(ends, list) else [ends]
    known = [one for one in (*first, tokenizer.pad_token_id, own, tokenizer.eos_token_id, *ends) if one is not None]
    if not known:
        raise CpuftError(
            f"neither the tokenizer nor the configuration of {name_model(config)} names a padding token or a token "
            f"that ends a text: set pad_token_id in its config.json"
        )
    if not 0 <= known[0] < settings.vocab_size:
        raise CpuftError(
            f"the padding token of {name_model(config)} has the id {known[0]}, and the model embeds the ids from 0 to "
            f"{settings.vocab_size - 1} only: set pad_token in tokenizer_config.json to a token that the model knows"
        )
    return int(known[0])


def load_tokenizer(name: str, words: bool = False) -> Any:
    """The model's own fast tokenizer, for texts or for `words` one by one. Raises CpuftError when it cannot be had."""
    import transformers

    source = find_model(name)
    if Path(source).is_dir():
        _check_tokenizer_files(Path(source))
    else:
        print(f"looking for model {name} at the Hugging Face hub", file=sys.stderr, flush=True)
        find_hub_problem()
    try:
        # RoBERTa's would take each word for the first of a text; those that know no such option leave it be.
        more = {"add_prefix_space": True} if words else {}
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **more)
    except (OSError, ValueError) as error:
        raise CpuftError(describe_load_failure(name, error)) from None
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise CpuftError(
            f"the tokenizer of {name} knows nothing but its special tokens, so that every text would be unknown: save "
            f"the tokenizer that the model was made with there, or name a folder or hub model with it by --tokenizer"
        )
    return tokenizer


def _check_tokenizer_files(folder: Path) -> None:
    """Raises CpuftError: the folder holds no tokenizer. transformers would make one that knows no word."""
    missing = ""
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        missing = "no tokenizer.json, vocab.txt (WordPiece), vocab.json with merges.txt (BPE) or SentencePiece *.model"
    elif {"vocab.json"} == {"vocab.json", "merges.txt", "tokenizer.json"} & {path.name for path in folder.iterdir()}:
        missing = "vocab.json without merges.txt, and no tokenizer.json"
    if missing:
        raise CpuftError(
            f"the folder {folder} holds no whole tokenizer ({missing}): save the tokenizer that the model was made "
            f"with there (tokenizer.save_pretrained), or name a folder or hub model that has it by --tokenizer"
        )
