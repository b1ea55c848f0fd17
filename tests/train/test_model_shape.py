"""The sizes of encoders as config.json gives them, against the models themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.config.train import TrainConfig
from cpuft.train.model_shape import ModelShape, find_shape, read_encoder_shape
from tests.train.fast.encoders import KINDS, make_model
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
    # Relative embeddings of DeBERTa and positions that it may lack count for much in so small a model only.
    rel = 0.1 if kind == "deberta-v2" else 0.02
    assert shape.linear_parameters + shape.other_parameters == pytest.approx(wanted, rel=rel)


def test_an_unknown_architecture_has_no_shape() -> None:
    settings = {"model_type": "bert", "num_hidden_layers": 3, "type_vocab_size": 2, **SIZES}
    assert read_encoder_shape(settings | {"model_type": "gpt2"}) is None
    assert read_encoder_shape(settings | {"hidden_size": "many"}) is None
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
