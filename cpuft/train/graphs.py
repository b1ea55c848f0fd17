"""Models as graphs of ONNX Runtime and OpenVINO: traced, converted, quantised, and run on the batches of an objective.

optimum does the same, but optimum-onnx 0.1.0, its newest version, needs a transformers below 4.58, and cpuft pins 5.
"""

from __future__ import annotations

import abc
import importlib.util
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.errors import CpuftError, describe_error, install_command
from cpuft.train.embedder import finish_embeddings, pool
from cpuft.train.embedding_form import EmbeddingForm
from cpuft.train.objective.base import Batch

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""All inputs that a batch may have, in the order of a graph's inputs."""
_BYTES_IN_ONE_FILE = 1 << 31
"""A larger model has its weights in files of their own: a file of ONNX cannot be larger."""
EMBEDDING_OUTPUT = "sentence_embedding"
"""Name of the output of an embedding model's graph; that of other models is logits."""
_OPSET = 17
"""Version of ONNX's operators: the first that has layer normalisation."""


@dataclass(frozen=True)
class GraphOutput:
    """What a graph returns, in the form of the models of transformers."""

    logits: torch.Tensor


class Graph(torch.nn.Module, abc.ABC):
    """A saved graph, which an objective can call like the model that it was made from. It has no parameters."""

    packages: ClassVar[tuple[str, ...]]
    """Python packages that are needed to write and to run such a graph."""
    file_name: ClassVar[str]
    """File of the graph, whose name is that by which optimum finds it, too."""
    _names: list[str]
    """Names of the inputs that the graph has."""

    @classmethod
    @abc.abstractmethod
    def write(cls, onnx_file: Path, folder: Path, precision: str) -> None:
        """Write an fp32 or int8 graph to `file_name` in a folder; weights above 2 GB are in files beside it.
        `onnx_file` is the fp32 graph in ONNX, in a folder of its own, which is removed afterwards.
        """

    @abc.abstractmethod
    def __init__(self, folder: Path) -> None:
        """Load the graph of a folder, for as many threads as torch has. Raises any exception of its library."""
        super().__init__()

    def forward(self, **inputs: torch.Tensor) -> GraphOutput:
        """Return the logits, fp32, for the inputs of a batch; those that the graph does not have are ignored."""
        return GraphOutput(torch.from_numpy(self._run({name: inputs[name].numpy() for name in self._names})))

    @abc.abstractmethod
    def _run(self, inputs: dict[str, Any]) -> Any:
        """Return the logits, an array of NumPy, for the inputs of the graph, which are arrays of NumPy."""


class OnnxGraph(Graph):
    """A graph of ONNX Runtime."""

    packages = ("onnx", "onnxruntime")
    file_name = "model.onnx"

    @classmethod
    def write(cls, onnx_file: Path, folder: Path, precision: str) -> None:
        """Write the graph: for fp32 by moving its files, for int8 with the weights of matrix products and embeddings in
        int8.
        """
        if precision == "int8":
            _quantize_onnx(onnx_file, folder / cls.file_name)
        else:
            for path in onnx_file.parent.iterdir():
                path.rename(folder / path.name)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors only
        self._session = onnxruntime.InferenceSession(
            str(folder / self.file_name), options, providers=["CPUExecutionProvider"]
        )
        self._names = [one.name for one in self._session.get_inputs()]

    def _run(self, inputs: dict[str, Any]) -> Any:
        return self._session.run(None, inputs)[0]


class OpenVinoGraph(Graph):
    """A graph of OpenVINO, converted from ONNX: the file beside it with the ending .bin holds the weights."""

    packages = ("onnx", "onnxruntime", "openvino")
    file_name = "openvino_model.xml"

    @classmethod
    def write(cls, onnx_file: Path, folder: Path, precision: str) -> None:
        """Write the graph, for int8 with the same 8-bit weights as that of ONNX Runtime."""
        import openvino

        source = onnx_file
        if precision == "int8":
            source = onnx_file.with_name("int8.onnx")
            _quantize_onnx(onnx_file, source)
        # Without compress_to_fp16=False, the weights of an fp32 graph would be rounded to 16 bits.
        openvino.save_model(openvino.convert_model(source), folder / cls.file_name, compress_to_fp16=False)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import openvino

        # Without the hint, CPUs with bf16 instructions would compute fp32 graphs in bf16.
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        self._compiled = openvino.Core().compile_model(folder / self.file_name, "CPU", settings)
        self._names = [one.get_any_name() for one in self._compiled.inputs]

    def _run(self, inputs: dict[str, Any]) -> Any:
        return self._compiled(inputs)[0].copy()


GRAPHS: dict[str, type[Graph]] = {"onnx": OnnxGraph, "openvino": OpenVinoGraph}
"""Kinds of graphs by the values of --format, which are also the names of the extras that install their packages."""


class SentenceEncoder(torch.nn.Module):
    """An embedding model whose output is the embedding of each text, as `GraphOutput.logits`."""

    def __init__(self, encoder: torch.nn.Module, form: EmbeddingForm) -> None:
        super().__init__()
        self.encoder, self.form = encoder, form

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> GraphOutput:
        """Return the embeddings as `logits`, fp32, shape (texts, dimensions)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return GraphOutput(finish_embeddings(self.form, pool(self.form.pooling, hidden, attention_mask)))


class EmbeddingsAsStates(torch.nn.Module):
    """A `SentenceEncoder`, or its graph, in the place of an encoder, for an objective of embeddings: the hidden state
    of each token is the embedding of the text, so that any pooling returns that embedding.
    """

    def __init__(self, embeds: torch.nn.Module) -> None:
        super().__init__()
        self.embeds = embeds

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Return an object whose `last_hidden_state` has the shape (texts, length, dimensions)."""
        embeddings = self.embeds(input_ids=input_ids, attention_mask=attention_mask).logits
        return SimpleNamespace(last_hidden_state=embeddings[:, None].expand(-1, input_ids.shape[1], -1))


class _Logits(torch.nn.Module):
    """A model that takes its inputs by position and returns its logits only, as a graph does."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **types).logits
        return logits


def check_packages(format: str) -> None:
    """Raise CpuftError if a package that --format (a key of GRAPHS) needs is not installed."""
    missing = [name for name in GRAPHS[format].packages if importlib.util.find_spec(name) is None]
    if missing:
        raise CpuftError(f"--format {format} needs {', '.join(missing)}: {install_command(format)}")


def write_graph(model: torch.nn.Module, batch: Batch, folder: Path, format: str, precision: str) -> None:
    """Write the graph of a model, which takes batches of any size and length, into a folder.

    The model, in fp32 and without the fast path, is put into evaluation mode. The batch that traces it must have two
    examples and two tokens or more; `precision` is fp32 or int8. Raises CpuftError: the model cannot be traced.
    Quantising and converting raise exceptions of their libraries, and writing OSError.
    """
    traced = folder / "traced"
    traced.mkdir()
    _write_onnx(model, batch, traced / OnnxGraph.file_name)
    GRAPHS[format].write(traced / OnnxGraph.file_name, folder, precision)
    shutil.rmtree(traced)


def _write_onnx(model: torch.nn.Module, batch: Batch, path: Path) -> None:
    names = [name for name in _INPUTS if name in batch.inputs]
    # The exporter gives all modules the mode of the outermost one afterwards: without eval(), dropout would be on.
    traced = _Logits(model).eval()
    output = EMBEDDING_OUTPUT if isinstance(model, SentenceEncoder) else "logits"
    try:
        with _quiet(), torch.no_grad():
            torch.onnx.export(
                traced,
                tuple(batch.inputs[name] for name in names),
                str(path),
                input_names=names,
                output_names=[output],
                dynamic_axes={**{name: {0: "batch", 1: "length"} for name in names}, output: {0: "batch"}},
                opset_version=_OPSET,
                # The newer exporter compiles the model: up to half a minute for a small encoder in place of 1 s.
                dynamo=False,
            )
    except (torch.onnx.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        raise CpuftError(
            f"a {type(model).__name__} cannot be exported ({describe_error(error)}): serve the model with transformers"
        ) from None


def _quantize_onnx(source: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    size = sum(path.stat().st_size for path in source.parent.iterdir())
    with _quiet():
        quantize_dynamic(
            source,
            target,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,  # 7 bits: CPUs without VNNI add two products in 16 bits, which would overflow with 8
            use_external_data_format=size > _BYTES_IN_ONE_FILE,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of exporters, which a user cannot act on."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def measure_difference(model: Any, graph: Graph, batch: Batch) -> tuple[float, float]:
    """Return the `largest_difference` of the logits of model and graph, infinity if their shapes differ, and the
    model's largest absolute logit, for a batch with attention_mask.
    """
    with torch.inference_mode():
        wanted, found = (one(**batch.inputs).logits.float().numpy() for one in (model, graph))
    difference = float("inf")
    if wanted.shape == found.shape:
        difference = largest_difference(wanted, found, batch.inputs["attention_mask"].sum(1).numpy())
    return difference, float(np.abs(wanted).max())


def largest_difference(wanted: NDArray[np.float32], found: NDArray[np.float32], lengths: NDArray[np.int64]) -> float:
    """Return the largest absolute difference of two outputs of the same shape. Of outputs for tags, (examples, length,
    classes), only the first tokens of each example, as many as `lengths` says, are compared.
    """
    if wanted.ndim == 3:
        mask = np.arange(wanted.shape[1]) < lengths[:, None]
        wanted, found = wanted[mask], found[mask]
    return float(np.abs(wanted - found).max())
