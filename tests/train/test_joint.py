"""Losses that compare the examples of all ranks: on two ranks as on one, and with gradient caching as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CoSENTLoss,
    CosineSimilarityLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)

from cpuft.config.train import TrainConfig
from cpuft.judge.predictions import read_predictions
from cpuft.rank.world import World
from cpuft.record import Record, read_record
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.order import plan_updates
from cpuft.train.data.prepare import prepare
from cpuft.train.embedder import Embedder
from cpuft.train.evaluate import evaluate
from cpuft.train.joint import make_joint_batches, split_evenly
from cpuft.train.loop import list_tokens_of_ranks, train
from cpuft.train.objective.embeddings import EmbeddingObjective
from cpuft.train.objective.table import make_objective
from cpuft.train.passes import Clock
from cpuft.train.setup import TrainingSetup
from tests.train.pairs import make_config, write_pairs
from tests.train.test_mixed_ranks import start
from tests.train.tiny import make_config as make_task_config

ALONE = World(0, 1, 0, 1)


def make_setup(
    config: TrainConfig, world: World = ALONE, independent: bool = True, global_batch: int = 0
) -> TrainingSetup:
    prepared = read_prepared(str(prepare(config)))
    objective = make_objective(config, prepared)
    torch.manual_seed(0)
    model = objective.load_model(config)
    return TrainingSetup(model, objective, config, prepared, "fp32", world, independent, global_batch)


def objective_of(setup: TrainingSetup) -> EmbeddingObjective:
    assert isinstance(setup.objective, EmbeddingObjective)
    return setup.objective


def learn(config: TrainConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    setup = make_setup(config)
    lines = list(train(setup))
    return [line.loss for line in lines], setup.model.state_dict()


@pytest.mark.usefixtures("alone", "one_thread")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("task", ["pairs", "class"])
def test_the_tokens_of_a_rank_are_those_of_its_own_texts(task: str, ranks: int, tmp_path: Path) -> None:
    config = make_config(tmp_path) if task == "pairs" else make_task_config(tmp_path, task)
    for rank in range(ranks):
        setup = make_setup(replace(config, batch_size=4), World(rank, ranks, rank, ranks))
        # One example more than the ranks have in two batches, so that one rank alone has a third one.
        examples = np.random.default_rng(1).permutation(len(setup.prepared.train))[: 8 * ranks + 1]
        everything = set(setup.objective.list_token_ids(setup.prepared.train, examples).tolist())
        looked_up: list[torch.Tensor] = []
        model: Any = setup.model
        hook = model.get_input_embeddings().register_forward_pre_hook(
            lambda _, given, found=looked_up: found.append(given[0].reshape(-1))
        )
        for run_pass in setup.objective.plan_passes(setup, examples, 0).functions:
            run_pass(1.0, True, Clock())
        hook.remove()
        listed = set(list_tokens_of_ranks(setup, examples)[rank].tolist())
        assert listed == {*torch.cat(looked_up).tolist(), setup.objective.pad_id}
        assert len(listed) < len(everything) or ranks == 1 or task == "class"


WAYS: list[dict[str, Any]] = [
    {"task": "pairs", "negatives": 1},
    {"task": "pairs", "matryoshka": "32,8"},
    {"task": "scored-pairs"},
    {"task": "scored-pairs", "similarity_loss": "mse"},
]


@pytest.mark.usefixtures("alone", "one_thread")
@pytest.mark.parametrize("way", WAYS)
def test_gradient_caching_changes_no_gradient(way: dict[str, Any], tmp_path: Path) -> None:
    # With dropout: the second pass must draw the masks of the first one.
    config = make_config(tmp_path, **way, max_grad_norm=0.0)
    config = replace(config, dropout=0.1, max_steps=3)
    losses, weights = learn(config)
    cached_losses, cached = learn(replace(config, micro_batch=8))
    assert cached_losses == losses
    small = [learn(replace(config, dropout=0.0, micro_batch=size)) for size in (0, 3, 1)]
    for found, parameters in small[1:]:
        assert found == pytest.approx(small[0][0], rel=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(value, small[0][1][name], rtol=1e-3, atol=2e-5)
    for name, value in cached.items():
        torch.testing.assert_close(value, weights[name])


@pytest.mark.usefixtures("alone", "one_thread")
def test_with_gradient_caching_both_passes_draw_the_same_dropout_masks(tmp_path: Path) -> None:
    setup = make_setup(make_config(tmp_path, dropout=0.3, micro_batch=4, learning_rate=0.0))
    seen: list[torch.Tensor] = []
    objective: Any = setup.objective
    represent = type(objective).represent

    def note(self: Any, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = represent(self, model, batch)
        seen.append(found.detach())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(objective), "represent", note)
        next(iter(train(setup)))
    # Two micro-batches of the warm-up and of the update, each of them twice.
    assert len(seen) == 8
    for first, second in ((0, 2), (1, 3), (4, 6), (5, 7)):
        torch.testing.assert_close(seen[first], seen[second])
    assert not torch.equal(seen[0], seen[4])


def train_on(ranks: int, config: TrainConfig, run: str) -> tuple[Record, dict[str, torch.Tensor]]:
    done = start(Path(), {run: config}, ranks=ranks)
    assert done.returncode == 0, done.stdout
    return read_record(run), load_file(f"{run}/model/model.safetensors")


TWO_RANKS: list[Any] = [
    {"task": "pairs", "negatives": 1, "query_prompt": "query: "},
    *(pytest.param(way, marks=pytest.mark.proof) for way in (*WAYS, {"task": "pairs", "micro_batch": 3})),
]


@pytest.mark.usefixtures("alone", "one_thread")
@pytest.mark.parametrize("way", TWO_RANKS)
def test_two_ranks_learn_what_one_rank_learns_from_twice_the_batch(way: dict[str, Any], tmp_path: Path) -> None:
    # 40 examples in batches of 16: the third update has 8. Without clipping, a gradient that is too small shows.
    exact: dict[str, Any] = {"max_grad_norm": 0.0, "grad_compression": "none", "precision": "fp32"}
    config = make_config(tmp_path, **way, **exact, backend="gloo", max_steps=4)
    two, weights_of_two = train_on(2, config, "two")
    one = make_setup(replace(config, batch_size=16))
    losses = [line.loss for line in train(one)]
    assert [line.loss for line in two.steps] == pytest.approx(losses, rel=1e-4)
    assert two.metrics == pytest.approx(evaluate(one, one.updates).metrics, abs=1e-3)
    if config.task == "pairs":
        kept = read_predictions("two")
        assert kept.column("ndcg@10").mean() == two.metrics["ndcg@10"]
        assert kept.column("text")[0][0].startswith("where")
    weights_of_one = one.model.state_dict()
    for name, value in weights_of_two.items():
        torch.testing.assert_close(value, weights_of_one[name], rtol=1e-3, atol=1e-4)
    if not way.get("query_prompt"):
        return
    # sentence-transformers loads the folder, and makes the same embeddings.
    texts = ["where is the red cat", "x", "the green door that is far away from here " * 9]
    theirs = SentenceTransformer("two/model", device="cpu")
    own = Embedder("two", "fp32").embed(texts, "query: ")
    assert theirs.encode(texts, prompt_name="query") == pytest.approx(own, abs=1e-5)
    assert theirs.max_seq_length == 32


@pytest.mark.usefixtures("alone", "one_thread")
def test_two_ranks_of_which_one_has_more_micro_batches_learn_what_one_rank_learns(tmp_path: Path) -> None:
    # 25 examples in batches of 16: of the 9 in the second update, one rank has 5 and the other 4.
    exact: dict[str, Any] = {"max_grad_norm": 0.0, "grad_compression": "none", "precision": "fp32"}
    config = make_config(tmp_path, **exact, backend="gloo", max_steps=4)
    config = replace(config, train_file=write_pairs(tmp_path / "uneven.csv", 25))
    two, weights = train_on(2, replace(config, micro_batch=4), "two")
    losses, weights_of_one = learn(replace(config, batch_size=16))
    assert [line.loss for line in two.steps] == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(value, weights_of_one[name], rtol=1e-3, atol=1e-4)


@pytest.mark.proof
def test_negatives_of_the_own_rank_only_make_another_loss(tmp_path: Path) -> None:
    config = make_config(tmp_path, backend="gloo", max_steps=2)
    gathered, _ = train_on(2, config, "gathered")
    alone, _ = train_on(2, replace(config, gather_negatives=False), "alone")
    assert alone.steps[0].loss < gathered.steps[0].loss - 0.1


@pytest.mark.usefixtures("alone", "one_thread")
def test_every_rank_has_as_many_batches_and_a_rank_without_examples_takes_part(tmp_path: Path) -> None:
    config = make_config(tmp_path, batch_size=2, sync_every=1)
    setup = make_setup(config, global_batch=6)
    examples = np.arange(7)
    found = []
    for rank in range(3):
        setup.world, setup.independent = World(rank, 3, rank, 3), False
        found.append(make_joint_batches(objective_of(setup), setup, examples, 0))
    assert [[batch.counts for batch in batches] for batches in found] == [[[2, 2, 2], [1, 0, 0]]] * 3
    assert [len(batches[1].parts) for batches in found] == [1, 1, 1]
    for first, second in zip(found[0], found[1]):
        assert torch.equal(first.labels, second.labels)
    own = [batch.labels[batch.own] for batches in found for batch in batches]
    assert torch.equal(torch.cat([own[0], own[2], own[4]]), found[0][0].labels)


@pytest.mark.usefixtures("alone", "one_thread")
def test_a_run_that_is_resumed_on_one_rank_compares_as_many_texts_as_before(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=3)
    losses, weights = learn(config)
    # It began on eight ranks with one example each.
    setup = make_setup(replace(config, batch_size=1), independent=False, global_batch=8)
    assert [line.loss for line in train(setup)] == pytest.approx(losses, rel=1e-5)
    for name, value in setup.model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=2e-5)


@pytest.mark.usefixtures("alone", "one_thread")
@pytest.mark.parametrize("ranks, parts", [(1, 3), (2, 2), (3, 1), (6, 1)])
def test_a_resumed_run_keeps_its_batches_in_parts_that_fit_into_memory(ranks: int, parts: int, tmp_path: Path) -> None:
    setup = make_setup(make_config(tmp_path, batch_size=2), independent=False, global_batch=6)
    setup.world = World(0, ranks, 0, ranks)
    for updates, sizes in ((7, [6, 1]), (6, [6])):
        batches = make_joint_batches(objective_of(setup), setup, np.arange(updates), 0)
        assert [sum(batch.counts) for batch in batches] == sizes
        assert (len(batches[0].parts), batches[0].is_cached) == (parts, parts > 1)
        assert max(len(part.labels) for part in batches[0].parts) <= 2


@given(count=st.integers(0, 200), most=st.integers(1, 64))
def test_micro_batches_are_few_and_equally_mixed(count: int, most: int) -> None:
    examples = np.arange(count)
    parts = split_evenly(examples, most)
    assert sorted(np.concatenate(parts).tolist()) == examples.tolist()
    assert len(parts) == max(1, -(-count // most))
    sizes = [len(part) for part in parts]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    for number, part in enumerate(parts):
        assert part.tolist() == examples[number :: len(parts)].tolist()


@pytest.mark.usefixtures("alone", "one_thread")
def test_labels_are_in_the_order_of_the_micro_batches(tmp_path: Path) -> None:
    setup = make_setup(make_config(tmp_path, batch_size=8, micro_batch=3))
    batch, *_ = make_joint_batches(objective_of(setup), setup, np.arange(8), 0)
    assert [len(part.labels) for part in batch.parts] == [3, 3, 2]
    assert torch.equal(torch.cat([part.labels for part in batch.parts]), batch.labels)


THEIRS: dict[str, Any] = {
    "pairs": MultipleNegativesRankingLoss,
    "cosent": CoSENTLoss,
    "mse": CosineSimilarityLoss,
}


@pytest.mark.proof
@pytest.mark.usefixtures("alone", "one_thread")
@pytest.mark.parametrize("way", [*WAYS[:1], {"task": "pairs", "matryoshka": "384,64"}, *WAYS[2:]])
def test_the_loss_curve_is_that_of_sentence_transformers(way: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(tmp_path, **way, max_steps=20, learning_rate=2e-5, max_grad_norm=0.0)
    config = replace(config, model="minilm", lr_schedule="constant")
    setup = make_setup(config)
    own = [line.loss for line in train(setup)]

    model = SentenceTransformer(Embedder("minilm").source, device="cpu")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    kind = "pairs" if config.task == "pairs" else config.similarity_loss
    loss = THEIRS[kind](model)
    if config.matryoshka:
        loss = MatryoshkaLoss(model, loss, [384, 64])
    decayed = [p for n, p in model.named_parameters() if "pooler" not in n]
    optimizer = torch.optim.AdamW(decayed, lr=2e-5, weight_decay=0.0)
    model.train()
    theirs = []
    tokens = setup.prepared.train
    for _, examples in plan_updates(tokens, config.batch_size, config.seed, 20, False):
        batch = setup.objective.make_batch(tokens, examples)
        count, texts = len(examples), len(setup.prepared.texts)
        features = [
            {name: value[text * count : (text + 1) * count] for name, value in batch.inputs.items()}
            for text in range(texts)
        ]
        labels = torch.zeros(count) if kind == "pairs" else torch.from_numpy(tokens.labels[examples])
        found = loss(features, labels)
        theirs.append(float(found.detach()))
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
    assert own == pytest.approx(theirs, abs=1e-4)
    assert max(theirs) - min(theirs) > 1e-3
