"""Adapters: what is adapted, what is trained whole, what is kept, and who else can read it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from cpuft.config.conflicts import refuse_conflicts
from cpuft.config.fields import format_arguments, parse_arguments
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.checkpoint.final_model import save_model
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.lora import add_adapters, find_target_layers, find_whole_modules
from cpuft.train.model import choose_lora, count_stored_parameters, find_model, load_weights
from cpuft.train.objective.labels import Classification
from cpuft.train.objective.next_token import Chat
from tests.train.decoders import FAMILIES, make_decoder, save_decoder, save_encoder
from tests.train.fast.encoders import SIZES, make_batch, make_model, relative_error

LORA = TrainConfig(lora_rank=4)
TWO = Classification(("no", "yes"), (), 0)
HEADS = {
    "bert": ["classifier"],
    "roberta": ["classifier"],
    "electra": ["classifier"],
    "distilbert": ["pre_classifier", "classifier"],
    "mpnet": ["classifier"],
    "deberta-v2": ["pooler", "classifier"],
}


@pytest.mark.parametrize("kind, heads", HEADS.items())
def test_all_of_attention_is_adapted_and_heads_are_trained_whole(kind: str, heads: list[str]) -> None:
    model = make_model(kind)
    assert find_whole_modules(model, {f"{heads[0]}.weight"}) == heads
    assert len(find_target_layers(model)) == 2 * 4
    trained = {name for name, p in add_adapters(model, 4, "", ()).named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        name for name in trained if any(f".{head}.modules_to_save." in name for head in heads)
    }
    assert sum("lora_" in name for name in trained) == 2 * 4 * 2


def test_what_came_with_no_weights_is_trained_whole() -> None:
    fresh = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight"}
    assert find_whole_modules(make_model("bert"), fresh) == ["classifier", "bert.pooler.dense"]


def test_a_head_that_is_the_words_once_more_is_not_trained_whole() -> None:
    model = BertForMaskedLM(BertConfig(**SIZES))
    assert find_whole_modules(model, ()) == []
    fresh = {name for name, _ in model.named_parameters() if name.startswith("cls")} | {"cls.predictions.decoder.bias"}
    parts = ["cls.predictions.transform.LayerNorm", "cls.predictions.transform.dense"]
    assert find_whole_modules(model, fresh) == parts
    assert all(".attention." in name for name in find_target_layers(model))


def test_a_model_without_linear_layers_in_its_attention_is_refused() -> None:
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=64, n_positions=40, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(CpuftError, match=r"no linear layers in the attention of here \(GPT2ForSeq.*\): leave it out"):
        add_adapters(model, 4, "here", ())


def test_adapters_learn_at_ten_times_the_rate_unless_told() -> None:
    options: list[dict[str, Any]] = [{}, {"lora_rank": 16}, {"lora_rank": 16, "learning_rate": 1e-3}]
    rates = [TrainConfig(task="mrpc", **given).choose_lora(0).learning_rate for given in options]
    assert rates == [2e-5, 2e-4, 1e-3]
    assert replace(TrainConfig(learning_rate=0.0), seed=1).learning_rate == 0.0


@pytest.mark.parametrize(
    "options, millions, rank, rate",
    [
        ({"task": "chat"}, 201, 16, 2e-4),
        ({"task": "chat"}, 200, 0, 2e-5),
        ({"task": "text", "causal": True}, 600, 16, 2e-4),
        ({"task": "text"}, 600, 0, 2e-5),
        ({"task": "chat", "lora_rank": 0}, 600, 0, 2e-5),
        ({"task": "chat", "lora_rank": 4}, 100, 4, 2e-4),
        ({"task": "chat", "learning_rate": 3e-5}, 600, 16, 3e-5),
        ({"task": "chat", "from_config": "x.json"}, 600, 0, 2e-5),
        ({"task": "files", "model": "qwen"}, 600, 16, 2e-4),
        ({"task": "mrpc", "model": "qwen"}, 201, 16, 2e-4),
        ({"task": "mrpc", "model": "qwen"}, 0, 0, 2e-5),
        ({"task": "mrpc"}, 600, 0, 2e-5),  # the default model is small
        ({"task": "stsb", "model": "qwen", "learning_rate": 1e-5}, 600, 16, 1e-5),
        ({"task": "demo"}, 600, 0, 1e-4),
        ({"task": "demo", "model": "qwen"}, 600, 0, 1e-4),
        ({"task": "rerank"}, 600, 0, 2e-5),
        ({"task": "mrpc", "precision": "int8"}, 600, 0, 2e-5),
        ({"task": "mrpc", "engine": "deepspeed"}, 600, 0, 2e-5),
    ],
)
def test_large_decoders_have_adapters_unless_told(
    options: dict[str, Any], millions: int, rank: int, rate: float
) -> None:
    config = TrainConfig(**options)
    # Options are sent to ranks as arguments.
    sent = parse_arguments(TrainConfig, format_arguments(config))
    assert sent == config
    chosen = sent.choose_lora(millions * 10**6)
    assert (chosen.lora_rank, chosen.learning_rate) == (rank, rate)
    assert chosen.choose_lora(10**9) == chosen
    refuse_conflicts(replace(chosen, tokenizer="x"))


def test_adapters_that_may_be_chosen_may_be_merged(tmp_path: Path) -> None:
    refuse_conflicts(TrainConfig(task="chat", lora_merge=True))
    encoder = TrainConfig(task="mrpc", model=save_encoder(tmp_path / "encoder", "eurobert"), lora_merge=True)
    refuse_conflicts(encoder)
    with pytest.raises(CpuftError, match="--lora-merge changes nothing by itself: add --lora-rank 16"):
        choose_lora(encoder)
    without = (TrainConfig(task="mrpc"), TrainConfig(task="demo"), TrainConfig(task="chat", lora_rank=0))
    for config in (replace(one, lora_merge=True) for one in without):
        with pytest.raises(CpuftError, match="--lora-merge changes nothing by itself"):
            refuse_conflicts(config)


def test_what_was_chosen_is_told_with_the_number_of_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_decoder(tmp_path / "tiny", "qwen3")
    config, count = TrainConfig(task="chat", model=folder), make_decoder("qwen3").num_parameters()
    assert count_stored_parameters(config) == count
    monkeypatch.setattr("cpuft.config.train.LARGE_DECODER", count)
    same, reason = choose_lora(config)
    assert (same.lora_rank, reason) == (
        0,
        "all weights are trained, because the model has 0 million parameters, at most 200 million; --lora-rank 16 "
        "trains LoRA adapters",
    )
    monkeypatch.setattr("cpuft.config.train.LARGE_DECODER", count - 1)
    chosen, reason = choose_lora(config)
    assert (chosen.lora_rank, chosen.learning_rate) == (16, 2e-4)
    assert reason.startswith("LoRA adapters of rank 16 are trained, because the model has 0 million parameters, more")
    assert choose_lora(chosen) == (chosen, "")
    assert choose_lora(replace(config, lora_rank=0))[1] == ""
    (tmp_path / "tiny" / "model.safetensors").unlink()  # as on the hub
    assert count_stored_parameters(config) == count


@pytest.mark.parametrize("kind, is_adapted", [("llama", True), ("gemma3_text", True), ("eurobert", False)])
def test_large_decoders_have_adapters_for_labels_and_encoders_have_none(
    kind: str, is_adapted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_decoder(tmp_path / kind, kind) if kind in FAMILIES else save_encoder(tmp_path / kind, kind)
    config = TrainConfig(task="files", model=folder)
    assert choose_lora(config) == (config.choose_lora(0), "")  # it is small
    monkeypatch.setattr("cpuft.train.model.LARGE_DECODER", 1000)
    monkeypatch.setattr("cpuft.config.train.LARGE_DECODER", 1000)
    chosen, reason = choose_lora(config)
    assert (chosen.lora_rank, chosen.learning_rate) == ((16, 2e-4) if is_adapted else (0, 2e-5))
    assert reason.startswith("LoRA adapters of rank 16 are trained") == is_adapted


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_of_a_decoder_are_adapted_but_not_its_head(family: str) -> None:
    model = make_decoder(family)
    assert len(find_target_layers(model)) == 2 * 7
    adapted = add_adapters(model, 4, "", ())
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    trained = [name for name, one in adapted.named_parameters() if one.requires_grad]
    assert len(trained) == 2 * len(parts) * 2
    assert {name.split(".")[-4] for name in trained} == set(parts)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_saved_decoder(family: str, merged: bool, tmp_path: Path) -> None:
    source = save_decoder(tmp_path / "base", family)
    config = TrainConfig(task="chat", model=source, lora_rank=4)
    model = Chat((), (), 3).load_model(config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    folder = save_model(model, source, str(tmp_path), merged)
    assert (folder / "adapter_config.json").exists() == (not merged)
    loaded = (AutoModelForCausalLM if merged else AutoPeftModelForCausalLM).from_pretrained(folder).eval()
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        wanted = model.eval()(input_ids=ids).logits
        plain = AutoModelForCausalLM.from_pretrained(source)(input_ids=ids)
        torch.testing.assert_close(loaded(input_ids=ids).logits, wanted, atol=1e-4, rtol=1e-4)
    assert float((wanted - plain.logits).abs().max()) > 0.01
    again = Chat((), (), 3).load_model(replace(config, model=str(folder), lora_rank=0))
    torch.testing.assert_close(again.eval()(input_ids=ids).logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """MiniLM with adapters and a head that have learnt something, on the fast path with bf16; and where it is saved."""
    torch.manual_seed(5)
    model = TWO.load_model(LORA)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "classifier.modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.05 if "lora_B" in name else 0.5)
    accelerate(model, torch.optim.AdamW(model.parameters()), precision="bf16", adapters=True)
    return model.eval(), save_model(model, "minilm", str(tmp_path_factory.mktemp("run")))


def answers(model: Any) -> torch.Tensor:
    batch = make_batch()
    batch["input_ids"] += 1000
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(**batch).logits
    return logits


def test_adapters_alone_are_kept(trained: tuple[Any, Path]) -> None:
    _, folder = trained
    whole = Path(find_model("minilm"), "model.safetensors").stat().st_size
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) < whole / 100
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["task_type"]) == (4, 8, "SEQ_CLS")
    assert settings["base_model_name_or_path"] == find_model("minilm")
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "no", "1": "yes"}


def test_plain_peft_reads_them(trained: tuple[Any, Path]) -> None:
    from peft import AutoPeftModelForSequenceClassification, PeftModel

    model, folder = trained
    base = AutoModelForSequenceClassification.from_pretrained(find_model("minilm"), num_labels=2)
    read = answers(PeftModel.from_pretrained(base, folder))
    # The trained model computes in bf16.
    assert relative_error(answers(model), read) < 0.05
    assert read.std() > 0.1
    torch.testing.assert_close(answers(AutoPeftModelForSequenceClassification.from_pretrained(folder)), read)


def test_their_folder_is_a_model_with_them_merged(trained: tuple[Any, Path]) -> None:
    from peft import PeftModel

    _, folder = trained
    base = AutoModelForSequenceClassification.from_pretrained(find_model("minilm"), num_labels=2)
    wanted = answers(PeftModel.from_pretrained(base, folder))
    found = TWO.load_model(TrainConfig(model=str(folder)))
    assert type(found).__name__ == "BertForSequenceClassification"
    torch.testing.assert_close(answers(found), wanted, atol=1e-5, rtol=1e-4)
    # For another task there is another head, and the encoder is what was trained.
    other = Classification(("a", "b", "c"), (), 0).load_model(TrainConfig(model=str(folder), lora_rank=2))
    weight = "bert.encoder.layer.0.attention.self.query.weight"
    named = dict(other.get_base_model().named_parameters())
    assert named["classifier.modules_to_save.default.weight"].shape == (3, 384)
    assert torch.equal(named[weight.replace("query", "query.base_layer")], found.state_dict()[weight])
    assert other.peft_config["default"].base_model_name_or_path == str(folder)


def test_merged_they_are_a_whole_model_of_fp32(trained: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = trained
    merged = save_model(model, "minilm", str(tmp_path), merged=True)
    assert not (merged / "adapter_config.json").exists()
    read = AutoModelForSequenceClassification.from_pretrained(merged)
    found, wanted = read.state_dict(), TWO.load_model(TrainConfig(model=str(folder))).state_dict()
    assert {name: value.dtype for name, value in found.items()} == {name: v.dtype for name, v in wanted.items()}
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    # What was trained with is rounded; what is kept is not.
    fresh = AutoModelForSequenceClassification.from_pretrained(find_model("minilm"), num_labels=2).state_dict()
    frozen = "bert.encoder.layer.0.intermediate.dense.weight"
    assert torch.equal(found[frozen], fresh[frozen])


@pytest.mark.parametrize(
    "content, problem",
    [
        ("{", "does not name the adapters' base model"),
        ("{}", "does not name the adapters' base model"),
        ('{"base_model_name_or_path": null}', "does not name the adapters' base model"),
        ('{"base_model_name_or_path": "/gone"}', "the base model that .* names is missing: there is no folder /gone"),
        ('{"base_model_name_or_path": "."}', "name themselves as base model"),
    ],
)
def test_adapters_of_no_known_model_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CpuftError, match=problem) as refused:
        load_weights(partial(pytest.fail, "read"), ".")
    assert "\n" not in str(refused.value)


def test_the_adapters_of_another_encoder_are_refused(trained: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = trained
    GPT2ForSequenceClassification(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)).save_pretrained("gpt")
    for name in ("adapter_model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": "./gpt"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CpuftError, match=r"do not fit GPT2ForSequenceClassification .*give another --model"):
        load_weights(GPT2ForSequenceClassification.from_pretrained, str(tmp_path))
