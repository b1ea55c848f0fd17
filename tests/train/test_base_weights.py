"""Frozen weights of LoRA runs in the types of --base-precision: what they compute, and what memory they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from cpuft.config.conflicts import refuse_conflicts
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.kernels import kernels_for, plain_torch
from cpuft.train.base_weights import find_weight_files
from cpuft.train.checkpoint.final_model import save_model
from cpuft.train.data.archive import Prepared
from cpuft.train.evaluate import evaluate
from cpuft.train.fast import frozen
from cpuft.train.fast.acceleration import accelerate, describe_layers
from cpuft.train.fast.frozen import FrozenEmbedding, FrozenLinear, dequantise, list_frozen_weights, quantise
from cpuft.train.loop import train
from cpuft.train.memory_estimate import estimate_rank
from cpuft.train.model import choose_lora, find_model
from cpuft.train.model_shape import find_shape
from cpuft.train.objective.labels import Classification
from cpuft.train.objective.next_token import Chat
from cpuft.train.setup import TrainingSetup
from tests.train.decoder_ranks import make_setup
from tests.train.decoders import FAMILIES, check_resumed_run, make_decoder, save_decoder, write_conversations
from tests.train.fast.encoders import make_batch, relative_error
from tests.train.tokens import make_tokens

OPTIONS: dict[str, Any] = {
    "task": "chat",
    "max_length": 64,
    "batch_size": 4,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "lora_rank": 4,
    "pack": True,
}


def make_config(folder: Path, family: str, stored: str = "float32", **options: Any) -> TrainConfig:
    """Options for a tiny decoder whose file has weights of a type."""
    source = save_decoder(folder / family, family)
    if stored != "float32":
        AutoModelForCausalLM.from_pretrained(source, dtype=stored).save_pretrained(source)
    return TrainConfig(
        **OPTIONS | {"model": source, "train_file": write_conversations(folder / "a.jsonl", 40)} | options
    )


def round_weights(config: TrainConfig, precision: str) -> TrainConfig:
    """The same options for a copy of the model, in fp32, whose weights have been rounded before."""
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    seen = set[int]()
    for module in model.modules():
        if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        if precision == "int8" and module not in outer:
            values, scales = quantise(module.weight)
            module.weight.data = values.float() * scales[:, None]
        elif precision != "fp32":
            module.weight.data = module.weight.data.bfloat16().float()
    folder = f"{config.model}-{precision}"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        Path(folder, name).write_bytes(Path(config.model, name).read_bytes())
    return replace(config, model=folder)


def learn(config: TrainConfig) -> tuple[list[float], torch.Tensor, dict[str, float], Any]:
    """Losses, the last gradient of all adapters, metrics and the model of a run."""
    setup = make_setup(config)
    losses = [line.loss for line in train(setup)]
    return losses, find_gradient(setup), evaluate(setup, setup.updates).metrics, setup.model


def find_gradient(setup: TrainingSetup) -> torch.Tensor:
    batch = setup.objective.make_batch(setup.prepared.train, setup.prepared.train.lengths[:3].argsort())
    setup.optimizer.zero_grad()
    loss: Any = setup.objective.losses(setup.model, batch).sum()
    loss.backward()
    grads = [p.grad.flatten() for p in setup.model.parameters() if p.requires_grad and p.grad is not None]
    return torch.cat(grads)


@pytest.mark.usefixtures("alone", "plain")
@pytest.mark.parametrize("precision, stored", [("bf16", "bfloat16"), ("int8", "float32")])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_is_that_of_weights_which_were_rounded_before(
    family: str, precision: str, stored: str, tmp_path: Path
) -> None:
    config = make_config(tmp_path, family, stored)
    wanted = learn(round_weights(config, precision))
    losses, gradient, metrics, model = learn(replace(config, base_precision=precision))
    types = {p.dtype for p in list_frozen_weights(model)}
    assert types == ({torch.bfloat16} if precision == "bf16" else {torch.int8, torch.bfloat16})
    assert {p.dtype for p in model.parameters()} == {torch.float32, *types}
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    assert relative_error(gradient, wanted[1]) < 1e-5
    assert metrics == pytest.approx(wanted[2], rel=1e-5)


@pytest.mark.usefixtures("alone", "plain")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"fast_path": False}], ids=str)
def test_other_layers_compute_the_same(options: dict[str, Any], precision: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, "qwen3", **options)
    wanted = learn(round_weights(config, precision))
    losses, gradient, metrics, _ = learn(replace(config, base_precision=precision))
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    assert relative_error(gradient, wanted[1]) < 1e-5
    assert metrics == pytest.approx(wanted[2], rel=1e-5)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("fast", [False, True])
def test_encoders_have_frozen_weights_too(precision: str, fast: bool) -> None:
    objective, config = Classification(("no", "yes"), (), 0), TrainConfig(lora_rank=4, base_precision=precision)
    model = objective.load_model(config)
    plain = AutoModelForSequenceClassification.from_pretrained(find_model("minilm"), num_labels=2)
    base, rounded = model.get_base_model(), dict(plain.named_parameters())
    for name, parameter in base.named_parameters():
        own = name.replace(".base_layer", "").replace(".modules_to_save.default", "")
        if own in rounded:
            scales: Any = getattr(base.get_submodule(name.rpartition(".")[0]), "scales", None)
            is_scaled = scales is not None and name.endswith("weight")
            rounded[own].data = parameter.detach().float() * (scales[:, None] if is_scaled else 1)
    if fast:
        accelerate(model, torch.optim.AdamW(model.parameters()), precision="fp32", adapters=True)
        assert describe_layers(model).startswith("6 of 6")
    batch = make_batch()
    batch["input_ids"] += 1000
    found, wanted = model.eval()(**batch).logits, plain.eval()(**batch).logits  # adapters begin as zero
    assert relative_error(found, wanted) < 1e-5
    assert sum(isinstance(one, FrozenLinear) for one in model.modules()) >= 6 * 6
    assert sum(isinstance(one, FrozenEmbedding) for one in model.modules()) == 1


@pytest.mark.usefixtures("alone", "plain")
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    config = make_config(tmp_path, "gemma3_text", base_precision="int8", max_steps=6)
    check_resumed_run(config, tmp_path / "kept")


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_saved_for_the_weights_as_they_are_stored(merged: bool, tmp_path: Path) -> None:
    config = make_config(tmp_path, "llama")
    plain, narrow = (Chat((), (), 3).load_model(replace(config, base_precision=one)) for one in ("auto", "int8"))
    for model in (plain, narrow):
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.1)
    folders = [save_model(one, config.model, str(tmp_path / str(n)), merged) for n, one in enumerate((plain, narrow))]
    ids = torch.arange(4, 20)[None]
    found = [Chat((), (), 3).load_model(replace(config, model=str(one), lora_rank=0)) for one in folders]
    logits = [one.eval()(input_ids=ids).logits for one in found]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-6, rtol=1e-6)
    # A folder of adapters is a base, too: they are merged in fp32 before the sum is rounded.
    if not merged:
        again = Chat((), (), 3).load_model(replace(config, model=str(folders[1]), base_precision="bf16"))
        assert {p.dtype for p in list_frozen_weights(again)} == {torch.bfloat16}
        (name,) = (n for n, _ in again.named_parameters() if n.endswith("layers.0.mlp.up_proj.base_layer.weight"))
        weight = again.get_parameter(name)
        wanted = found[0].get_parameter("model.layers.0.mlp.up_proj.weight")
        assert torch.equal(weight, wanted.detach().bfloat16())
        # The settings of adapters belong to what the cache knows the merged weights by.
        settings = folders[1] / "adapter_config.json"
        settings.write_text(settings.read_text().replace('"lora_alpha": 8', '"lora_alpha": 80'))
        other = Chat((), (), 3).load_model(replace(config, model=str(folders[1]), base_precision="bf16"))
        assert not torch.equal(other.get_parameter(name), weight)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_stored_head_is_trained_from_its_own_weights(precision: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, "qwen3", task="files", base_precision=precision)
    stored = AutoModelForSequenceClassification.from_pretrained(config.model, num_labels=2, dtype=torch.bfloat16)
    torch.nn.init.normal_(stored.score.weight)
    stored.save_pretrained(config.model)
    model = Classification(("no", "yes"), (), 3).load_model(config)
    (head,) = (p for name, p in model.named_parameters() if p.requires_grad and "score" in name)
    assert head.dtype == torch.float32
    assert torch.equal(head, stored.score.weight.detach().float())


@pytest.mark.usefixtures("plain")
def test_converted_weights_are_written_once_for_each_content(tmp_path: Path) -> None:
    config = make_config(tmp_path, "llama", base_precision="int8")
    Chat((), (), 3).load_model(config)
    (first,) = (tmp_path / "cpuft").glob("base-*.safetensors")
    time = first.stat().st_mtime_ns
    Chat((), (), 3).load_model(config)
    assert (first.stat().st_mtime_ns, len(list((tmp_path / "cpuft").glob("base-*.safetensors")))) == (time, 1)
    # What a rank left that was killed is removed.
    whole = first.read_bytes()
    first.unlink()
    left = first.with_name(f"{first.name}.0123abcd.new")
    left.write_bytes(b"")
    Chat((), (), 3).load_model(config)
    assert (first.read_bytes() == whole, left.exists()) == (True, False)
    make_decoder("llama", seed=1).save_pretrained(config.model)
    changed = Chat((), (), 3).load_model(config)
    assert len(list((tmp_path / "cpuft").glob("base-*.safetensors"))) == 2
    wanted, _ = quantise(make_decoder("llama", seed=1).model.layers[0].mlp.up_proj.weight)
    assert torch.equal(changed.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight, wanted)


def test_weights_are_quantised_to_the_nearest_number() -> None:
    weight = torch.randn(5, 37)
    weight[1] = 0
    values, scales = quantise(weight)
    assert values.abs().amax(1).tolist() == [127, 0, 127, 127, 127]
    out = torch.empty(5, 37)
    dequantise(values, scales, out)
    assert bool(((out - weight).abs() <= scales[:, None] / 2 + 1e-6).all())
    for dtype in (torch.float32, torch.bfloat16):
        with plain_torch():
            plain = torch.empty(5, 37, dtype=dtype)
            dequantise(values, scales, plain)
        compiled = torch.empty(5, 37, dtype=dtype)
        dequantise(values, scales, compiled)
        assert kernels_for(plain) is not None
        assert torch.equal(plain, compiled)


@pytest.mark.parametrize("change", [{"task": "files", "lora_rank": 0}, {"lora_rank": 0}])
def test_options_that_exclude_it_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CpuftError, match="--base-precision changes nothing by itself: add --lora-rank 16, or leave it"):
        refuse_conflicts(replace(TrainConfig(task="chat", base_precision="int8"), **change))


@pytest.mark.usefixtures("plain")
def test_a_small_model_whose_weights_are_all_trained_is_told_what_to_give(tmp_path: Path) -> None:
    config = make_config(tmp_path, "llama", base_precision="bf16", lora_rank=-1)
    with pytest.raises(
        CpuftError, match="--base-precision changes nothing by itself: add --lora-rank 16, or leave it out"
    ):
        choose_lora(config)


@pytest.mark.usefixtures("plain")
def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, "llama", base_precision="bf16")
    Path(config.model, "model.safetensors").unlink()
    with pytest.raises(
        CpuftError, match=r"--base-precision needs safetensors, which .* lacks: save it with save_pretrained"
    ):
        Chat((), (), 3).load_model(config)


@pytest.mark.usefixtures("plain")
def test_all_files_of_a_divided_model_are_read(tmp_path: Path) -> None:
    config = make_config(tmp_path, "llama", base_precision="bf16")
    whole = Chat((), (), 3).load_model(config).state_dict()
    Path(config.model, "model.safetensors").unlink()
    make_decoder("llama").save_pretrained(config.model, max_shard_size="50KB")
    files = find_weight_files(config.model)
    assert len(files) > 1
    found = Chat((), (), 3).load_model(config).state_dict()
    assert all(torch.equal(found[name], value) for name, value in whole.items() if "lora_" not in name)
    files[0].unlink()
    with pytest.raises(CpuftError, match=rf"lacks the weights file {files[0].name}: copy or download"):
        find_weight_files(config.model)


@pytest.mark.parametrize("index", ["{", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', "{}"])
def test_a_damaged_index_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CpuftError, match=r"model.safetensors.index.json is damaged \(.*\): copy or download the model"):
        find_weight_files(str(tmp_path))


def load_classifier(config: TrainConfig) -> Any:
    return Classification(("no", "yes"), (), 0).load_model(config)


def make_large_config(kind: str, folder: Path, **options: Any) -> tuple[TrainConfig, Any, Prepared]:
    """Options for a model with tens of millions of parameters, its loader, and its data."""
    sizes: dict[str, Any] = {"vocab_size": 30_000, "hidden_size": 512, "intermediate_size": 1024}
    if kind == "encoder":
        config, load = TrainConfig(task="files", lora_rank=4, **options), load_classifier
        config = replace(config, model=find_model("minilm"))
    else:
        source = save_decoder(folder / kind, "llama" if "labels" in kind else "qwen3", **sizes)
        task, load = ("files", load_classifier) if "labels" in kind else ("chat", Chat((), (), 3).load_model)
        config = TrainConfig(task=task, model=source, lora_rank=4, **options)
    tokens = make_tokens([16] * 8)
    return config, load, Prepared((), (), "", 0, tokens, {"": tokens}, "chat" if kind == "decoder" else "class")


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("base_precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["decoder", "decoder for labels", "encoder"])
def test_the_estimate_counts_the_weights_that_a_model_has(
    kind: str, base_precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "_buffers", threading.local())  # there is no buffer of another test
    config, load, prepared = make_large_config(kind, tmp_path, base_precision=base_precision, precision="fp32")
    parts = estimate_rank(find_shape(config, 30_000), config, prepared, 1, False)
    model = load(config)
    mapped = {one.data_ptr(): one.nbytes for one in list_frozen_weights(model)}
    own = {one.data_ptr(): one.nbytes for one in model.parameters() if one.data_ptr() not in mapped}
    assert parts["shared weights"] == pytest.approx(sum(mapped.values()), rel=0.02)
    accelerate(model, torch.optim.AdamW(model.parameters()), precision="fp32", adapters=True)
    ids = torch.arange(16)[None]
    more = {"places": torch.arange(15), "targets": ids[0, 1:]} if kind == "decoder" else {}
    output = model.train()(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    (output.losses if kind == "decoder" else output.logits).sum().backward()
    buffer: torch.Tensor = getattr(frozen._buffers, "torch.float32")
    assert parts["weights"] == pytest.approx(sum(own.values()) + buffer.nbytes, rel=0.1, abs=1_000_000)


_SHARING = """
import json, sys, time
from pathlib import Path
import torch
from cpuft.config.train import TrainConfig
from cpuft.train.fast.acceleration import accelerate
from cpuft.kernels import plain_torch
from cpuft.train.objective.next_token import Chat
torch.set_num_threads(1)
source, precision, own, other = sys.argv[1:]
with plain_torch():  # nothing is to be compiled
    model = Chat((), (), 3).load_model(TrainConfig(task="chat", model=source, lora_rank=4, base_precision=precision))
    trained = [p for p in model.parameters() if p.requires_grad]
    accelerate(model, torch.optim.AdamW(trained), precision="fp32", adapters=True)
    ids = torch.arange(32)[None]
    model.train()(input_ids=ids, places=torch.arange(31), targets=ids[0, 1:]).losses.sum().backward()
Path(own).touch()
while not Path(other).exists():
    time.sleep(0.02)
found = {"Anonymous": 0, "Pss": 0, "Rss": 0}
mapped = False
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        mapped = line.rstrip().endswith(".safetensors")
    elif mapped and (name := line.split(":")[0]) in found:
        found[name] += int(line.split()[1]) * 1024
print(json.dumps(found))
Path(own + ".done").touch()
while not Path(other + ".done").exists():
    time.sleep(0.02)
"""


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.proof), "int8"])
def test_two_ranks_share_the_memory_of_frozen_weights(precision: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 4000}
    source = save_decoder(tmp_path / "large", "qwen3", **sizes)
    nbytes = Path(source, "model.safetensors").stat().st_size
    assert nbytes > 100e6
    files = [str(tmp_path / name) for name in "ab"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _SHARING, source, precision, *pair], stdout=subprocess.PIPE, env=dict(os.environ)
        )
        for pair in (files, files[::-1])
    ]
    found = [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks]
    if precision == "int8":
        nbytes = next((tmp_path / "cpuft").glob("base-int8-*.safetensors")).stat().st_size
    for one in found:
        assert one["Anonymous"] == 0  # pages that were copied because somebody wrote to them
        assert 0.95 * nbytes < one["Rss"] < 1.05 * nbytes
    assert sum(one["Pss"] for one in found) < 1.05 * nbytes
