"""A classifier that was trained before keeps each output of its head with the name of its label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from cpuft.config.train import TrainConfig
from cpuft.train.checkpoint.final_model import save_model
from cpuft.train.head import match_labels
from cpuft.train.objective.base import Objective
from cpuft.train.objective.labels import Classification, MultiLabelClassification, TokenClassification
from tests.train.architectures import save_architecture
from tests.train.tiny import save_tiny


@pytest.mark.parametrize(
    "stored, labels, rows",
    [
        (("positive", "negative"), ("negative", "positive"), [1, 0]),
        (("CONTRADICTION", "NEUTRAL", "ENTAILMENT"), ("entailment", "neutral", "contradiction"), [2, 1, 0]),
        (("not entailment", "Entailment "), ("entailment", "not_entailment"), [1, 0]),
        (("negative", "neutral", "positive"), ("negative", "positive"), [0, 2]),
        (("negative", "positive"), ("negative", "neutral", "positive"), [0, -1, 1]),
        (("cat", "dog"), ("green", "red"), [-1, -1]),
        (("LABEL_0", "LABEL_1"), ("no", "yes"), [0, 1]),
        (("no", "yes"), ("0", "1"), [0, 1]),
        (("LABEL_1", "LABEL_0"), ("0", "1"), [1, 0]),
        (("LABEL_0", "LABEL_1", "LABEL_2"), ("1", "2", "3"), [0, 1, 2]),
        (("1 star", "2 stars"), ("1", "2"), [0, 1]),
        (("us", "US"), ("US", "us"), [1, 0]),
        (("O", "B-PER"), ("B-per", "O", "I-PER"), [1, 0, -1]),
        (("True", "False"), ("0", "1"), [1, 0]),
        (("0.0", "1.0"), ("0", "1", "2"), [0, 1, -1]),
        (("Negative", "Neutral", "Positive"), ("-1", "0", "1"), [0, 1, 2]),
        ([f"c{one}" for one in range(11)], sorted(map(str, range(11))), [0, 1, 10, *range(2, 10)]),
    ],
)
def test_labels_are_matched_by_name(stored: Sequence[str], labels: Sequence[str], rows: list[int]) -> None:
    assert match_labels(stored, labels) == rows


def save_head(folder: Path, names: Sequence[str], kind: str = "AutoModelForSequenceClassification") -> str:
    """A tiny encoder with a head whose weights tell its outputs apart."""
    model = getattr(transformers, kind).from_pretrained(save_tiny(folder), num_labels=len(names))
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {n: i for i, n in enumerate(names)}
    for row, name in enumerate(names):
        model.classifier.weight.data[row], model.classifier.bias.data[row] = ord(name[0]), row
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", [Classification, MultiLabelClassification, TokenClassification])
@pytest.mark.parametrize(
    "names, labels, message",
    [
        (("pos", "neg"), ("neg", "pos"), "its outputs for neg, pos are taken for neg, pos"),
        (("a", "m", "z"), ("a", "z"), "its outputs for m are left out"),
        (("z", "a"), ("a", "new", "z"), "its outputs for new are new and untrained"),
        (
            ("cat", "dog"),
            ("green", "red"),
            "for green, red are new and untrained; its outputs for cat, dog are left",
        ),
        (("LABEL_0", "LABEL_1"), ("no", "yes"), "its outputs for LABEL_0, LABEL_1 are taken for no, yes"),
    ],
)
def test_a_head_follows_the_names_of_its_labels(
    kind: type[Objective],
    names: tuple[str, ...],
    labels: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = TrainConfig(model=save_head(tmp_path, names, kind.model_class))
    model = kind(labels, ("accuracy",), 0, 0).load_model(config)
    assert message in capsys.readouterr().err
    for label, row in zip(labels, model.classifier.weight, strict=True):
        assert (label in names) == torch.equal(row, torch.full((32,), float(ord(label[0])))) or "LABEL_0" in names
    assert model.config.id2label == dict(enumerate(labels))
    assert model(torch.ones((1, 4), dtype=torch.int64)).logits.shape[-1] == model.num_labels == len(labels)


def test_a_head_of_adapters_follows_them_too(tmp_path: Path) -> None:
    base, folder = save_tiny(tmp_path / "tiny"), tmp_path / "run"
    first = Classification(("neg", "pos"), ("accuracy",), 0)
    trained = first.load_model(TrainConfig(model=base, lora_rank=2))
    save_model(trained, base, str(folder))
    wanted = next(
        p for name, p in trained.named_parameters() if name.endswith("classifier.modules_to_save.default.weight")
    )
    second = replace(first, labels=("pos", "neg"))
    model = second.load_model(TrainConfig(model=f"{folder}/model"))
    assert torch.equal(model.classifier.weight, wanted.flip(0))


@pytest.mark.parametrize("kind", ["roberta", "bart", "xlnet", "gpt2", "llama", "deberta-v2"])
def test_heads_of_other_architectures_follow_them(kind: str, tmp_path: Path) -> None:
    source = save_architecture(tmp_path / kind, kind)
    first = Classification(("neg", "pos"), ("accuracy",), 0)
    trained = first.load_model(TrainConfig(model=source)).eval()
    trained.save_pretrained(source)
    model = replace(first, labels=("pos", "other", "neg")).load_model(TrainConfig(model=source)).eval()
    ids = torch.tensor([[101, 7, 8, 9, 102]])
    with torch.inference_mode():
        assert torch.allclose(model(ids).logits[:, [2, 0]], trained(ids).logits, atol=1e-6)


def test_a_model_without_a_head_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Classification(("no", "yes"), ("accuracy",), 0).load_model(TrainConfig(model=save_tiny(tmp_path)))
    assert capsys.readouterr().err == ""
