"""The sizes of encoders as config.json gives them, against the models themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from cpuft.config.train import TrainConfig
from cpuft.train.model_shape import ModelShape, find_shape, read_encoder_shape
from tests.train.fast.encoders import DEBERTA, KINDS, make_model
from tests.train.fast.encoders import SIZES as ENCODER_SIZES
from tests.train.kept import SIZES


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_has_as_many_parameters_as_its_model(kind: str) -> None:
    model = make_model(kind)
    shape = read_encoder_shape(model.config.to_dict())
    assert shape
    classifier = sum(
        p.numel() for name, p in model.named_parameters() if "out_proj" in name or name.startswith("classifier.weight")
    )
    wanted = sum(parameter.numel() for parameter in model.parameters()) - classifier
    assert shape.linear_parameters + shape.other_parameters == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    "options", [{"share_att_key": False}, {"position_buckets": -1}, {"position_biased_input": True}]
)
def test_a_shape_has_as_many_parameters_as_other_forms_of_deberta(options: dict[str, Any]) -> None:
    model = DebertaV2ForSequenceClassification(DebertaV2Config(**ENCODER_SIZES, **DEBERTA | options))
    shape = read_encoder_shape(model.config.to_dict())
    assert shape
    wanted = sum(parameter.numel() for parameter in model.parameters())
    assert shape.linear_parameters + shape.other_parameters == pytest.approx(wanted, rel=0.03)


def test_an_unknown_architecture_has_no_shape() -> None:
    settings = {"model_type": "bert", "num_hidden_layers": 3, "type_vocab_size": 2, **SIZES}
    assert read_encoder_shape(settings | {"model_type": "gpt2"}) is None
    assert read_encoder_shape(settings | {"hidden_size": "many"}) is None
    disentangled = settings | {"model_type": "deberta-v2", **DEBERTA}
    assert read_encoder_shape(disentangled) is not None
    assert read_encoder_shape(disentangled | {"conv_kernel_size": 3}) is None
    assert read_encoder_shape(disentangled | {"pos_att_type": "c2p"}) is None
    assert read_encoder_shape({}) is None


@pytest.mark.parametrize("settings", ['{"model_type": "gpt2", "hidden_size": 64}', "{"])
def test_an_unknown_architecture_is_as_large_as_its_file(settings: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(settings)
    (tmp_path / "model.safetensors").write_bytes(bytes(4000))
    assert find_shape(TrainConfig(model=str(tmp_path)), 0) == ModelShape(0, 1000)


def test_an_untrained_model_is_as_large_as_its_configuration() -> None:
    found = find_shape(TrainConfig(from_config="bert-large"), 30522)
    assert (found.layers, found.hidden, found.inner) == (24, 1024, 4096)
    # As published, without a head: 335 million.
    assert isinstance(found, ModelShape)
    assert found.linear_parameters + found.other_parameters == pytest.approx(335e6, rel=0.005)
