"""Embeddings of texts are those of sentence-transformers, however the texts are divided into batches and threads."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cpuft.errors import CpuftError
from cpuft.kernels import plain_torch
from cpuft.train.embedder import Embedder, load_encoder, plan_text_batches
from cpuft.train.model import find_model
from tests.train.architectures import save_architecture

TEXTS = ["", "a cat", "the red house " * 40, "Is it so? " * 3, "dogs bark"] + [
    f"word {n} " * (n % 23) for n in range(90)
]


@pytest.fixture(autouse=True)
def _threads(own_cache: None) -> Iterator[None]:
    threads = torch.get_num_threads()
    with plain_torch():  # nothing is to be compiled
        yield
    torch.set_num_threads(threads)


def test_embeddings_are_those_of_sentence_transformers() -> None:
    from sentence_transformers import SentenceTransformer

    wanted = SentenceTransformer(find_model("minilm"), device="cpu").encode(TEXTS, prompt="query: ")
    embedder = Embedder("minilm", "fp32")
    torch.set_num_threads(1)
    found = embedder.embed(TEXTS, "query: ")
    torch.set_num_threads(3)
    assert np.abs(embedder.embed(TEXTS, "query: ") - found).max() < 1e-5
    assert torch.get_num_threads() == 3
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 1e-5
    assert np.abs(embedder.embed(TEXTS[:5], "query: ", 2) - wanted[:5]).max() < 1e-5
    assert embedder.embed([]).shape == (0, 384)
    assert len(embedder._models) == 3
    shared = [{p.data_ptr() for p in model.parameters()} for model in embedder._models]
    assert shared[0] == shared[1] == shared[2]


def test_what_one_thread_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder("minilm", "fp32")
    torch.set_num_threads(2)
    calls = list[int]()

    def fail(ids: torch.Tensor, mask: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        calls.append(len(ids))
        raise MemoryError

    monkeypatch.setattr(embedder, "embed_tokens", fail)
    with pytest.raises(MemoryError):
        embedder.embed(TEXTS)
    assert torch.get_num_threads() == 2
    assert 1 <= len(calls) <= 2


def test_batches_have_similar_lengths_and_a_limited_number_of_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 5000)
    lengths[7] = 3000
    lengths[9] = 0
    batches = plan_text_batches(lengths, 2)
    assert sorted(np.concatenate(batches).tolist()) == [n for n in range(5000) if n != 9]
    assert batches[0].tolist() == [7]
    assert max(lengths[part[0]] * len(part) for part in batches[1:]) <= 1024
    padded = sum(int(lengths[part[0]]) * len(part) for part in batches)
    assert padded < 1.01 * lengths.sum()
    assert [len(part) for part in plan_text_batches(lengths, 2, 1000)] == [1000] * 4 + [999]
    assert len(plan_text_batches(np.full(40, 50), 2)) >= 8
    assert plan_text_batches(np.zeros(3, np.int64), 2) == []


@pytest.mark.parametrize("name, most", [("bert", 64), ("roberta", 64), ("xlnet", 512)])
def test_texts_are_cut_at_the_positions_that_the_model_has(name: str, most: int, tmp_path: Path) -> None:
    embedder = Embedder(save_architecture(tmp_path, name), "fp32")  # the files beside it name no length
    assert [len(ids) for ids in embedder.encode(["word " * 700])] == [embedder.max_length] == [most]
    assert np.isfinite(embedder.embed(["word " * 700])).all()


@pytest.mark.parametrize(
    "weights, problem",
    [(None, "has no weights of PyTorch"), (pickle.dumps(print), "are a pickle that could run any program")],
)
def test_an_encoder_without_weights_that_can_be_read_is_refused(
    weights: bytes | None, problem: str, tmp_path: Path
) -> None:
    sizes = '"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64'
    (tmp_path / "config.json").write_text(f'{{"model_type": "bert", {sizes}, "vocab_size": 100}}')
    if weights:
        (tmp_path / "pytorch_model.bin").write_bytes(weights)
    with pytest.raises(CpuftError, match=problem):
        load_encoder(str(tmp_path))
