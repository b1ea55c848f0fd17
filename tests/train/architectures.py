"""Run by mpirun: tiny untrained models of many architectures, each trained for a few updates on these ranks.

Usage: architectures.py FOLDER. Reads FOLDER/wanted.json, a list of [name, precision], and writes FOLDER/RANK.json:
by "name precision", what became of the training: `error`, or `losses`, `equal` (whether all ranks ended with the same
parameters) and `by_rows` (whether the word embedding's gradient was exchanged by rows).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft import comm
from cpuft.comm.compression.embedding_rows import find_embedding
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.rank.world import World, parse_world
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.prepare import prepare
from cpuft.train.evaluate import evaluate
from cpuft.train.loop import train
from cpuft.train.model import find_model
from cpuft.train.objective.table import make_objective
from cpuft.train.ranks import prove_equal_parameters
from cpuft.train.setup import TrainingSetup
from tests.comm.ranks import become_rank
from tests.train.tiny import WORDS

_VOCABULARY = 30522
_USUAL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_DECODER = {**_USUAL, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES: dict[str, dict[str, Any]] = {
    "bert": {**_USUAL, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0},
    "llama": _DECODER,
    "qwen3": {**_DECODER, "head_dim": 8},
    "bart": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 101,
        "eos_token_id": 102,
        "decoder_start_token_id": 102,
        "forced_eos_token_id": 102,
    },
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "deberta": {**_USUAL, "max_position_embeddings": 64, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {**_USUAL, "max_position_embeddings": 64, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "roberta": {**_USUAL, "max_position_embeddings": 66, "pad_token_id": 1},
    "albert": {**_USUAL, "embedding_size": 16, "max_position_embeddings": 64},
    "mpnet": {**_USUAL, "max_position_embeddings": 66, "pad_token_id": 1},
}
"""Of a model of each architecture, by its name in transformers."""


def save_architecture(folder: Path, name: str, **settings: Any) -> str:
    """A tiny untrained model with MiniLM's tokenizer; the folder."""
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(name, vocab_size=_VOCABULARY, **SIZES[name] | settings)
    transformers.AutoModel.from_config(made).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(Path(find_model("minilm"), file), folder)
    return str(folder)


def write_pairs(path: Path, count: int) -> None:
    """Examples of two texts each, so that both token types occur."""
    words = [f"{WORDS[number % len(WORDS)]} {WORDS[number % 5]}" for number in range(count)]
    rows = [{"sentence1": one, "sentence2": f"{one} old", "label": f"{'red' in one}"} for one in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def learn(config: TrainConfig, precision: str, world: World) -> dict[str, Any]:
    """Train and evaluate on all ranks, as a run does."""
    prepared = read_prepared(str(prepare(config)))
    objective = make_objective(config, prepared)
    torch.manual_seed(0)
    model = objective.load_model(config)
    loop = TrainingSetup(model, objective, config, prepared, precision, world)
    losses = [line.loss for line in train(loop)]
    evaluate(loop, loop.updates)
    try:
        prove_equal_parameters(model, "at the end")
    except CpuftError as error:
        return {"losses": losses, "equal": False, "error": str(error)}
    return {"losses": losses, "equal": True, "error": "", "by_rows": find_embedding(model) is not None}


def main(folder: Path) -> None:
    world = parse_world(os.environ)
    found = {}
    for name, precision in json.loads((folder / "wanted.json").read_text(encoding="utf-8")):
        config = TrainConfig(
            task="files",
            model=str(folder / name),
            train_file=str(folder / "train.jsonl"),
            validation_file=str(folder / "validation.jsonl"),
            max_steps=4,
            batch_size=4,
            learning_rate=1e-3,
            max_length=32,
            grad_compression="none",
        )
        if world.rank == 0:
            save_architecture(folder / name, name)
            write_pairs(folder / "train.jsonl", 32)
            write_pairs(folder / "validation.jsonl", 9)
        dist.barrier()
        try:
            found[f"{name} {precision}"] = learn(config, precision, world)
        except CpuftError as error:
            found[f"{name} {precision}"] = {"error": str(error)}
    (folder / f"{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start("gloo", timeout_seconds=60)
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
