"""The estimate of a rank's memory, against what autograd keeps and models have; and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.host_memory import HostMemory, RunMemory, format_run_memory, split_run_memory
from cpuft.train.data.archive import Prepared
from cpuft.train.memory_estimate import (
    KNOWN_ERROR,
    SHARED_BYTES,
    LargestBatch,
    check_fit,
    estimate_rank,
    find_batches,
    find_shortage,
    list_changes,
    measure_activations,
    suggest_changes,
)
from cpuft.train.model_shape import ModelShape, find_shape, read_encoder_shape
from tests.train.fast.encoders import DEBERTA
from tests.train.kept import SIZES, count_kept, make_encoder, make_full_batch
from tests.train.tokens import make_tokens


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("length", "layers", "dropout"), [(128, 3, 0.1), (64, 2, 0.1), (128, 3, 0.0)])
def test_activations_are_those_that_autograd_keeps(
    again: bool, precision: str, length: int, layers: int, dropout: float
) -> None:
    config = TrainConfig(precision=precision, dropout=dropout, gradient_checkpointing=again)
    model = make_encoder(layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    shape = read_encoder_shape(model.config.to_dict())
    assert shape
    batch = LargestBatch(4, length, 4 * length)
    kept, most, gaps = measure_activations(shape, config, batch)
    assert kept == pytest.approx(count_kept(model, make_full_batch(4, length), config), rel=0.02, abs=20_000)
    assert most > kept
    assert (gaps > 0) == config.gradient_checkpointing


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("length", "dropout"), [(128, 0.1), (64, 0.0)])
def test_activations_of_disentangled_attention(again: bool, precision: str, length: int, dropout: float) -> None:
    config = TrainConfig(precision=precision, dropout=dropout, gradient_checkpointing=again)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    settings = DebertaV2Config(num_hidden_layers=3, **SIZES, **rates, **DEBERTA | {"position_buckets": 64})
    model = DebertaV2ForSequenceClassification(settings).train()
    shape, batch = read_encoder_shape(settings.to_dict()), LargestBatch(4, length, 4 * length)
    assert shape
    kept, _, _ = measure_activations(shape, config, batch)
    assert kept == pytest.approx(count_kept(model, make_full_batch(4, length), config), rel=0.2, abs=20_000)


def shape_of(layers: int) -> ModelShape:
    settings: dict[str, Any] = {"model_type": "bert", "num_hidden_layers": layers, "type_vocab_size": 2, **SIZES}
    shape = read_encoder_shape(settings)
    assert shape
    return shape


def test_padding_is_left_out_of_what_is_packed() -> None:
    shape, config = shape_of(3), TrainConfig(precision="fp32")
    batch = make_full_batch(4, 128, padding=64)
    tokens = int(batch["attention_mask"].sum())
    counted = count_kept(make_encoder(3), batch, config)
    kept, _, _ = measure_activations(shape, config, LargestBatch(4, 128, tokens))
    assert kept == pytest.approx(counted, rel=0.03)


def test_activations_of_an_unknown_architecture_are_left_out() -> None:
    config = TrainConfig(precision="bf16", fast_path=False, gradient_checkpointing=True)
    found = estimate_rank(ModelShape(1000, 10), config, PREPARED, 1, False)
    assert (found["weights"], found["moments"], found["activations"]) == (4040, 8080, 0)


BERT = ModelShape(85_054_464, 24_428_544, 12, 768, 3072, 768, 768, 30522)


def make_prepared(rows: int, length: int, kind: str = "class") -> Prepared:
    """Training examples of one length, and a short one for evaluation."""
    return Prepared((), (), "", 0, make_tokens([length] * rows), {"": make_tokens([8])}, kind)


def estimate(rows: int = 8, length: int = 128, kind: str = "class", **options: Any) -> dict[str, int]:
    """The memory of a rank of two that writes no checkpoints, by part."""
    config = TrainConfig(**{"batch_size": rows, "precision": "bf16", **options})
    return estimate_rank(BERT, config, make_prepared(2 * rows, length, kind), 2, False)


@pytest.mark.parametrize(
    ("options", "ranks", "writes_checkpoints", "parts"),
    [
        ({}, 1, True, {"weights": 267.8, "masters": 340.2, "moments": 875.9, "gradients": 267.8}),
        ({}, 2, False, {"weights": 267.8, "masters": 340.2, "gradients": 267.8, "checkpoint's copy": 0, "buffers": 64}),
        ({"precision": "fp32"}, 2, False, {"weights": 437.9, "masters": 0, "moments": 875.9, "gradients": 437.9}),
        ({"fast_path": False}, 2, False, {"weights": 437.9, "masters": 0, "gradients": 437.9}),
        ({}, 1, True, {"checkpoint's copy": 1313.8}),
        ({"checkpoint_every": 0.0}, 1, True, {"checkpoint's copy": 0}),
        ({"grad_compression": "int8"}, 2, False, {"buffers": 501.9}),
        ({"sync_every": 4}, 2, False, {"buffers": 1815.7}),
        ({"shard": "optimizer"}, 1, True, {"masters": 340.2, "moments": 875.9, "gradients": 267.8}),
        ({"shard": "optimizer"}, 4, False, {"weights": 267.8, "masters": 85.1, "moments": 219.0, "gradients": 377.3}),
        ({"shard": "optimizer"}, 4, True, {"checkpoint's copy": 1313.8}),
        ({"lora_rank": 16}, 1, True, {"weights": 270.2, "masters": 4.7, "moments": 14.2, "checkpoint's copy": 21.2}),
    ],
)
def test_the_estimate_of_each_part(
    options: dict[str, Any], ranks: int, writes_checkpoints: bool, parts: dict[str, float]
) -> None:
    config = TrainConfig(**{"precision": "bf16", **options})
    found = estimate_rank(BERT, config, PREPARED, ranks, writes_checkpoints)
    assert {name: round(found[name] / 1e6, 1) for name in parts} == parts


def test_logits_of_the_whole_vocabulary_count_where_tokens_are_masked() -> None:
    half, quarter = (estimate(kind="masked", mlm_probability=share)["activations"] for share in (0.5, 0.25))
    assert half - quarter == 12 * 256 * 30522
    recomputing = estimate(kind="masked", mlm_probability=0.5, gradient_checkpointing=True)
    assert recomputing["activations"] > 12 * 512 * 30522


def test_recomputed_layers_leave_gaps_in_the_heap() -> None:
    def gaps(**options: Any) -> float:
        parts = estimate(**options)
        return parts["process"] - 0.15 * (parts["moments"] + parts["gradients"] + parts["activations"])

    inner = 2 * (2 * 1024 * 768 + 2 * 1024 * 3072) + 8 * 1024
    assert gaps(gradient_checkpointing=True) - gaps() == pytest.approx(
        2 * inner + 2 * 1024 * (3072 + 3 * 768), rel=0.01
    )


def test_activations_grow_with_the_batch() -> None:
    def activations(rows: int, **options: Any) -> int:
        return estimate(rows, 512, max_length=512, **options)["activations"]

    assert activations(16) == pytest.approx(2 * activations(8), rel=0.01)
    assert activations(8, gradient_checkpointing=True) < 0.5 * activations(8)
    assert activations(8, precision="int8") - activations(8, precision="fp32") == BERT.linear_parameters


GB = 10**9
PREPARED = Prepared((), (), "", 0, make_tokens([128] * 512), {"": make_tokens([16] * 8)})


def save_model(folder: Path, **sizes: int) -> TrainConfig:
    """Options for a model of this size, of which only the settings are there."""
    usual = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    settings = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512, **usual, **sizes}
    (folder / "config.json").write_text(json.dumps(settings))
    return TrainConfig(model=str(folder))


def host_memory(*free: float, ranks: int = 1, machine: str = "") -> RunMemory:
    sizes = [round(one * GB) for one in free]
    hosts = (HostMemory(f"n{number}", ranks, size, machine, size) for number, size in enumerate(sizes, 1))
    return RunMemory(tuple(hosts), "bf16")


PARTS = "(checkpoint's copy 1.3 GB, activations 1.2 GB, process 0.9 GB)"


@pytest.mark.parametrize(
    ("free", "options", "said"),
    [
        (
            host_memory(3.0),
            {},
            f"n1 has 3.0 GB free, and its rank needs 5.1 GB {PARTS}: "
            "add --batch-size 8 --gradient-accumulation 4 --checkpoint-every 0",
        ),
        (
            host_memory(3.0, 3.0),
            {},
            f"n1 has 3.0 GB free, and its rank needs 5.2 GB {PARTS}: "
            "add --shard optimizer --batch-size 16 --gradient-accumulation 2 --checkpoint-every 0",
        ),
        (
            host_memory(4.0, ranks=2),
            {"checkpoint_every": 0.0, "gradient_checkpointing": True, "batch_size": 1},
            "n1 has 4.0 GB free, and its 2 ranks need 4.9 GB (moments 1.8 GB, process 1.5 GB, masters 0.7 GB): "
            "take a smaller model, more hosts with a smaller --batch-size each, or hosts with more memory",
        ),
        (
            host_memory(0.2),
            {},
            f"n1 has 0.2 GB free, and its rank needs 5.1 GB {PARTS}: take a smaller model, more hosts with a smaller "
            "--batch-size each, or hosts with more memory",
        ),
    ],
)
def test_refusals(free: RunMemory, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = dataclasses.replace(save_model(tmp_path), **options)
    with pytest.raises(CpuftError) as refused:
        check_fit(config, PREPARED, free)
    assert str(refused.value) == said


LARGE = {"hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA = {**LARGE, "model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("task", "settings", "linears", "table", "parts"),
    [
        ("chat", LLAMA, 973_078_528, 262_668_288, "11.4 GB (weights 10.0 GB, process 1.2 GB, moments 0.2 GB)"),
        ("mrpc", LLAMA, 973_078_528, 262_668_288, "11.3 GB (weights 10.0 GB, process 1.2 GB, moments 0.2 GB)"),
        ("mrpc", LARGE, 805_601_280, 63_557_632, "8.3 GB (weights 7.0 GB, process 1.1 GB, moments 0.1 GB)"),
    ],
    ids=["chat", "decoder for labels", "encoder"],
)
def test_ranks_of_a_host_share_mapped_weights(
    task: str, settings: dict[str, Any], linears: int, table: int, parts: str, tmp_path: Path
) -> None:
    least: dict[str, Any] = {
        "batch_size": 1,
        "eval_batch_size": 1,
        "gradient_checkpointing": True,
        "checkpoint_every": 0.0,
        "lora_rank": 16,
        "precision": "fp32",
    }
    config = dataclasses.replace(save_model(tmp_path, **settings), task=task, **least)
    tokens, kind = make_tokens([16] * 8), "chat" if task == "chat" else "class"
    prepared = dataclasses.replace(PREPARED, train=tokens, validation={"": tokens}, kind=kind)
    shape = find_shape(config, 0)

    def estimate(config: TrainConfig, ranks: int, writes: bool) -> dict[str, int]:
        return estimate_rank(shape, config, prepared, ranks, writes)

    def needed(ranks: int, base_precision: str) -> int:
        memory = RunMemory((HostMemory("n1", ranks, 1),), "fp32")
        short = find_shortage(dataclasses.replace(config, base_precision=base_precision), memory, estimate)
        assert short
        return short.needed_bytes

    shared = {"fp32": 4 * (linears + table), "bf16": 2 * (linears + table), "int8": linears + 2 * table}
    for name, nbytes in shared.items():
        found = estimate(dataclasses.replace(config, base_precision=name), 2, False)
        assert found["shared weights"] == nbytes
        rank = sum(found.values()) - nbytes
        assert [needed(ranks, name) for ranks in (2, 3)] == [
            nbytes + ranks * rank - (ranks - 1) * SHARED_BYTES for ranks in (2, 3)
        ]
    assert needed(3, "auto") - needed(2, "auto") > shared["fp32"]
    for name in ("bf16", "int8"):
        memory = RunMemory((HostMemory("n1", 2, needed(2, name) + GB // 100),), "fp32")
        with pytest.raises(CpuftError) as refused:
            check_fit(config, prepared, memory)
        free = f"n1 has {memory.hosts[0].free_bytes / GB:.1f} GB free, and its 2 ranks need "
        assert str(refused.value) == f"{free}{parts}: add --base-precision {name}"
        check_fit(dataclasses.replace(config, base_precision=name), prepared, memory)


def test_bert_base_fits_where_it_has_run(tmp_path: Path) -> None:
    check_fit(save_model(tmp_path), PREPARED, host_memory(8.0))
    check_fit(save_model(tmp_path), PREPARED, host_memory(8.0, 8.0, 16.0, ranks=1))


def estimate_gigabytes(config: TrainConfig, ranks: int, writes_checkpoints: bool) -> dict[str, int]:
    """1 GB for the process, 1 GB of activations for 32 examples, and 1 GB where the rank writes checkpoints."""
    batches = config.batch_size / 32 * (0.1 if config.gradient_checkpointing else 1.0)
    return {
        "process": GB,
        "activations": int(batches * GB),
        "copy": GB * (writes_checkpoints and bool(config.checkpoint_every)),
    }


def test_the_host_that_lacks_most_is_named() -> None:
    short = find_shortage(TrainConfig(), host_memory(2.5, 1.5, 1.9), estimate_gigabytes)
    assert short
    # The third host writes no checkpoints.
    assert (short.host.host, short.needed_bytes, short.parts["copy"]) == ("n2", 3 * GB, GB)
    assert find_shortage(TrainConfig(), host_memory(3.0, 3.0, 2.0), estimate_gigabytes) is None


def test_shared_libraries_count_once_for_each_host() -> None:
    needed = 3 * GB + 2 * (2 * GB - SHARED_BYTES)
    assert find_shortage(TrainConfig(), host_memory(needed / GB, ranks=3), estimate_gigabytes) is None
    short = find_shortage(TrainConfig(), host_memory(needed / GB - 0.001, ranks=3), estimate_gigabytes)
    assert short
    assert short.needed_bytes == needed


def test_hosts_of_one_machine_share_its_memory() -> None:
    assert find_shortage(TrainConfig(), host_memory(4.0, 4.0), estimate_gigabytes) is None
    short = find_shortage(TrainConfig(), host_memory(4.0, 4.0, machine="m"), estimate_gigabytes)
    assert short
    assert (short.host.host, short.host.ranks, short.needed_bytes) == (
        "the machine of n1, n2",
        2,
        6 * GB - SHARED_BYTES,
    )


def test_independent_ranks_write_no_checkpoints() -> None:
    seen = []

    def note(config: TrainConfig, ranks: int, writes_checkpoints: bool) -> dict[str, int]:
        seen.append((ranks, writes_checkpoints))
        return {"process": GB}

    find_shortage(TrainConfig(), dataclasses.replace(host_memory(4.0, 4.0), independent=True), note)
    assert set(seen) == {(1, False)}


@pytest.mark.parametrize(
    ("free", "advice"),
    [
        (2.6, "add --batch-size 16 --gradient-accumulation 2"),
        (2.3, "add --batch-size 8 --gradient-accumulation 4"),
        (2.11, "add --gradient-checkpointing"),
        (2.06, "add --batch-size 16 --gradient-accumulation 2 --gradient-checkpointing"),
        (1.5, "add --batch-size 16 --gradient-accumulation 2 --checkpoint-every 0"),
        (0.9, "take a smaller model, more hosts with a smaller --batch-size each, or hosts with more memory"),
    ],
)
def test_the_cheapest_changes_are_suggested(free: float, advice: str) -> None:
    assert suggest_changes(TrainConfig(), host_memory(free), estimate_gigabytes) == advice


def test_changes_leave_the_updates_as_they_are() -> None:
    config = TrainConfig(batch_size=12, gradient_accumulation=3, gradient_checkpointing=True)
    found = [dataclasses.replace(config, **changes) for changes in list_changes(config, 1)]
    assert {one.batch_size * one.gradient_accumulation for one in found} == {36}
    assert {one.batch_size for one in found} == {12, 6, 3}
    assert config not in found


def test_the_largest_batch_is_that_of_the_longest_rows() -> None:
    def find(config: TrainConfig, ranks: int, **changes: Any) -> LargestBatch:
        prepared = dataclasses.replace(PREPARED, train=make_tokens([5, 9, 2, 7, 3, 8, 1, 4]), **changes)
        return find_batches(prepared, config, ranks)[0]

    config = TrainConfig(batch_size=2, epochs=1.0)
    assert find(config, 1) == LargestBatch(2, 9, 17)
    assert find(config, 2) == LargestBatch(2, 9, 16)  # neighbours in length go to different ranks
    whole = dataclasses.replace(config, batch_size=100)
    assert find(whole, 1) == LargestBatch(8, 9, 39)
    texts = {"kind": "pairs", "texts": ("question", "answer")}
    assert find(whole, 1, **texts) == LargestBatch(16, 9, 39, True)
    assert find(dataclasses.replace(whole, micro_batch=2), 1, **texts).examples == 4


def test_host_memory_is_passed_as_an_argument() -> None:
    found = host_memory(1.0, 2.0, machine="it's")
    assert split_run_memory([*format_run_memory(found), "--task=demo"]) == (found, ["--task=demo"])
    assert split_run_memory(["--task=demo"]) == (None, ["--task=demo"])
    assert format_run_memory(host_memory(1.0, 0.0)) == ()


def run_prepare(output: Path, free: float) -> subprocess.CompletedProcess[str]:
    words = [*format_run_memory(host_memory(free)), "--task=demo", "--max-train-samples=64"]
    command = [sys.executable, "-m", "cpuft.train.data.prepare", str(output), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_the_preparation_ends_with_one_line(own_cache: None, tmp_path: Path) -> None:
    done = run_prepare(tmp_path / "rows", 0.1)
    assert done.returncode == 2
    assert done.stderr.startswith("cpuft: error: n1 has 0.1 GB free, and its rank needs ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "rows").exists()
    assert run_prepare(tmp_path / "rows", 64.0).returncode == 0
    assert (tmp_path / "rows").exists()


def test_what_may_fit_is_not_refused() -> None:
    def needs(config: TrainConfig, ranks: int, writes_checkpoints: bool) -> dict[str, int]:
        return {"process": GB}

    assert find_shortage(TrainConfig(), host_memory(0.95), needs) is not None
    assert find_shortage(TrainConfig(), host_memory(0.95), needs, 1 - KNOWN_ERROR) is None


def test_a_decoder_that_does_not_fit_may_train_adapters(tmp_path: Path) -> None:
    settings = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = TrainConfig(task="chat", model=str(tmp_path), batch_size=4, checkpoint_every=0.0, lora_rank=0)
    tokens = make_tokens([512] * 20)
    prepared = Prepared((), (), "", 0, tokens, {"": tokens}, "chat")
    memory = RunMemory((HostMemory("a", 1, 6 * GB),), "bf16")
    with pytest.raises(CpuftError, match="add --lora-rank 16 --gradient-checkpointing, which trains adapters"):
        check_fit(config, prepared, memory)
    check_fit(dataclasses.replace(config, lora_rank=16, gradient_checkpointing=True), prepared, memory)
    check_fit(config, prepared, RunMemory((HostMemory("a", 1, 64 * GB),), "bf16"))
