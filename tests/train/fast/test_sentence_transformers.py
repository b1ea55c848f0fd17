"""accelerate and --wrap under sentence-transformers: the same training as without them, and models that load again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

from cpuft.train.fast.acceleration import accelerate, describe_layers
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE
from cpuft.train.model import find_model
from tests.conftest import run_cpuft
from tests.train.architectures import save_architecture
from tests.train.fast.encoders import relative_error
from tests.train.fast.sentence_trainer import TEXTS, load, make_pairs, train

SCRIPT = Path(__file__).with_name("sentence_trainer.py")
LIMIT = 1e-4


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)


def accelerated(model: Any, precision: str) -> Any:
    """The optimizer of a model, both accelerated."""
    optimizer = accelerate(model, make_optimizer(model), precision=precision)[1]
    assert "2 of 2 layers" in describe_layers(model) or "6 of 6 layers" in describe_layers(model)
    assert getattr(model, MASTERS_ATTRIBUTE).embedding is not None
    return optimizer


def check_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert len(set(wanted["losses"])) > 15
    assert found["losses"] == pytest.approx(wanted["losses"], abs=LIMIT)
    for name in ("middle", "end"):
        assert relative_error(torch.tensor(found[name]), torch.tensor(wanted[name])) < 1e-3


@pytest.mark.parametrize("name", ["bert", "mpnet", pytest.param("minilm", marks=pytest.mark.proof)])
def test_losses_and_embeddings_are_those_of_the_plain_trainer(tmp_path: Path, name: str) -> None:
    folder = find_model("minilm") if name == "minilm" else save_architecture(tmp_path / name, name)
    rate = {"learning_rate": 1e-5} if name == "minilm" else {}
    wanted = train(model := load(folder), str(tmp_path), make_optimizer(model), **rate)
    found = train(model := load(folder), str(tmp_path), accelerated(model, "fp32"), **rate)
    check_alike(found, wanted)


def test_a_model_in_bf16_is_saved_in_all_its_bits(tmp_path: Path) -> None:
    model = load(save_architecture(tmp_path / "bert", "bert"))
    optimizer = accelerated(model, "bf16")
    found = train(model, str(tmp_path), optimizer, save_strategy="steps", save_steps=10)
    wanted = train(plain := load(str(tmp_path / "bert")), str(tmp_path), make_optimizer(plain))
    assert found["losses"] == pytest.approx(wanted["losses"], abs=0.05)
    assert relative_error(torch.tensor(found["end"]), torch.tensor(wanted["end"])) < 0.1
    state = model.state_dict()
    model.save_pretrained(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "checkpoint-20"):
        again = SentenceTransformer(str(folder), device="cpu")
        assert again.state_dict().keys() == state.keys()
        for key, value in again.state_dict().items():
            torch.testing.assert_close(value, state[key], atol=0, rtol=0, msg=key)
        assert relative_error(torch.tensor(again.encode(TEXTS)), torch.tensor(found["end"])) < 0.02


def make_scored(count: int) -> Dataset:
    pairs = make_pairs(count)
    return pairs.add_column("label", [float(number % 2) for number in range(count)])


def train_cross_encoder(model: CrossEncoder, out: Path, optimizer: Any) -> list[float]:
    arguments = CrossEncoderTrainingArguments(
        str(out),
        use_cpu=True,
        max_steps=20,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
    )
    data, loss = make_scored(64), BinaryCrossEntropyLoss(model)
    trainer = CrossEncoderTrainer(model, arguments, train_dataset=data, loss=loss, optimizers=(optimizer, None))
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def watch_widths(model: torch.nn.Module) -> set[int]:
    """The lengths of what the encoder will return, once something is computed."""
    seen: set[int] = set()
    encoder = next(module for module in model.modules() if hasattr(module, "layer"))
    encoder.register_forward_hook(lambda module, given, output: seen.add(output[0].shape[1]))
    return seen


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_a_cross_encoder_computes_first_tokens_and_trains_alike(tmp_path: Path, name: str) -> None:
    def make() -> CrossEncoder:
        torch.manual_seed(0)
        folder = save_architecture(tmp_path / name, name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        torch.manual_seed(0)
        return CrossEncoder(folder, num_labels=1, device="cpu")

    wanted = train_cross_encoder(plain := make(), tmp_path, make_optimizer(plain))
    optimizer = accelerated(model := make(), "fp32")
    seen = watch_widths(model)
    found = train_cross_encoder(model, tmp_path, optimizer)
    assert len(set(wanted)) > 15
    assert found == pytest.approx(wanted, abs=LIMIT)
    assert seen == {1}
    model.save_pretrained(str(tmp_path / "saved"))
    pairs = [("the red cat", "a red cat is here"), ("dog", "a bird")]
    again = CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(pairs)
    assert again == pytest.approx(model.predict(pairs), abs=1e-5)
    assert again == pytest.approx(plain.predict(pairs), abs=1e-3)


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_a_sentence_transformer_computes_every_token(tmp_path: Path, mode: str) -> None:
    """Of CLS pooling, too: who calls it may read the embeddings of all tokens."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    plain, model = (load(save_architecture(tmp_path / "bert", "bert")) for _ in range(2))
    plain[1] = model[1] = Pooling(32, pooling_mode=mode)
    accelerated(model, "fp32")
    for output in ("token_embeddings", "sentence_embedding"):
        found, wanted = (one.encode(TEXTS, output_value=output, convert_to_tensor=True) for one in (model, plain))
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.shape == theirs.shape
            assert relative_error(mine, theirs) < 1e-5


@pytest.mark.proof
def test_two_ranks_of_a_launch_with_wrap_train_as_one_plain_process(tmp_path: Path) -> None:
    """The batches of two ranks are those of one process that adds up two micro-batches."""
    folder = save_architecture(tmp_path / "mpnet", "mpnet")
    out = tmp_path / "out"
    out.mkdir()
    fp32 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # which any CPU then chooses by itself
    done = run_cpuft("launch", "--wrap", "--np", "2", "--", str(SCRIPT), folder, str(out), seconds=280, settings=fp32)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "--wrap" in line]
    assert "fast path of SentenceTransformer: 2 of 2 layers replaced" in said[0]
    assert len(said) == 1
    first, second = (json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert first == second | {"middle": first["middle"]}
    wanted = train(load(folder), str(tmp_path), gradient_accumulation_steps=2)
    check_alike(first, wanted)
    again = SentenceTransformer(str(out / "model"), device="cpu").encode(TEXTS)
    assert relative_error(torch.tensor(again), torch.tensor(first["end"])) < 1e-5
