"""Tokenizers: the model's own, one that is named, or one that is trained on the texts of an untrained model."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.files import cache_folder, hash_text, write_text
from cpuft.model_files import TOKENIZER_FILES
from cpuft.train.fast.architectures import POSITIONS_AFTER_PADDING
from cpuft.train.model import (
    describe_load_failure,
    find_base_model,
    find_model,
    get_model_name,
    load_config,
    read_config_file,
)
from cpuft.train.startup import find_hub_problem

_VOCABULARY_FILES = ("tokenizer.json", "vocab*", "*.model", "*.spm", "*.codes", "*.tiktoken", "tekken.json")
"""Patterns of the files that hold a tokenizer's vocabulary. Other files, such as tokenizer_config.json, hold none."""
_SPECIAL_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
_PACKAGE = re.compile(r"requires the (\w+) library|to install (\w+) to use|`(\w+)` is required|No module named '(\w+)")
"""How transformers and its tokenizers name a package that is missing."""
_ALPHABET_SIZE = 1000
"""Number of different characters in the vocabulary, as in BERT's own; words with other characters are unknown."""


def get_tokenizer_name(config: TrainConfig) -> str:
    """Return the folder or hub name of the tokenizer: --tokenizer, else --model; empty if one is to be trained."""
    return config.tokenizer or ("" if config.from_config else config.model)


def digest_tokenizer(config: TrainConfig) -> bytes:
    """Return the bytes on which tokens and padding depend, for checksums. Raises CpuftError: there is no such model."""
    name = get_tokenizer_name(config)
    if not name:
        return repr((config.from_config, config.vocab_size)).encode() + _digest_model_config(config)
    folder = Path(source := _find_tokenizer(name))
    # That of the model's own folder is in the checksum of chats anyway.
    names = TOKENIZER_FILES if source == find_model(name) else (*TOKENIZER_FILES, "chat_template.jinja")
    files = [(folder / file).read_bytes() if (folder / file).exists() else b"-" for file in names]
    return b"".join([name.encode() if not folder.is_dir() else b"", *files, _digest_model_config(config)])


def _digest_model_config(config: TrainConfig) -> bytes:
    """Return the entries of the model's configuration that the checks of its tokens and positions read."""
    settings = read_config_file(config)
    if not settings:  # a hub name, or one of SIZES
        return get_model_name(config).encode()
    names = ("model_type", "pad_token_id", "eos_token_id", "vocab_size")
    positions = sorted(item for item in settings.items() if "position" in item[0])  # families name them differently
    return repr([*(settings.get(name) for name in names), positions]).encode()


def choose_tokenizer(
    config: TrainConfig, list_texts: Callable[[], Iterator[str]], key: str, in_words: bool = False
) -> tuple[Any, str]:
    """Load the tokenizer of --tokenizer or of the model, for lists of words with `in_words`, or train one for an
    untrained model on the texts, which `key` identifies in the cache folder. Return also the JSON of one that was
    trained, else "". Raises CpuftError: it cannot be loaded, or has more tokens than the model embeds (only if
    `may_mismatch_model`).
    """
    trained, name = "", get_tokenizer_name(config)
    if name:
        tokenizer = load_tokenizer(name, in_words)
    else:
        size = min(config.vocab_size, load_config(config, {}, config.vocab_size).vocab_size)
        path = cache_folder(os.environ) / f"tokenizer-{hash_text(f'{size} {key}', 16)}.json"
        if not path.exists():
            write_text(path, train_tokenizer(list_texts, size))
        trained = path.read_text(encoding="utf-8")
        tokenizer = make_tokenizer(trained)
    if config.tokenizer or config.from_config or config.task in ("text", "chat"):
        _check_tokenizer(config, get_vocab_size(tokenizer))
    return tokenizer, trained


def train_tokenizer(list_texts: Callable[[], Iterator[str]], vocab_size: int) -> str:
    """Train a WordPiece tokenizer like BERT's uncased one; return its JSON. Special tokens and up to 1000 letters are
    included even beyond `vocab_size`. The same texts give the same ids.
    """
    from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer
    from tokenizers.processors import TemplateProcessing

    def train(size: int, *letters: str) -> dict[str, int]:
        tokenizer = BertWordPieceTokenizer()
        first: list[Any] = [*_SPECIAL_TOKENS.values(), *letters]
        tokenizer.train_from_iterator(
            list_texts(), size, limit_alphabet=_ALPHABET_SIZE, special_tokens=first, show_progress=False
        )
        return dict(tokenizer.get_vocab())

    # By itself the library numbers the letters inside words at random, and by that chooses between pairs that are
    # equally frequent. So a first pass finds these letters, and the second one gets them in alphabetical order.
    letters = sorted(letter for letter in train(len(_SPECIAL_TOKENS)) if letter.startswith("##"))
    tokenizer = BertWordPieceTokenizer(train(vocab_size, *letters))
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ids)
    return str(tokenizer.to_str())


def make_tokenizer(text: str) -> Any:
    """Return a fast tokenizer of transformers from JSON that `train_tokenizer` returned."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text), model_input_names=inputs, **_SPECIAL_TOKENS
    )


def get_vocab_size(tokenizer: Any) -> int:
    """Return the number of rows that an embedding for this tokenizer needs: its largest token id + 1."""
    return 1 + int(max(tokenizer.get_vocab().values()))


def load_tokenizer(name: str, in_words: bool = False) -> Any:
    """Load a tokenizer from a folder or (a line on stderr says so) the hub, `in_words` for lists of words. CpuftError:
    it is missing or unusable.
    """
    import transformers

    source = _find_tokenizer(name)
    if Path(source).is_dir():
        _check_vocabulary_files(Path(source))
    else:
        print(f"looking for model {name} at the Hugging Face hub", file=sys.stderr, flush=True)
        find_hub_problem()
    try:
        # Without this, RoBERTa's would take each word for the first of a text. Others ignore the option.
        options = {"add_prefix_space": True} if in_words else {}
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except (ImportError, OSError, ValueError) as error:
        if package := _find_missing_package(Path(source), str(error)):
            raise CpuftError(
                f"the tokenizer of {name} needs the package {package}: install it beside cpuft, here and on all hosts"
            ) from None
        raise CpuftError(describe_load_failure(name, error)) from None
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise CpuftError(
            f"the tokenizer of {name} knows nothing but its special tokens: name another one by --tokenizer"
        )
    return tokenizer


def _find_tokenizer(name: str) -> str:
    """Return where a tokenizer is: for adapters of peft without one, with their base model."""
    source = find_model(name)
    has_none = Path(source).is_dir() and not _has_vocabulary(Path(source))
    return (has_none and find_base_model(source)) or source


def _has_vocabulary(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _VOCABULARY_FILES)


def _find_missing_package(folder: Path, error: str) -> str:
    # It takes a SentencePiece file for one of tiktoken if it cannot import sentencepiece.
    if "`tiktoken` is required" in error and importlib.util.find_spec("sentencepiece") is None:
        is_tiktoken = any(folder.glob("*.tiktoken")) or (folder / "tekken.json").exists()
        return "tiktoken" if is_tiktoken else "sentencepiece"
    found = _PACKAGE.search(error)
    return next(filter(None, found.groups())).lower() if found else ""


def _check_vocabulary_files(folder: Path) -> None:
    """Raise CpuftError if the folder holds no vocabulary: transformers would make a tokenizer that knows no word."""
    missing = ""
    if not _has_vocabulary(folder):
        missing = "no tokenizer.json, vocab.txt (WordPiece), vocab.json with merges.txt (BPE) or SentencePiece *.model"
    elif {"vocab.json"} == {"vocab.json", "merges.txt", "tokenizer.json"} & {path.name for path in folder.iterdir()}:
        missing = "vocab.json without merges.txt, and no tokenizer.json"
    if missing:
        raise CpuftError(
            f"the folder {folder} holds no complete tokenizer ({missing}): save it there, or name one by --tokenizer"
        )


def _check_tokenizer(config: TrainConfig, vocab_size: int) -> None:
    """Raise CpuftError if the model embeds fewer tokens than `vocab_size`, the size of the tokenizer."""
    # Untrained models of a named size, such as bert-base, get an embedding of `vocab_size`, and pass.
    embedded = load_config(config, {}, vocab_size).vocab_size
    if vocab_size > embedded:
        raise CpuftError(
            f"the tokenizer has {vocab_size} tokens, and {get_model_name(config)} embeds only {embedded}: "
            f"leave --tokenizer out, or name the one that the model was made with"
        )


def choose_pad_id(config: TrainConfig, tokenizer: Any, vocab_size: int = 0) -> int:
    """Return the id that pads batches: the tokenizer's padding token, else the model's, else that of a text's end.

    Models that number positions from their own padding token, such as RoBERTa, keep that one. `vocab_size` is that of
    the tokenizer, for an untrained model; 0: BERT's own. Raises CpuftError: there is none of these, or the model does
    not embed it.
    """
    settings = load_config(config, {}, vocab_size)
    own, ends = getattr(settings, "pad_token_id", None), getattr(settings, "eos_token_id", None)
    first = [own] if settings.model_type in POSITIONS_AFTER_PADDING else []
    ends = ends if isinstance(ends, list) else [ends]
    known = [one for one in (*first, tokenizer.pad_token_id, own, tokenizer.eos_token_id, *ends) if one is not None]
    if not known:
        raise CpuftError(
            f"neither the tokenizer nor the configuration of {get_model_name(config)} names a padding token or a token "
            f"that ends a text: set pad_token_id in its config.json"
        )
    if not 0 <= known[0] < settings.vocab_size:
        raise CpuftError(
            f"the padding token of {get_model_name(config)} has the id {known[0]}, and the model embeds the ids from 0 "
            f"to {settings.vocab_size - 1} only: set pad_token in tokenizer_config.json to a token that the model knows"
        )
    return int(known[0])
