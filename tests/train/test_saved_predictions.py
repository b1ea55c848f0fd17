"""The file of a run's predictions: the metrics that libraries compute from its columns are those of the record."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit, softmax
from scipy.stats import spearmanr
from seqeval.metrics import f1_score as entity_f1_score
from sklearn.metrics import accuracy_score, f1_score, ndcg_score
from sklearn.preprocessing import MultiLabelBinarizer

from cpuft.config.train import TrainConfig
from cpuft.judge.predictions import FILE_NAME, RunPredictions, read_predictions
from cpuft.record import EvaluationLine
from cpuft.tasks import TASKS
from cpuft.train.data.archive import UNTAGGED, Prepared, Tokens
from cpuft.train.data.validation_rows import make_validation_rows
from cpuft.train.evaluate import KeptPredictions
from cpuft.train.objective.base import Objective, Predictions
from cpuft.train.objective.table import make_objective
from cpuft.train.saved_predictions import save_predictions
from tests.train.tokens import make_tokens

GENERATOR = np.random.default_rng(3)
LENGTHS = [2, 5, 1, 4, 3, 6, 2, 7]
ROWS = len(LENGTHS)


def make_prepared(kind: str, labels: tuple[str, ...], metrics: tuple[str, ...], *splits: NDArray[Any]) -> Prepared:
    """Prepared data with a validation split for each array of labels, the second one as MNLI's."""
    validation = {
        suffix: replace(make_tokens(LENGTHS, types=False), labels=found)
        for suffix, found in zip(("", "_mismatched"), splits)
    }
    return Prepared(labels, metrics, "", 0, validation[""], validation, kind, rows="abc")


def save_and_read(
    folder: Path, prepared: Prepared, *splits: NDArray[np.float32], config: TrainConfig | None = None
) -> tuple[RunPredictions, dict[str, float]]:
    """Save these predictions as a run does; return what is read of them, and the metrics of the run."""
    config = config or TrainConfig()
    objective, kept, metrics = make_objective(config, prepared), KeptPredictions(), dict[str, float]()
    for (suffix, tokens), predictions in zip(prepared.validation.items(), splits):
        kept.add(suffix, objective, predictions, tokens)
        metrics |= {name + suffix: value for name, value in objective.compute_metrics(predictions, tokens).items()}
    assert save_predictions(folder, config, prepared, EvaluationLine(7, metrics, 8, 0.1), kept) == ""
    found = read_predictions(str(folder))
    assert found.about.metrics == metrics
    assert (found.about.kind, found.about.rows, found.about.step) == (prepared.kind, "abc", 7)
    return found, metrics


def draw(*shape: int) -> NDArray[np.float32]:
    return GENERATOR.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("classes, has_all", [(3, True), (101, False)])
def test_classes_of_two_splits(classes: int, has_all: bool, tmp_path: Path) -> None:
    names = tuple(f"class {number}" for number in range(classes))
    labels = [GENERATOR.integers(0, classes, ROWS).astype(np.float32) for _ in range(2)]
    prepared = make_prepared("class", names, ("accuracy", "f1_macro"), *labels)
    logits = [draw(ROWS, classes) * 3 for _ in range(2)]
    logits[0][np.arange(4), labels[0][:4].astype(int)] = 20.0  # some are right
    found, metrics = save_and_read(tmp_path, prepared, *logits)
    for suffix, its_labels, its_logits in zip(("", "_mismatched"), labels, logits):
        mine = found.column("split") == suffix
        label, prediction = found.column("label")[mine], found.column("prediction")[mine]
        assert accuracy_score(label, prediction) == metrics[f"accuracy{suffix}"]
        assert f1_score(label, prediction, average="macro", zero_division=0.0) == metrics[f"f1_macro{suffix}"]
        wanted, rows = softmax(its_logits, -1), np.arange(ROWS)
        assert found.column("confidence")[mine] == pytest.approx(wanted.max(-1))
        assert found.column("label_probability")[mine] == pytest.approx(wanted[rows, its_labels.astype(int)])
        assert found.column("row")[mine].tolist() == rows.tolist()
        assert found.column("tokens")[mine].tolist() == LENGTHS
        if has_all:
            assert np.stack(found.column("probabilities")[mine]) == pytest.approx(wanted)
    assert metrics["accuracy"] >= 0.5
    assert ("probabilities" in found.table.column_names) == has_all
    assert found.about.classes == names


def test_several_labels(tmp_path: Path) -> None:
    labels = GENERATOR.integers(0, 2, (ROWS, 3)).astype(np.float32)
    labels[2] = 0
    prepared = make_prepared("labels", ("a", "b", "c"), ("f1_micro", "f1_macro", "accuracy"), labels)
    logits = draw(ROWS, 3)
    found, metrics = save_and_read(tmp_path, prepared, logits)
    binarizer = MultiLabelBinarizer(classes=["a", "b", "c"])
    label, prediction = (binarizer.fit_transform(found.column(name)) for name in ("label", "prediction"))
    assert f1_score(label, prediction, average="micro") == metrics["f1_micro"]
    assert f1_score(label, prediction, average="macro", zero_division=0.0) == metrics["f1_macro"]
    assert accuracy_score(label, prediction) == metrics["accuracy"]
    assert np.stack(found.column("probabilities")) == pytest.approx(expit(logits))


def test_tags(tmp_path: Path) -> None:
    names = ("B-LOC", "B-PER", "I-PER", "O")
    labels = GENERATOR.integers(0, 4, sum(LENGTHS)).astype(np.int32)
    labels[::5] = UNTAGGED
    prepared = make_prepared("tags", names, ("f1", "accuracy"), labels)
    predictions = GENERATOR.integers(0, 4, (ROWS, max(LENGTHS))).astype(np.float32)
    found, metrics = save_and_read(tmp_path, prepared, predictions)
    label, prediction = ([list(tags) for tags in found.column(name)] for name in ("label", "prediction"))
    assert [*map(len, label)] == [*map(len, prediction)]
    assert sum(map(len, label)) == (labels != UNTAGGED).sum()
    assert entity_f1_score(label, prediction, zero_division=0) == metrics["f1"]
    assert accuracy_score([*chain(*label)], [*chain(*prediction)]) == metrics["accuracy"]


def test_scores(tmp_path: Path) -> None:
    prepared = make_prepared("score", (), ("spearman",), draw(ROWS))
    predictions = draw(ROWS, 1)
    found, metrics = save_and_read(tmp_path, prepared, predictions)
    assert found.column("prediction").tolist() == predictions[:, 0].tolist()
    assert float(spearmanr(found.column("prediction"), found.column("label")).statistic) == metrics["spearman"]


def test_documents_of_queries(tmp_path: Path) -> None:
    queries = np.asarray([0, 0, 1, 0, 1, 2, 2, 2], np.float32)
    relevant = np.asarray([1, 0, 0.75, 0, 0, 0, 1, 0], np.float32)
    prepared = make_prepared("relevance", (), ("ndcg@10",), np.stack([relevant, queries], 1))
    found, metrics = save_and_read(tmp_path, prepared, draw(ROWS, 1))
    is_relevant, score = found.column("label") >= 0.5, found.column("prediction")
    each = [
        ndcg_score([is_relevant[found.column("query") == query]], [score[found.column("query") == query]], k=10)
        for query in range(3)
    ]
    assert float(np.mean(each)) == metrics["ndcg@10"]


def test_the_mean_over_queries_is_the_metric(tmp_path: Path) -> None:
    # The second of three queries has no relevant document, and so no row.
    judgements = np.asarray([[0, 1, 1], [0, 3, 1], [2, 0, 1], [1, 0, 0]], np.int32)
    prepared = make_prepared("pairs", (), TASKS["pairs"].metrics, judgements)
    texts = make_validation_rows([["q1"], ["q2"], ["q3"]], (np.zeros(0, np.int32), ()))
    prepared = replace(prepared, validation_rows={"": texts})
    found, metrics = save_and_read(tmp_path, prepared, draw(ROWS, 5), config=TrainConfig(task="pairs"))
    assert {name: float(np.mean(found.column(name))) for name in metrics} == pytest.approx(metrics, abs=1e-15)
    assert float(np.mean(found.column("ndcg@10"))) == metrics["ndcg@10"]
    assert (found.column("row").tolist(), found.column("tokens").tolist()) == ([0, 2], [0, 0])
    assert [list(one) for one in found.column("text")] == [["q1"], ["q3"]]


def test_texts_and_slices_are_kept_as_far_as_asked(tmp_path: Path) -> None:
    prepared = make_prepared("score", (), ("spearman",), draw(ROWS))
    slices = np.asarray([0, 1, 0, 0, 1, 1, 0, 1], np.int32)
    # Only the first two rows have texts.
    kept = make_validation_rows([["a", ""], ["bb", "cc"]], (slices, ("de", "en")))
    prepared = replace(prepared, validation_rows={"": kept})
    config = TrainConfig(task="files", slice_by="language")
    found, _ = save_and_read(tmp_path, prepared, draw(ROWS, 1), config=config)
    assert found.about.slice_by == "language"
    assert found.column("slice").tolist() == ["de", "en", "de", "de", "en", "en", "de", "en"]
    texts = [None if one is None else list(one) for one in found.column("text")]
    assert texts == [["a", ""], ["bb", "cc"], *[None] * 6]
    found, _ = save_and_read(tmp_path, prepared, draw(ROWS, 1), config=replace(config, examples=False))
    assert "text" not in found.table.column_names


class Broken(Objective):
    """An objective whose predictions cannot be listed."""

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        raise MemoryError("no room")


def test_a_fault_is_one_warning(tmp_path: Path) -> None:
    prepared, line = make_prepared("score", (), ("spearman",), draw(ROWS)), EvaluationLine(7, {}, 8, 0.1)
    broken, whole = KeptPredictions(), KeptPredictions({"": {"label": [1.0] * ROWS}})
    broken.add("", Broken((), (), 0, 0), draw(ROWS, 1), prepared.train)
    (tmp_path / FILE_NAME).mkdir()
    for kept, reason in ((broken, "no room"), (whole, "is a folder")):
        warning = save_predictions(tmp_path, TrainConfig(), prepared, line, kept)
        assert warning.startswith(f"warning: {FILE_NAME} could not be written (")
        assert reason in warning
        assert "\n" not in warning
