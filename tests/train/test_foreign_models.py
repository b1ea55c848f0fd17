"""Folders of models that other programs have written: what is read, and what is refused with what to do."""

from __future__ import annotations

import argparse
import builtins
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.tokenizer import load_tokenizer
from cpuft.train.model import (
    check_trainable,
    check_weights,
    describe_load_failure,
    find_model,
    load_config,
    load_weights,
)
from cpuft.train.model_shape import find_shape
from cpuft.train.objective.labels import Classification
from tests.train.tiny import save_tiny

Weights = dict[str, torch.Tensor]


def load(folder: Path) -> Any:
    """What a run does with a model before it trains."""
    config = TrainConfig(model=str(folder))
    check_weights(find_model(config.model))
    check_trainable(config)
    load_tokenizer(config.model)
    return Classification(("no", "yes"), ("accuracy",), 0).load_model(config).eval()


def change_weights(folder: Path, change: Callable[[Weights], Any], name: str = "model.safetensors") -> None:
    path = folder / "model.safetensors"
    changed = change(load_file(path))
    path.unlink()
    if name == path.name:
        save_file(changed, path, metadata={"format": "pt"})
    else:
        torch.save(changed, folder / name)


def change_json(path: Path, **values: Any) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | values))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["module.", "module.bert.", "_orig_mod.", "model.", "module._orig_mod.bert."])
def test_weights_whose_names_have_a_prefix_are_loaded(prefix: str, name: str, tmp_path: Path) -> None:
    plain = load(Path(save_tiny(tmp_path / "plain")))
    folder = Path(save_tiny(tmp_path / "model"))
    change_weights(folder, lambda weights: {prefix + key: value for key, value in weights.items()}, name)
    for key, value in load(folder).bert.state_dict().items():
        assert torch.equal(value, plain.bert.state_dict()[key])


def test_weights_of_a_second_model_beside_its_own_are_left_out(tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path))
    plain = load(folder).bert.state_dict()
    change_weights(folder, lambda own: own | {f"second.{key}": value + 1 for key, value in own.items()})
    assert all(torch.equal(value, plain[key]) for key, value in load(folder).bert.state_dict().items())


def save_peft(folder: Path, base: str, labels: int = 2) -> Any:
    """Adapters as peft saves them: without a configuration of the model and without a tokenizer; the whole model."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=labels, ignore_mismatched_sizes=True
    )
    settings = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()


def test_adapters_of_peft_are_merged_into_their_base_model(tmp_path: Path) -> None:
    base, folder = save_tiny(tmp_path / "base"), tmp_path / "adapters"
    whole = save_peft(folder, base)
    assert not (folder / "config.json").exists()
    model, ids = load(folder), torch.tensor([[101, 7, 8, 102]])
    with torch.inference_mode():
        assert torch.allclose(model(ids).logits, whole(ids).logits, atol=1e-6)
    config = TrainConfig(model=str(folder))
    assert load_config(config, {}).hidden_size == 32
    assert find_shape(config, 0) == find_shape(TrainConfig(model=base), 0)
    change_json(folder / "adapter_config.json", base_model_name_or_path=f"{tmp_path}/gone")
    with pytest.raises(CpuftError, match=r"the base model that adapter_config.json in .* names is missing"):
        load(folder)


def test_a_head_that_adapters_bring_is_not_called_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, folder = save_tiny(tmp_path / "base"), tmp_path / "adapters"
    AutoModel = transformers.AutoModelForSequenceClassification
    AutoModel.from_pretrained(base).save_pretrained(base)
    whole = save_peft(folder, base, labels=3)
    model, _ = load_weights(partial(AutoModel.from_pretrained, num_labels=3), str(folder))
    assert torch.equal(model.classifier.weight, whole.classifier.weight)
    assert "new, untrained head" not in capsys.readouterr().err


def test_a_base_model_of_adapters_that_is_only_on_the_hub_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_peft(tmp_path / "adapters", save_tiny(tmp_path / "base"))
    change_json(tmp_path / "adapters" / "adapter_config.json", base_model_name_or_path="someone/some-encoder")
    monkeypatch.setattr("cpuft.train.model.find_hub_problem", lambda: "the hub sleeps")
    said = describe_load_failure(str(tmp_path / "adapters"), OSError("x"))
    assert said.startswith(
        "model someone/some-encoder is neither a folder here nor in the cache of models, and the hub "
    )


def test_adapters_that_cannot_be_merged_are_named(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    prompts = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    peft.get_peft_model(model, prompts).save_pretrained(tmp_path / "adapters")
    with pytest.raises(CpuftError, match="but for example prompts, which cannot be merged"):
        load(tmp_path / "adapters")


class Program:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def make_custom(folder: Path) -> None:
    """A model with its own code, and one whose code transformers would ask about."""
    (folder / "own.py").write_text("open('executed', 'w')\n")
    classes = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}
    change_json(folder / "config.json", auto_map=classes, model_type="own")


def make_old_layout(folder: Path) -> None:
    part = folder / "0_Transformer"
    part.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        shutil.move(path, part)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


@pytest.mark.parametrize(
    "spoil, message",
    [
        (make_custom, "needs code of its own, which cpuft never runs: give one that transformers contains"),
        (make_old_layout, "has the older layout of sentence-transformers: give --model "),
        (lambda f: (f / "model.safetensors").write_text(POINTER), "is a pointer of Git LFS, not the file itself"),
        (lambda f: (f / "tokenizer.json").write_text(POINTER), "tokenizer.json is a pointer of Git LFS, not the file"),
        (
            lambda f: change_weights(f, lambda w: w | {"x": Program()}, "pytorch_model.bin"),
            "are a pickle that could run any program: save the model with save_pretrained",
        ),
        (
            lambda f: change_weights(f, lambda w: {"a": argparse.Namespace(b=1), "state_dict": w}, "pytorch_model.bin"),
            "are a pickle that could run any program",
        ),
        (
            lambda f: change_weights(f, lambda w: {"epoch": 1, "state_dict": w}, "pytorch_model.bin"),
            "are not for BertForSequenceClassification (they are named epoch, state_dict): copy config.json and the",
        ),
        (
            lambda f: (f / "model.safetensors").rename(f / "model.onnx"),
            "has no weights of PyTorch: copy model.safetensors there, or save the model again",
        ),
        (
            lambda f: shutil.copytree(f, f / "checkpoint-7") and (f / "config.json").unlink(),
            "/model/checkpoint-7, the newest one in it",
        ),
    ],
)
def test_what_cannot_be_loaded_is_named(
    spoil: Callable[[Path], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(save_tiny(tmp_path / "model"))
    spoil(folder)
    monkeypatch.setattr(builtins, "input", lambda prompt: "y")  # transformers asks whether to run code
    with pytest.raises(CpuftError) as caught:
        load(folder)
    assert message in str(caught.value)
    assert "\\n" not in str(caught.value)
    assert not Path("executed").exists()


def test_adapters_on_the_hub_are_answered_with_how_to_download_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuft.train.model.find_hub_problem", lambda: "")
    error = OSError("a/lora does not appear to have a file named config.json. Checkout 'https://huggingface.co/a/lora'")
    said = "model a/lora has no config.json: if it holds adapters, download them, and give --model that folder"
    assert said in describe_load_failure("a/lora", error)


@pytest.mark.parametrize(
    "error, package",
    [
        (ImportError("You need to install fugashi to use MecabTokenizer. See https://example.org."), "fugashi"),
        (ImportError("\nSpmConverter requires the protobuf library but it was not found."), "protobuf"),
        (ImportError("\nSentencePieceExtractor requires the SentencePiece library but it was"), "sentencepiece"),
        (ValueError("`tiktoken` is required to read a `tiktoken` file. Install it with `pip install tiktoken`."), ""),
        (ModuleNotFoundError("No module named 'jieba'"), "jieba"),
    ],
)
@pytest.mark.parametrize("is_tiktoken", [True, False])
def test_a_missing_package_of_a_tokenizer_is_named(
    error: Exception, package: str, is_tiktoken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(save_tiny(tmp_path))
    (folder / ("x.tiktoken" if is_tiktoken else "spiece.model")).write_bytes(b"x")

    def fail(*given: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    monkeypatch.setattr("cpuft.train.data.tokenizer.importlib.util.find_spec", lambda name: None)
    package = package or ("tiktoken" if is_tiktoken else "sentencepiece")
    with pytest.raises(CpuftError, match=rf"needs the package {package}: install it"):
        load_tokenizer(str(folder))
