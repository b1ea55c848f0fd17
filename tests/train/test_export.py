"""Exported models compute what the run's model computes, whatever the batch; what cannot be exported is refused."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from cpuft.config.export import ExportConfig
from cpuft.errors import CpuftError
from cpuft.train.embedder import Embedder
from cpuft.train.embedding_form import EmbeddingForm, write_form
from cpuft.train.export import (
    MAX_DIFFERENCE,
    ValidatedModel,
    Validation,
    check_graph,
    choose_export_folder,
    export,
    format_validation,
    make_sample,
)
from cpuft.train.graphs import Graph, GraphOutput, OnnxGraph, largest_difference
from cpuft.train.predict import make_run_model, read_finished_run, tokenize_splits
from tests.train.pairs import make_config as make_pairs_config
from tests.train.tiny import learn, make_config

pytestmark = pytest.mark.usefixtures("alone", "plain")


def run_onnx(folder: Path, texts: list[Any], **options: Any) -> Any:
    """The logits of the exported files alone: their tokenizer, and ONNX Runtime."""
    import onnxruntime
    from transformers import AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="np", **options)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    names = {one.name for one in session.get_inputs()}
    return session.run(["logits"], {name: value for name, value in inputs.items() if name in names})[0]


def run_model(folder: Path, texts: list[Any], **options: Any) -> Any:
    """The logits that transformers computes with the model of a run."""
    import transformers

    inputs = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt", **options)
    kind = "TokenClassification" if options else "SequenceClassification"
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(**inputs).logits.numpy()


def test_a_model_is_exported_with_its_labels_and_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, evaluation = learn(make_config(tmp_path, "class", dropout=0.1), "fp32", tmp_path / "run")
    export(ExportConfig(run="run", validate=True))
    said = capsys.readouterr().out.splitlines()
    folder = tmp_path / "run/onnx"
    assert said[0].startswith("exported to run/onnx: onnx, fp32, ")
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "not red", "1": "red"}
    kept = json.loads((folder / "validation.json").read_text())
    assert kept["run"]["metrics"] == kept["export"]["metrics"] == evaluation.metrics
    assert kept["largest_difference"] <= MAX_DIFFERENCE
    assert kept["examples"] == 37
    assert min(kept["run"]["samples_per_second"], kept["export"]["samples_per_second"]) > 0
    for texts in (["red"], ["the cat is old", "a green dog"] * 20, ["red " * 60, "dog"]):
        found, wanted = run_onnx(folder, texts), run_model(tmp_path / "run/model", texts)
        assert np.abs(found - wanted).max() <= MAX_DIFFERENCE
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model", "onnx", "record.jsonl"]

    (tmp_path / "served").mkdir()
    OnnxGraph.write(folder / "model.onnx", tmp_path / "served", "int8")
    assert (tmp_path / "served/model.onnx").stat().st_size < 0.4 * (folder / "model.onnx").stat().st_size
    graph, batch = OnnxGraph(tmp_path / "served"), {"input_ids": torch.randint(1000, 2000, (3, 9))}
    batch |= {"attention_mask": torch.ones_like(batch["input_ids"]), "token_type_ids": 0 * batch["input_ids"]}
    difference = (graph(**batch).logits - OnnxGraph(folder)(**batch).logits).abs().max()
    assert 0 < difference < 0.5
    with pytest.raises(CpuftError, match="the folder run/onnx is not empty: give another --output, or remove"):
        export(ExportConfig(run="run"))
    validation = Path(read_finished_run("run").train.validation_file)
    validation.write_text(validation.read_text().replace('"label": "red"', '"label": ""', 1))
    with pytest.raises(CpuftError, match=r"--validate needs labels, and .*\.jsonl lacks some: leave it out"):
        export(ExportConfig(run="run", output="other", validate=True))


@pytest.mark.proof
def test_adapters_are_merged_and_tags_have_a_logit_for_each_token(tmp_path: Path) -> None:
    learn(make_config(tmp_path, "tags", lora_rank=4, max_steps=20), "fp32", tmp_path / "run")
    export(ExportConfig(run="run"))
    words = [["the", "red", "cat"], ["dog"], ["green", "dog"] * 12]
    found = run_onnx(tmp_path / "run/onnx", words, is_split_into_words=True)
    run = read_finished_run("run")
    prepared = tokenize_splits(run, run.task, {"": make_sample(run.task)["1"]})
    _, model = make_run_model(run, prepared)
    from transformers import AutoTokenizer

    inputs = AutoTokenizer.from_pretrained("run/onnx")(
        words, padding=True, return_tensors="pt", is_split_into_words=True
    )
    with torch.inference_mode():
        wanted = model(**inputs).logits.numpy()
    assert found.shape == (3, inputs["input_ids"].shape[1], 3)
    assert np.abs(found - wanted).max() <= MAX_DIFFERENCE
    assert not (tmp_path / "run/onnx/adapter_config.json").exists()


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["score", "labels"])
@pytest.mark.parametrize("format", ["onnx", "openvino"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_other_kinds_formats_and_precisions(kind: str, format: str, precision: str, tmp_path: Path) -> None:
    _, evaluation = learn(make_config(tmp_path, kind), "fp32", tmp_path / "run")
    export(ExportConfig(run="run", format=format, precision=precision, validate=True))
    kept = json.loads(
        (
            choose_export_folder(ExportConfig(run="run", format=format, precision=precision)) / "validation.json"
        ).read_text()
    )
    assert kept["run"]["metrics"] == evaluation.metrics
    limit = 1e-6 if precision == "fp32" else 0.1
    assert kept["export"]["metrics"] == pytest.approx(evaluation.metrics, abs=limit)


class Wrong(torch.nn.Module):
    """A graph whose outputs are the model's and an error."""

    def __init__(self, model: torch.nn.Module, error: float) -> None:
        super().__init__()
        self.model, self.error = model, error

    def forward(self, **inputs: torch.Tensor) -> GraphOutput:
        return GraphOutput(self.model(**inputs).logits + self.error)


def test_a_graph_with_other_outputs_is_refused(tmp_path: Path) -> None:
    learn(make_config(tmp_path, "class", max_steps=1), "fp32", tmp_path / "run")
    run = read_finished_run("run")
    sample = tokenize_splits(run, run.task, make_sample(run.task))
    objective, model = make_run_model(run, sample)
    right, wrong, infinite = (cast(Graph, Wrong(model, error)) for error in (0.5e-4, 3e-4, math.nan))
    check_graph(ExportConfig(), model, right, objective, sample)
    check_graph(ExportConfig(precision="int8"), model, wrong, objective, sample)
    with pytest.raises(CpuftError, match=r"SequenceClassification computes other outputs \(by "):
        check_graph(ExportConfig(), model, wrong, objective, sample)
    for precision in ("fp32", "int8"):
        with pytest.raises(CpuftError, match="computes other outputs"):
            check_graph(ExportConfig(precision=precision), model, infinite, objective, sample)


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(make_config(tmp_path, "class", max_steps=1), "fp32", tmp_path / "run")

    def fail(model: Any, batch: Any, folder: Path, *rest: str) -> None:
        (folder / "model.onnx").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr("cpuft.train.graphs.write_graph", fail)
    with pytest.raises(OSError, match="No space left"):
        export(ExportConfig(run="run"))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model", "record.jsonl"]


class Crash(torch.nn.Module):
    """A graph that takes no batch, or returns too little."""

    def forward(self, **inputs: torch.Tensor) -> Any:
        raise RuntimeError("invalid\ndimensions")


def test_a_graph_that_takes_no_batch_is_refused(tmp_path: Path) -> None:
    learn(make_config(tmp_path, "class", max_steps=1), "fp32", tmp_path / "run")
    run = read_finished_run("run")
    sample = tokenize_splits(run, run.task, make_sample(run.task))
    objective, model = make_run_model(run, sample)
    with pytest.raises(CpuftError, match=r"cannot run a batch of 1x3 tokens \(invalid dimensions\): serve the model"):
        check_graph(ExportConfig(), model, cast(Graph, Crash()), objective, sample)


@pytest.mark.parametrize("output", ["x.txt", "x.txt/inside"])
def test_no_folder_can_be_made_there(output: str, tmp_path: Path) -> None:
    learn(make_config(tmp_path, "class", max_steps=1), "fp32", tmp_path / "run")
    (tmp_path / "x.txt").write_text("mine")
    with pytest.raises(CpuftError, match=r"x\.txt is not a folder: give another --output"):
        export(ExportConfig(run="run", output=output))
    assert (tmp_path / "x.txt").read_text() == "mine"


VALIDATION = Validation(
    ValidatedModel("run", "fp32", 100.0, {"accuracy": 0.9, "f1": 0.8}),
    ValidatedModel("onnx", "int8", 250.04, {"accuracy": 0.88, "f1": 0.81}),
    examples=408,
    batch_size=64,
    threads=2,
    cpu="x",
    largest_difference=0.123,
    versions={},
)


def test_a_loss_is_stated() -> None:
    table = [
        "           run fp32  onnx int8",
        "accuracy     0.9000     0.8800",
        "f1           0.8000     0.8100",
        "samples/s     100.0      250.0",
        "on 408 validation examples with 2 threads; the largest difference of an output is 0.12",
    ]
    loss = "warning: the exported model loses 0.0200 of accuracy: consider --precision fp32"
    assert format_validation(VALIDATION) == [*table, loss]
    equal = replace(VALIDATION, export=replace(VALIDATION.export, metrics={"accuracy": 0.895, "f1": 0.8}))
    assert len(format_validation(equal)) == len(table)


def test_outputs_of_padding_are_not_compared() -> None:
    first, second = np.zeros((2, 3, 2), np.float32), np.zeros((2, 3, 2), np.float32)
    first[0, 2], second[1, 1] = 5, 0.5
    assert largest_difference(first, second, np.asarray([2, 2])) == 0.5
    assert largest_difference(first[:, 0], first[:, 0] + 1, np.asarray([2, 2])) == 1


def test_folders_are_named_after_format_and_precision() -> None:
    assert str(choose_export_folder(ExportConfig(run="r"))) == "r/onnx"
    assert str(choose_export_folder(ExportConfig(run="r", format="openvino", precision="int8"))) == "r/openvino-int8"
    assert str(choose_export_folder(ExportConfig(run="r", output="x"))) == "x"


@pytest.mark.parametrize(
    "pooling, format", [("mean", "onnx"), pytest.param("lasttoken", "openvino", marks=pytest.mark.proof)]
)
def test_an_embedding_model_is_exported_with_pooling_and_normalisation(
    pooling: str, format: str, tmp_path: Path
) -> None:
    config = make_pairs_config(tmp_path, max_steps=2, pooling=pooling)
    _, evaluation = learn(config, "fp32", tmp_path / "run")
    write_form(tmp_path / "run/model", EmbeddingForm(pooling, True, dimensions=16, max_length=32), 32)
    export(ExportConfig(run="run", format=format, validate=True, output="served"))
    kept = json.loads(Path("served/validation.json").read_text())
    assert kept["run"]["metrics"] == pytest.approx(kept["export"]["metrics"])
    assert set(kept["run"]["metrics"]) == set(evaluation.metrics)
    assert kept["largest_difference"] <= MAX_DIFFERENCE
    texts = ["where is the red cat", "a dog", "the old boat " * 4]
    wanted = Embedder("run", "fp32").embed(texts)
    from transformers import AutoTokenizer

    inputs = AutoTokenizer.from_pretrained("served")(texts, padding=True, return_tensors="np")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    found: Any
    if format == "onnx":
        import onnxruntime

        found = onnxruntime.InferenceSession("served/model.onnx").run(["sentence_embedding"], inputs)[0]
    else:
        import openvino

        compiled = openvino.Core().compile_model("served/openvino_model.xml", "CPU")
        found = compiled(inputs)["sentence_embedding"]
    assert found.shape == (3, 16)
    assert np.abs(found - wanted).max() <= MAX_DIFFERENCE
