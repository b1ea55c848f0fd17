"""Models of other architectures than BERT's train on several ranks, or are refused with one clear message."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cpuft.comm.compression.embedding_rows import check_lookups, find_embedding
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.prepare import prepare
from cpuft.train.exchange.table import choose_exchange
from cpuft.train.model import check_weights, find_model
from cpuft.train.objective.table import make_objective
from cpuft.train.run_warnings import find_early_warnings
from cpuft.train.setup import find_unused_parameters, try_model
from tests.comm.ranks import fork_ranks
from tests.train.architectures import SIZES, save_architecture
from tests.train.tiny import make_config, save_tokenizer


def train_on_two_ranks(folder: Path, *wanted: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """What became of each training, by "name precision"; the same on both ranks."""
    (folder / "wanted.json").write_text(json.dumps(wanted), encoding="utf-8")
    done = fork_ranks(2, "tests.train.architectures", str(folder), seconds=280, XDG_CACHE_HOME=str(folder / "cache"))
    assert done.returncode == 0, done.stdout[-3000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert first == second
    return dict(first)


NAMES = ("bert", "gpt2", "llama", "qwen3", "bart", "xlnet", "deberta", "deberta-v2", "roberta", "albert")
BF16 = ("xlnet", "albert", "deberta-v2")


@pytest.mark.usefixtures("alone", "own_cache")
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_trains_under_the_exchange_of_gradients(tmp_path: Path, name: str) -> None:
    config = replace(make_config(tmp_path, "class"), model=save_architecture(tmp_path / name, name), fast_path=False)
    prepared = read_prepared(str(prepare(config)))
    objective = make_objective(config, prepared)
    model = objective.load_model(config)
    try_model(model, objective, config, prepared, "fp32")
    exchange = choose_exchange(config, 2)(model, torch.optim.SGD(model.parameters(), lr=0.1), config, "fp32")
    for rows in (np.arange(4), np.arange(4, 8)):
        batch = objective.make_batch(prepared.train, rows)
        exchange.begin_pass(is_last=True)
        torch.autograd.backward(objective.losses(exchange.forward_model, batch).sum())
        tokens = [objective.list_token_ids(prepared.train, rows)]
        exchange.average_gradients(partial(list, tokens))
        assert all(parameter.grad is not None for parameter in model.parameters()) == (name != "xlnet")
        exchange.clear_gradients()


@pytest.mark.proof
def test_many_architectures_train_on_two_ranks(tmp_path: Path) -> None:
    # GPT-2 looks token types up in its word embedding; XLNet has parameters that are unused.
    found = train_on_two_ranks(
        tmp_path, *((name, "fp32") for name in NAMES), *((name, "bf16") for name in BF16), ("deberta", "bf16")
    )
    bf16 = found.pop("deberta bf16")["error"]
    assert bf16.startswith("DebertaForSequenceClassification of ")
    assert " cannot compute a batch of two examples in bf16 (value cannot be converted to type c10::BFloat16 " in bf16
    assert bf16.endswith(": try --precision fp32, or give another --model")
    assert {name: one["error"] for name, one in found.items()} == {
        **{f"{name} fp32": "" for name in NAMES},
        **{f"{name} bf16": "" for name in BF16},
    }
    assert all(one["equal"] for one in found.values())
    # BART's two stacks read one embedding.
    whole = {name for name, one in found.items() if not one["by_rows"]}
    assert whole == {"gpt2 fp32", "bart fp32"}


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
            "holds no complete tokenizer (no tokenizer.json, vocab.txt (WordPiece), vocab.json with merges.txt ",
        ),
        (("tokenizer_config.json",), "holds no complete tokenizer (no tokenizer.json, vocab.txt (WordPiece), "),
        (("vocab.json",), "holds no complete tokenizer (vocab.json without merges.txt, and no tokenizer.json): save "),
        (("vocab.txt",), "knows nothing but its special tokens: name another"),
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
    assert read_prepared(str(prepare(replace(config, tokenizer="minilm")))).unknown_share == 0


@pytest.mark.usefixtures("own_cache")
def test_many_unknown_tokens_are_warned_of_and_only_unknown_ones_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, "class")
    assert read_prepared(str(prepare(config))).unknown_share == 0
    rows = [{"text": "the old cat \U0001f995 is red \U0001f996", "label": f"{number % 2}"} for number in range(8)]
    Path(config.train_file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = replace(config, validation_file=config.train_file)
    prepared = read_prepared(str(prepare(config)))
    assert prepared.unknown_share == pytest.approx(2 / 7)
    # The validation rows are the training rows.
    assert [warning[:56] for warning in find_early_warnings(config, prepared)] == [
        "warning: 29% of the tokens of the training texts are unk",
        "warning: 8 of 8 validation rows have the same tokens as ",
        "warning: with 8 validation rows, accuracies that differ ",
    ]
    rows = [row | {"text": "\U0001f995 \U0001f996"} for row in rows]
    Path(config.train_file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(CpuftError, match="knows no token of the training texts: name the tokenizer that the model was"):
        prepare(config)


@pytest.mark.usefixtures("own_cache")
def test_what_a_model_cannot_compute_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = save_architecture(tmp_path / "bart", "bart", eos_token_id=30000)  # which MiniLM's tokenizer does not add
    config = replace(make_config(tmp_path, "class"), model=folder)
    prepared = read_prepared(str(prepare(config)))
    objective = make_objective(config, prepared)
    model = objective.load_model(config)
    with pytest.raises(CpuftError) as caught:
        try_model(model, objective, config, prepared, "fp32")
    assert str(caught.value).startswith(
        f"BartForSequenceClassification of {folder} cannot compute a batch of two examples in fp32 ("
    )
    assert str(caught.value).endswith("): give another --model")


def list_saved_bytes(losses: torch.Tensor) -> list[int]:
    """Bytes of each tensor that functions of torch save for a backward pass."""
    found, seen, waiting = list[int](), set[Any](), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [one for one, _ in node.next_functions]
        for name in (one for one in dir(node) if one.startswith("_saved_")):
            with suppress(RuntimeError, TypeError):  # what was saved cannot be unpacked
                found += [one.nbytes for one in [getattr(node, name)] if isinstance(one, torch.Tensor)]
    return found


@pytest.mark.usefixtures("own_cache")
def test_the_first_pass_keeps_no_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(make_config(tmp_path, "class"), model=save_architecture(tmp_path / "llama", "llama"))
    prepared = read_prepared(str(prepare(config)))
    objective = make_objective(config, prepared)
    model, kept = objective.load_model(config), list[int]()

    def find(model: Any, losses: torch.Tensor) -> tuple[str, ...]:
        kept.extend(list_saved_bytes(losses))
        return find_unused_parameters(model, losses)

    monkeypatch.setattr("cpuft.train.setup.find_unused_parameters", find)
    try_model(model, objective, config, prepared, "fp32")
    assert sum(kept) < 100  # indices, which torch saves in another way
    # The same pass without it.
    batch = objective.make_batch(prepared.train, np.arange(2))
    assert sum(list_saved_bytes(objective.losses(model, batch))) > 10_000


def test_parameters_that_are_not_used_are_found() -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "other": torch.nn.Linear(2, 1)})
    model["used"].bias.requires_grad_(False)
    assert find_unused_parameters(model, model["used"](torch.ones(3, 2))) == ("other.weight", "other.bias")


@pytest.mark.usefixtures("own_cache")
def test_a_model_trained_on_other_labels_gets_a_new_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path, "class")
    three = transformers.AutoModelForSequenceClassification.from_pretrained(config.model, num_labels=3)
    three.save_pretrained(config.model)
    prepared = read_prepared(str(prepare(config)))
    model = make_objective(config, prepared).load_model(config)
    assert model.classifier.weight.shape[0] == 2
    words = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(model.state_dict()[words], three.state_dict()[words])
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"the head of {config.model} was trained for other labels: the model gets a new, untrained head"
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def load(config: TrainConfig) -> None:
    """What is done before a model trains."""
    check_weights(find_model(config.model))
    make_objective(config, read_prepared(str(prepare(config)))).load_model(config)


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "break_model, options, message",
    [
        (
            lambda tiny: cut(tiny / "model.safetensors"),
            {},
            "/model.safetensors is cut off or damaged: copy or ",
        ),
        (
            lambda tiny: (tiny / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            {},
            "/model.safetensors is a pointer of Git LFS, not the file itself: fetch the file with this command",
        ),
        (lambda tiny: (tiny / "model.safetensors").write_bytes(b"abc"), {}, "/model.safetensors is cut off or damaged"),
        (
            lambda tiny: None,
            {"max_length": 65},
            "has 64 positions: give --max-length 64 or less",
        ),
        (
            lambda tiny: change(tiny / "config.json", hidden_size=64),
            {},
            " have other sizes than config.json says",
        ),
        (lambda tiny: change(tiny / "config.json", model_type="gpt2"), {}, "are not for GPT2ForSequenceClassification"),
    ],
)
def test_broken_models_are_refused(
    tmp_path: Path, break_model: Callable[[Path], object], options: dict[str, Any], message: str
) -> None:
    config = replace(make_config(tmp_path, "class"), **options)
    break_model(Path(config.model))
    with pytest.raises(CpuftError) as caught:
        load(config)
    assert message in str(caught.value)
