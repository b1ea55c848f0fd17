"""Run by mpirun: a small BERT whose optimizer is whole on each rank, or shared out.

Usage: sharded.py FOLDER KEPT STEPS [GOES_ON]. Writes FOLDER/RANK-of-SIZE.json: by way, what both have come to, and
with a fourth word what a run does that goes on from the checkpoint in KEPT; where there is none, the one shared out
makes it there after five.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from cpuft import comm
from cpuft.config.train import TrainConfig
from cpuft.rank.world import World, parse_world
from cpuft.record import RecordedRank
from cpuft.train.checkpoint.resume import resume
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.checkpoint.writer_thread import CheckpointWriter
from cpuft.train.data.archive import Prepared
from cpuft.train.exchange.optimizer_shards import OptimizerShards
from cpuft.train.exchange.zero1 import ShardedExchange
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE
from cpuft.train.loop import train
from cpuft.train.objective.base import Batch, Objective, Predictions
from cpuft.train.optimizer import make_optimizer
from cpuft.train.ranks import checksum_parameters, prove_equal_parameters
from cpuft.train.setup import TrainingSetup
from tests.comm.ranks import become_rank
from tests.records import make_record
from tests.train.fast.encoders import make_batch, make_model
from tests.train.tokens import make_tokens

CONFIG = TrainConfig(learning_rate=1e-4, warmup_ratio=0.2, batch_size=4, weight_decay=0.1, max_grad_norm=0.5)
GLOBAL_BATCH = 24
"""Several forward passes a rank, of which the last may be a short one."""
KEPT_AFTER = 5
WAYS = {"fp32": ("fp32", 0.1), "bf16": ("bf16", 0.1), "rows": ("fp32", 0.0)}
"""Precision and weight decay; without that, ranks send the rows of words that were named."""
HEADER = replace(make_record(2).header, options=dict(vars(CONFIG)), ranks=[RecordedRank(0, "a", [0])])


class Telling(Objective):
    """Which of two classes?"""

    label_type = torch.int64

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(**batch.inputs).logits.float(), batch.labels, reduction="none")

    def predict(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        raise NotImplementedError


def make_loop(world: World, way: str, shard: str, steps: int) -> TrainingSetup:
    precision, decay = WAYS[way]
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5]
    tokens = replace(make_tokens(lengths), labels=np.arange(len(lengths), dtype=np.float32) % 2)
    tokens = replace(tokens, ids=2 * tokens.ids - 1)  # every other word, of every rank's part
    prepared = Prepared((), (), HEADER.data, 0, tokens, {"": tokens})
    config = replace(CONFIG, shard=shard, max_steps=steps, weight_decay=decay)
    return TrainingSetup(
        make_model("bert"), Telling((), (), 0, 0), config, prepared, precision, world, global_batch=GLOBAL_BATCH
    )


def make_state(loop: TrainingSetup) -> TrainingState:
    return TrainingState(loop.model, loop.optimizer, loop.exchange.shards)


def keep(loop: TrainingSetup, root: Path) -> None:
    """A checkpoint, by rank 0."""
    if loop.world.rank == 0:
        writer = CheckpointWriter(make_state(loop), root, 0, every=0.0)
        writer.add_line(HEADER)
        assert writer.write(KEPT_AFTER, wait=True)
    else:
        loop.exchange.contribute_to_checkpoint()


def go(loop: TrainingSetup, root: Path | None = None, done: int = 0) -> dict[str, Any]:
    """Train to the end: losses, the checksum of what all ranks have, its weights, and bytes of optimizer and step."""
    found: dict[str, Any] = {"losses": [], "sent": []}
    loop.evaluation_interval = KEPT_AFTER  # the lines until then are complete, as before an evaluation
    for line in train(loop, done=done):
        found["losses"].append(line.loss)
        found["sent"].append(line.bytes_sent)
        if root and line.step == KEPT_AFTER:
            keep(loop, root)
    with loop.exchange.full_weights():
        prove_equal_parameters(loop.model, "at the end")
        found["checksum"] = checksum_parameters(loop.model)
        found["weights"] = {name: value.clone() for name, value in loop.model.state_dict().items()}
    return found | {"bytes": count_bytes(loop)}


def count_bytes(loop: TrainingSetup) -> int:
    """What this rank has of the optimizer: moments, and fp32 masters of bf16 weights."""
    states = [tensor for state in loop.optimizer.state.values() for name, tensor in state.items() if name != "step"]
    masters = [*getattr(loop.model, MASTERS_ATTRIBUTE)._masters.values()]
    shards = loop.exchange.shards
    masters += [bucket.shard for bucket in shards.buckets if bucket.has_masters] if shards else []
    return sum(tensor.nbytes for tensor in (*states, *masters))


def go_on(world: World, way: str, shard: str, steps: int, root: Path) -> dict[str, Any]:
    loop = make_loop(world, way, shard, steps)
    state = make_state(loop)
    past = resume(state, root, world, vars(CONFIG), HEADER.data)
    loop.exchange.reset()
    return go(loop, done=past.update)


def furthest(found: dict[str, Any], other: dict[str, Any]) -> float:
    """How far weights are from each other at most."""
    return max(float((found["weights"][name] - value).abs().max()) for name, value in other["weights"].items())


def saves_whole(loop: TrainingSetup, weights: dict[str, torch.Tensor], folder: Path) -> bool:
    """Whether a saved model has all bits of its fp32 weights. The first rank saves it, as in a run."""
    model: Any = loop.model
    with loop.exchange.full_weights():
        model.save_pretrained(folder, is_main_process=loop.world.rank == 0)
    dist.barrier()
    saved = load_file(folder / "model.safetensors")
    return saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in saved)


def gives_back_masters() -> bool:
    """Whether fp32 masters of bf16 weights are freed where each rank has its part."""
    model = make_model("bert")
    optimizer = make_optimizer(model, CONFIG, "bf16")
    before = [weakref.ref(master) for master in getattr(model, MASTERS_ATTRIBUTE)._masters.values()]
    parts = OptimizerShards(model, optimizer, None)
    return bool(before and parts) and all(one() is None for one in before)


def sums_lie_with_gradients() -> bool:
    """Whether a part's gradient takes no memory beside those of its bucket."""
    model = make_model("bert")
    optimizer = make_optimizer(model, CONFIG, "bf16")
    exchange = ShardedExchange(model, optimizer, CONFIG, "bf16")
    buckets = [bucket for bucket in exchange._shards.buckets if bucket is not exchange._shards.embedding_bucket]
    blocks = {bucket.buffer().untyped_storage().data_ptr() for bucket in buckets}
    batch = make_batch()
    exchange.begin_pass(is_last=True)
    model(**batch).loss.backward()
    exchange.average_gradients(lambda: [batch["input_ids"]] * dist.get_world_size())
    sums = [bucket.shard.grad for bucket in buckets]
    return bool(sums) and all(one is not None and one.untyped_storage().data_ptr() in blocks for one in sums)


def packed_layers_stay_packed(loop: TrainingSetup) -> bool:
    """Whether query, key and value still are one product, moved as they are."""
    inside: Any = loop.model.get_submodule("bert.encoder.layer.1.attention.self")
    first = inside.query.weight
    return bool(inside.value.weight.data_ptr() == first.data_ptr() + 2 * first.nbytes)


def compare(world: World, folder: Path, root: Path, way: str, steps: int, goes_on: bool) -> dict[str, Any]:
    kept = root.exists()
    dist.barrier()
    whole = go(make_loop(world, way, "none", steps))
    loop = make_loop(world, way, "optimizer", steps)
    shared = go(loop, None if kept else root)
    dist.barrier()
    ways = ("none", "optimizer") if goes_on else ()
    resumed = {shard: go_on(world, way, shard, steps, root) for shard in ways}
    found = {"off": furthest(shared, whole), "packed": packed_layers_stay_packed(loop)}
    found["saved"] = saves_whole(loop, shared["weights"], folder / f"{way}-of-{world.size}")
    runs = {"whole": whole, "shared": shared, **{f"from {shard}": run for shard, run in resumed.items()}}
    return found | {name: {k: v for k, v in run.items() if k != "weights"} for name, run in runs.items()}


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start("gloo", timeout_seconds=60)
    own, (folder, kept), steps = parse_world(os.environ), map(Path, sys.argv[1:3]), int(sys.argv[3])
    found = {name: compare(own, folder, kept / name, name, steps, len(sys.argv) > 4) for name in WAYS}
    told = found | {"gives back": gives_back_masters(), "in place": sums_lie_with_gradients()}
    (folder / f"{own.rank}-of-{own.size}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
