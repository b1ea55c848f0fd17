"""The files of sentence-transformers beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpuft.errors import CpuftError
from cpuft.train.embedding_form import EmbeddingForm, has_form, read_form, write_form

FILES: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "similarity_fn_name": "dot"},
    "sentence_bert_config.json": {"max_seq_length": 77},
}


def write_files(folder: Path, **changes: Any) -> str:
    for name, value in (FILES | changes).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return str(folder)


def test_the_form_of_a_model_is_read_and_written(tmp_path: Path) -> None:
    form = read_form(write_files(tmp_path))
    assert form == EmbeddingForm("cls", False, "dot", {"query": "q: "}, 77)
    (tmp_path / "plain").mkdir()
    assert read_form(str(tmp_path / "plain")) == EmbeddingForm()
    other = EmbeddingForm("lasttoken", True, "cosine", {"query": "a", "document": "b"}, 99, 64)
    write_form(tmp_path, other, 128)
    assert read_form(str(tmp_path)) == other
    assert read_form(str(tmp_path), "mean").pooling == "mean"
    (tmp_path / "modules.json").write_text(json.dumps(FILES["modules.json"][:1]))
    assert read_form(str(tmp_path), "lasttoken").pooling == "lasttoken"


def test_without_the_hub_only_files_that_are_known_to_be_missing_count_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--a--b/refs").mkdir(parents=True)
    (tmp_path / "models--a--b/refs/main").write_text("0123")
    with pytest.raises(CpuftError, match=r"how the model a/b makes embeddings, because HF_HUB_OFFLINE forbids"):
        read_form("a/b")
    assert not has_form("a/b")  # a reranker need not be known to the cache
    (tmp_path / "models--a--b/.no_exist/0123").mkdir(parents=True)
    (tmp_path / "models--a--b/.no_exist/0123/modules.json").touch()
    assert read_form("a/b") == EmbeddingForm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"1_Pooling/config.json": {"pooling_mode": ["cls", "mean"]}}, "pooling .* is cls and mean"),
        (
            {"1_Pooling/config.json": {"pooling_mode_max_tokens": True}},
            "replace it by --pooling mean or cls or lasttoken",
        ),
        ({"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}}, "leaves prompts out"),
        ({"modules.json": [{"type": "sentence_transformers.models.Dense"}]}, "has a module Dense"),
        ({"modules.json": "["}, "cannot be read"),
        ({"config_sentence_transformers.json": {"similarity_fn_name": "manhattan"}}, "compares embeddings by"),
    ],
)
def test_a_form_that_cannot_be_trained_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=message):
        read_form(write_files(tmp_path, **changes))
