"""Rerankers: their metrics, their loss and what is saved of them, held against sentence-transformers."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import format_metrics
from cpuft.train.checkpoint.final_model import save_model
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.order import plan_updates
from cpuft.train.data.prepare import prepare
from cpuft.train.data.relevance import read_relevance
from cpuft.train.loop import train
from cpuft.train.objective.relevance import ACTIVATIONS, Relevance, compute_reranking_metrics, read_activation
from cpuft.train.objective.table import make_objective
from cpuft.train.predict import predict
from cpuft.train.setup import TrainingSetup
from tests.train.rerank import list_rows, make_config, write_csv
from tests.train.test_joint import train_on
from tests.train.tiny import learn, save_tiny
from tests.train.tokens import make_tokens

NAMES = ("ndcg@10", "mrr@10", "map")


class GivenScores:
    """In place of a reranker: scores that are there already, by the numbers in the texts of the documents."""

    def __init__(self, scores: NDArray[np.float32]) -> None:
        self.scores, self.model_card_data = scores, self

    def set_evaluation_metrics(self, *_: Any, **__: Any) -> None:
        """The evaluator notes its metrics for a model card."""

    def predict(self, pairs: list[list[str]], **_: Any) -> NDArray[np.float32]:
        return self.scores[[int(document) for _, document in pairs]]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(2, 14), min_size=1, max_size=8),
    levels=st.sampled_from([2, 5, 10**6]),
)
def test_metrics_are_those_of_the_evaluator_for_rows_in_any_order(seed: int, sizes: list[int], levels: int) -> None:
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    generator = np.random.default_rng(seed)
    queries = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    relevant = generator.random(len(queries)) < 0.3
    scores = (generator.integers(0, levels, len(queries)) / levels).astype(np.float32)
    samples = [
        {
            "query": str(query),
            "positive": [str(one) for one in np.flatnonzero((queries == query) & relevant)],
            "negative": [str(one) for one in np.flatnonzero((queries == query) & ~relevant)],
        }
        for query in range(len(sizes))
    ]
    wanted = CrossEncoderRerankingEvaluator(samples, write_csv=False)(GivenScores(scores))
    assert compute_reranking_metrics(NAMES, scores, relevant, queries) == {name: float(wanted[name]) for name in NAMES}


def test_metrics_by_hand() -> None:
    scores = np.asarray([0.9, 0.5, 0.4, 0.1, 0.7, 0.2], np.float32)
    relevant = np.asarray([False, True, True, False, True, False])
    queries = np.asarray([0, 0, 0, 1, 2, 1])
    # The relevant documents of query 0 are at 2 and 3; query 1 has none, and query 2 no other document.
    found = compute_reranking_metrics(("mrr@10", "mrr@1", "map", "ndcg@10"), scores, relevant, queries)
    assert found["mrr@10"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert found["mrr@1"] == pytest.approx(1 / 3)
    assert found["map"] == pytest.approx(((1 / 2 + 2 / 3) / 2 + 0 + 1) / 3)
    ndcg = (1 / np.log2(3) + 1 / np.log2(4)) / (1 + 1 / np.log2(3))
    assert found["ndcg@10"] == pytest.approx((ndcg + 0 + 1) / 3)
    with pytest.raises(ValueError, match="accuracy is no metric of rerankers"):
        compute_reranking_metrics(("accuracy",), scores, relevant, queries)


class Fixed(torch.nn.Module):
    """A model whose outputs are the first token of each row, over 10."""

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> Any:
        class Output:
            logits = input_ids[:, :1] / 10

        return Output()


def test_the_loss_is_that_of_torch_and_scores_are_from_0_to_1() -> None:
    tokens = replace(make_tokens([2, 3, 1]), labels=np.asarray([1.0, 0.25, 0.0], np.float32))
    objective = Relevance((), NAMES, 0)
    batch = objective.make_batch(tokens, np.arange(3))
    logits = batch.inputs["input_ids"][:, 0] / 10
    losses = objective.losses(Fixed(), batch)
    wanted = torch.nn.BCEWithLogitsLoss()(logits, torch.tensor([1.0, 0.25, 0.0]))
    torch.testing.assert_close(losses.mean(), wanted)
    assert objective.outputs(Fixed(), batch)[:, 0].tolist() == logits.sigmoid().tolist()
    assert replace(objective, activation="identity").outputs(Fixed(), batch)[:, 0].tolist() == logits.tolist()


def test_validation_labels_are_scores_with_the_numbers_of_queries() -> None:
    labels = np.asarray([[1, 0], [0, 1], [0, 0], [0.5, 1]], np.float32)
    tokens = replace(make_tokens([1, 1, 1, 1]), labels=labels)
    objective = Relevance((), NAMES, 0)
    assert objective.make_batch(tokens, np.asarray([3, 0])).labels.tolist() == [0.5, 1.0]
    scores = np.asarray([[0.1], [0.2], [0.9], [0.8]], np.float32)
    assert objective.compute_metrics(scores, tokens)["mrr@10"] == (1 / 2 + 1) / 2


def read_scores(path: str) -> list[float]:
    with open(path, encoding="utf-8", newline="") as file:
        return [float(row["prediction"]) for row in csv.DictReader(file)]


@pytest.mark.usefixtures("alone", "plain")
@pytest.mark.parametrize("activation", ["sigmoid", pytest.param("identity", marks=pytest.mark.proof)])
def test_a_reranker_learns_and_sentence_transformers_computes_the_same_scores(
    activation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    config = make_config(tmp_path)
    if activation == "identity":
        path = Path(config.model, "config.json")
        stored = {"sentence_transformers": {"activation_fn": ACTIVATIONS[activation]}}
        path.write_text(json.dumps(json.loads(path.read_text()) | stored))
    steps, evaluation = learn(config, "fp32", tmp_path / "run")
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert evaluation.metrics["ndcg@10"] > 0.8
    predict(PredictConfig(run="run", split="validation"))
    assert capsys.readouterr().out == f"{format_metrics(evaluation.metrics)}\npredictions: run/predictions.csv\n"

    model = CrossEncoder(str(tmp_path / "run/model"), device="cpu")
    examples = read_relevance(read_task(), config).validation[""].load()
    theirs = model.predict([list(texts) for texts in examples.texts])
    assert read_scores("run/predictions.csv") == pytest.approx(theirs.tolist(), abs=1e-5)
    assert (min(theirs) < 0) == (activation == "identity")
    samples: dict[str, dict[str, Any]] = {}
    for (query, document), (score, _) in zip(examples.texts, examples.labels):
        sample = samples.setdefault(query, {"query": query, "positive": [], "negative": []})
        sample["positive" if score else "negative"].append(document)
    found = CrossEncoderRerankingEvaluator(list(samples.values()), write_csv=False)(model)
    assert evaluation.metrics == pytest.approx({name: found[name] for name in NAMES}, abs=1e-6)

    # Texts that are longer than --max-length, in a file without labels, whose order stays.
    rows: list[tuple[str, ...]] = [(f"red {'old ' * n}cat", f"the {'red ' * (50 - n)} cat") for n in range(45)]
    predict(PredictConfig(run="run", file=write_csv(Path("new.csv"), ("query", "document"), rows), output="x.csv"))
    assert capsys.readouterr().out == "predictions: x.csv\n"
    assert read_scores("x.csv") == pytest.approx(model.predict([list(row) for row in rows]).tolist(), abs=1e-5)


def read_task() -> Any:
    from cpuft.tasks import TASKS

    return TASKS["rerank"]


def test_another_activation_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    assert read_activation(TrainConfig(model=model)) == "sigmoid"
    Path(model, "config_sentence_transformers.json").write_text('{"activation_fn": "torch.nn.Tanh"}')
    with pytest.raises(CpuftError, match=r"makes scores by torch.nn.Tanh \(activation_fn\), .*: set activation_fn"):
        read_activation(TrainConfig(model=model))


@pytest.mark.proof
def test_two_ranks_learn_what_one_rank_learns_from_twice_the_batch(tmp_path: Path) -> None:
    exact: dict[str, Any] = {"max_grad_norm": 0.0, "grad_compression": "none", "precision": "fp32"}
    config = make_config(tmp_path, **exact, backend="gloo", max_steps=8)
    two, weights_of_two = train_on(2, config, "two")
    one, weights_of_one = train_on(1, replace(config, batch_size=32), "one")
    assert [line.loss for line in two.steps] == pytest.approx([line.loss for line in one.steps], rel=1e-4)
    assert two.metrics == pytest.approx(one.metrics, abs=1e-3)
    for name, value in weights_of_one.items():
        torch.testing.assert_close(weights_of_two[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.proof
@pytest.mark.usefixtures("alone", "plain")
def test_the_loss_curve_is_that_of_sentence_transformers_trainer(tmp_path: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from torch.utils.data import BatchSampler, SequentialSampler

    theirs: list[float] = []
    rows = [(query, document, str((number % 5) / 4)) for number, (query, document, _) in enumerate(list_rows(24, 0))]
    config = make_config(tmp_path, max_steps=20, learning_rate=5e-5)
    write_csv(tmp_path / "train.csv", ("query", "document", "score"), list(rows))
    config = replace(config, model="minilm")
    prepared = read_prepared(str(prepare(config)))
    objective = make_objective(config, prepared)
    torch.manual_seed(0)
    setup = TrainingSetup(objective.load_model(config), objective, config, prepared, "fp32", World(0, 1, 0, 1))
    save_model(setup.model, config.model, "start", finish=objective.finish_folder)
    own = [line.loss for line in train(setup)]

    order = [rows[number] for _, update in plan_updates(prepared.train, 16, config.seed, 20, True) for number in update]
    data = Dataset.from_dict(
        {
            "query": [query for query, _, _ in order],
            "document": [document for _, document, _ in order],
            "label": [float(score) for _, _, score in order],
        }
    )
    model = CrossEncoder("start/model", device="cpu")
    arguments = CrossEncoderTrainingArguments(
        output_dir="theirs",
        per_device_train_batch_size=16,
        max_steps=20,
        learning_rate=5e-5,
        weight_decay=0.0,
        batch_sampler=lambda data, batch_size, **_: BatchSampler(SequentialSampler(data), batch_size, False),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    loss = BinaryCrossEntropyLoss(model)
    loss.register_forward_hook(lambda module, given, found: theirs.append(float(found.detach())))
    CrossEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=loss).train()
    assert own == pytest.approx(theirs, abs=1e-4)
    assert max(own) - min(own) > 1e-2
