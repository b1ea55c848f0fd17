"""What is written of a model's answers, to the letter."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpuft.config.predict import PredictConfig
from cpuft.errors import CpuftError
from cpuft.judge.predictions import FILE_NAME, About, write_predictions
from cpuft.judge.threshold import find_threshold
from cpuft.record import format_metrics
from cpuft.tasks import TASKS, Task
from cpuft.train.data.archive import UNTAGGED
from cpuft.train.data.sources import Examples
from cpuft.train.data.tables import read_table
from cpuft.train.data.write_tables import write_table
from cpuft.train.evaluate import compute_outputs, plan_batches
from cpuft.train.objective.base import Objective
from cpuft.train.predict import (
    Table,
    check_predictions_file,
    give_ids,
    name_submission,
    number_words,
    predict,
    resolve_threshold,
    subtract_threshold,
    tabulate_predictions,
    tabulate_submission,
    tag_tokens,
)
from tests.train.tiny import MAKERS, learn, make_config
from tests.train.tokens import make_tokens

pytestmark = pytest.mark.usefixtures("alone", "plain")
LOGITS = np.log(np.asarray([[0.25, 0.75], [0.9, 0.1]], np.float32))


def make_task(kind: str, labels: tuple[str, ...]) -> Task:
    return replace(TASKS["files"], kind=kind, labels=labels)


def table(task: Task, outputs: object, path: Path, labels: list[Any] | None = None, threshold: float = 0.5) -> str:
    rows = len(np.asarray(outputs))
    examples = Examples([("x",)] * rows, labels or [0.0] * rows, labels is not None)
    made = tabulate_predictions(task, examples, np.asarray(outputs, np.float32), make_tokens([1] * rows), [], threshold)
    write_table(path, *made)
    return path.read_text(encoding="utf-8")


def names(table: Table) -> list[str]:
    return [column.name for column in table[0]]


def test_classes(tmp_path: Path) -> None:
    task = make_task("class", ("ham", "spam"))
    wanted = "index,prediction,p_ham,p_spam\n0,spam,0.250000,0.750000\n1,ham,0.900000,0.100000\n"
    assert table(task, LOGITS, tmp_path / "x.csv") == wanted
    wanted = "index,label,prediction,p_ham,p_spam\n0,ham,spam,0.250000,0.750000\n1,ham,ham,0.900000,0.100000\n"
    assert table(task, LOGITS, tmp_path / "x.csv", [0.0, 0.0]) == wanted


def test_scores(tmp_path: Path) -> None:
    outputs = [[3.25], [-1e-3]]
    assert table(make_task("score", ()), outputs, tmp_path / "x.csv") == "index,prediction\n0,3.25\n1,-0.001\n"
    wanted = "index,label,prediction\n0,3.125,3.25\n1,0.0,-0.001\n"
    assert table(make_task("score", ()), outputs, tmp_path / "x.csv", [3.125, 0.0]) == wanted
    labels = [(1.0, 0.0), (0.5, 0.0)]
    wanted = "index,label,prediction\n0,1.0,0.123456784\n1,0.5,0.123456791\n"
    outputs = [[0.12345678], [0.12345679]]
    assert table(make_task("relevance", ()), outputs, tmp_path / "x.csv", labels) == wanted


def test_several_labels_or_none(tmp_path: Path) -> None:
    task, outputs = make_task("labels", ("a", "b")), [[1.25e-3, 2], [0, -2]]
    wanted = "index,prediction,p_a,p_b\n0,a|b,0.500312,0.880797\n1,,0.500000,0.119203\n"
    assert table(task, outputs, tmp_path / "x.csv") == wanted
    wanted = "index,label,prediction,p_a,p_b\n0,b,b,0.500312,0.880797\n1,,,0.500000,0.119203\n"
    assert table(task, outputs, tmp_path / "x.csv", [(1,), ()], 0.6) == wanted
    wanted = (
        '{"index": 0, "label": ["b"], "prediction": ["a", "b"], "p_a": 0.500312, "p_b": 0.880797}\n'
        '{"index": 1, "label": [], "prediction": ["a", "b"], "p_a": 0.5, "p_b": 0.119203}\n'
    )
    assert table(task, outputs, tmp_path / "x.jsonl", [(1,), ()], 0.1) == wanted


def test_words_have_their_tags_and_those_that_were_cut_off_none(tmp_path: Path) -> None:
    """The first row's second word has no token of its own; of the second row the last word was cut off."""
    tokens = replace(make_tokens([3, 2]), labels=np.asarray([0, UNTAGGED, 2, UNTAGGED, 0], np.int32))
    outputs = np.zeros((2, 3, 2), np.float32)
    outputs[[0, 0, 1], [0, 2, 1]] = LOGITS[[0, 1, 0]]
    rows = Examples([("New", "\u200e", "a,b"), ("x", "y")], [(0, 1, 1), (1, 0)])
    made = tabulate_predictions(make_task("tags", ("B-X", "O")), rows, outputs, tokens, give_ids("n", ["7", "x"]))
    write_table(tmp_path / "x.csv", *made)
    assert (tmp_path / "x.csv").read_text(encoding="utf-8") == (
        "index,n,token,label,prediction,p_B-X,p_O\n"
        "0,7,New,B-X,O,0.250000,0.750000\n"
        "0,7,\u200e,O,,,\n"
        '0,7,"a,b",O,B-X,0.900000,0.100000\n'
        "1,x,x,O,O,0.250000,0.750000\n"
        "1,x,y,B-X,,,\n"
    )


@pytest.mark.parametrize(
    "name, outputs, wanted",
    [
        ("mrpc", LOGITS, "index\tprediction\n0\t1\n1\t0\n"),
        ("rte", LOGITS, "index\tprediction\n0\tnot_entailment\n1\tentailment\n"),
        ("mnli", np.eye(3)[[2, 1]], "index\tprediction\n0\tcontradiction\n1\tneutral\n"),
        ("stsb", np.asarray([[2.34567], [7.0], [-0.1]]), "index\tprediction\n0\t2.346\n1\t5.000\n2\t0.000\n"),
    ],
)
def test_what_glue_takes(name: str, outputs: NDArray[Any], wanted: str, tmp_path: Path) -> None:
    write_table(tmp_path / "x.tsv", *tabulate_submission(TASKS[name], outputs.astype(np.float32)))
    assert (tmp_path / "x.tsv").read_text() == wanted


def test_glue_s_names_of_files() -> None:
    assert [name_submission(TASKS["mnli"], suffix) for suffix in ("", "_mismatched")] == ["MNLI-m.tsv", "MNLI-mm.tsv"]
    assert [name_submission(TASKS[name], "") for name in ("sst2", "stsb", "cola")] == [
        "SST-2.tsv",
        "STS-B.tsv",
        "CoLA.tsv",
    ]


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    request = PredictConfig(run=str(tmp_path / "run"), file="y/../new.csv", overwrite=True)
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(CpuftError, match="is a folder or no regular file, which cannot be written: give another file"):
        check_predictions_file(tmp_path / "x.csv", request)
    with pytest.raises(CpuftError, match=r"x\.json has the ending '\.json': give an --output that ends in \.csv, "):
        check_predictions_file(tmp_path / "x.json", request)
    with pytest.raises(CpuftError, match="has the run's predictions for its validation examples: give ano"):
        check_predictions_file(Path("y/../run") / FILE_NAME, request)
    for file in (request.file, "other.csv, new.csv", "n*.csv"):
        Path("new.csv").touch()
        with pytest.raises(CpuftError, match=r"new\.csv is one of the files that are read: give another --output"):
            check_predictions_file(tmp_path / "new.csv", replace(request, file=file))
    check_predictions_file(tmp_path / "new.tsv", request)


def test_what_is_given_stands_beside_what_was_predicted() -> None:
    task = replace(make_task("class", ("ham", "spam")), texts=("question", "label"))
    rows = Examples([("=a", "b"), ("c", "d")], [0.0, 0.0])
    given = [*give_ids("index", ["7", "-10"]), ("question", ["=a", "c"]), ("label", ["b", "d"]), ("label", ["e", "f"])]
    made = tabulate_predictions(task, rows, LOGITS, make_tokens([1, 1]), given)
    wanted = ["index", "input_index", "question", "input_label", "input_input_label", "label", "prediction"]
    assert names(made)[:7] == wanted
    assert [cells[:7] for cells in made[1]] == [
        (0, 7, "=a", "b", "e", "ham", "spam"),
        (1, -10, "c", "d", "f", "ham", "ham"),
    ]
    assert made[0][1].type == "int64"


@pytest.mark.parametrize("ids", [["7", "x"], ["7", "07"], ["1.0"], [""], ["1", " 2"], [str(10**18)]])
def test_ids_that_are_not_all_whole_numbers_stay_as_they_are(ids: list[str]) -> None:
    assert give_ids("id", ids) == [("id", ids)]


def save_predictions(
    folder: Path, probabilities: list[list[float]], labels: list[list[str]], classes: tuple[str, ...] = ("a", "b")
) -> None:
    """The predictions of a run with several labels for its validation examples."""
    about = About("labels", classes, {"f1_micro": 0.0}, "", 1)
    columns = {"label": labels, "prediction": labels, "probabilities": np.asarray(probabilities, np.float32).tolist()}
    write_predictions(folder, about, {"row": range(len(labels)), **columns})


def test_the_threshold_is_said_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two rows, 0.5 predicts nothing, and anything between 0.2 and 0.34 all labels."""
    task, asked = make_task("labels", ("a", "b")), PredictConfig(run="run")
    auto = replace(asked, threshold="auto")

    def choose(request: PredictConfig) -> tuple[float, str]:
        return resolve_threshold(request, task), capsys.readouterr().err

    (tmp_path / "run").mkdir()
    usual = "labels with a probability above 0.5 are predicted"
    value, said = choose(auto)
    assert value == 0.5
    assert said.startswith(f"{usual}, because run has no predictions.parquet: give")
    save_predictions(tmp_path / "run", [[0.34, 0.1], [0.2, 0.4]], [["a"], ["b"]])
    gain = "f1_micro 1.0000 on the run's 2 validation examples, and 0.5 has 0.0000"
    assert choose(asked) == (0.5, f"{usual}\n")
    best = f"labels with a probability above 0.3 are predicted: of all thresholds it has the best {gain}"
    assert choose(auto) == (0.3, f"{best}\n")
    own = "it was chosen on these examples, so that their metrics are too good"
    assert choose(replace(auto, split="validation")) == (0.3, f"{best}; {own}\n")
    assert choose(replace(asked, threshold="0.4")) == (0.4, "labels with a probability above 0.4 are predicted\n")
    save_predictions(tmp_path / "run", [[0.7, 0.1], [0.2, 0.6]], [["a"], ["b"]])
    best = "of all thresholds it has the best f1_micro 1.0000 on the run's 2 validation examples"
    assert choose(auto) == (0.5, f"{usual}: {best}\n")
    for wrong in ("0", "1", "nan", "-1", "best"):
        with pytest.raises(CpuftError, match=f"--threshold '{wrong}' is not valid: give auto, or a number above 0 and"):
            choose(replace(asked, threshold=wrong))
    with pytest.raises(CpuftError, match="--threshold is for several labels, and run predicts none: leave it out"):
        resolve_threshold(auto, make_task("class", ("a", "b")))


def test_outputs_are_shifted_by_the_threshold() -> None:
    outputs = np.linspace(-5, 5, 1000, dtype=np.float32)
    for threshold in (0.01, 0.3, 0.5, 0.9):
        probabilities = 1 / (1 + np.exp(-outputs.astype(np.float64)))
        assert ((subtract_threshold(outputs, threshold) > 0) == (probabilities > threshold)).all()
    assert (subtract_threshold(outputs, 0.5) == outputs).all()


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


WANTED = {
    "class": ({"accuracy": 0.95, "f1": 0.9}, {"index", "label", "prediction", "p_red", "p_not red"}),
    "score": ({"pearson": 0.8, "spearman": 0.8}, {"index", "label", "prediction"}),
    "labels": ({"f1_micro": 0.6, "f1_macro": 0.6, "accuracy": 0.3}, {"label", "prediction", "p_green", "p_red"}),
    "tags": ({"f1": 0.95, "precision": 0.95, "recall": 0.95, "accuracy": 0.95}, {"token", "label", "prediction"}),
}
"""Metrics, at least, and columns of the predictions."""


@pytest.mark.parametrize("kind, precision", [*((kind, "fp32") for kind in MAKERS), ("tags", "bf16"), ("tags", "int8")])
def test_a_kind_is_learned_and_its_metric_foretold(
    kind: str, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    least, columns = WANTED[kind]
    steps, evaluation = learn(make_config(tmp_path, kind), precision, tmp_path / "run")
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert set(evaluation.metrics) == set(least)
    assert {name for name, value in evaluation.metrics.items() if value < least[name]} == set()
    predict(PredictConfig(run="run", split="validation"))
    said = capsys.readouterr()
    assert said.out == f"{format_metrics(evaluation.metrics)}\npredictions: run/predictions.csv\n"
    assert "37 examples, " in said.err
    # If all tags are right, no resample differs, and there is no interval.
    varies = kind != "tags" or evaluation.metrics["accuracy"] < 1
    assert ("95 % intervals with 37 rows: " in said.err) is varies
    found = read_csv("run/predictions.csv")
    rows = map(json.loads, Path("validation.jsonl").read_text().splitlines())
    assert len(found) == sum(len(row.get("tokens", ["one line"])) for row in rows)
    assert columns <= found[0].keys()
    if kind == "labels":
        check_best_threshold(found, capsys)


def check_best_threshold(found: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    """What is predicted is above the threshold that is said, and the metrics are those of what is predicted."""
    names = ("green", "red")
    probabilities = [[float(row[f"p_{name}"]) for name in names] for row in found]
    save_predictions(
        Path("run"), probabilities, [row["label"].split("|") if row["label"] else [] for row in found], names
    )
    best = find_threshold("run")
    predict(PredictConfig(run="run", file="validation.jsonl", threshold="auto", output="x.jsonl"))
    said = capsys.readouterr()
    assert said.out.startswith(f"f1_micro {best.f1:.4f}  ")
    assert said.err.startswith(f"labels with a probability above {best.value:g} are predicted: ")
    rows = [json.loads(line) for line in Path("x.jsonl").read_text().splitlines()]
    for row, own in zip(rows, probabilities, strict=True):
        assert row["prediction"] == [name for name, one in zip(names, own) if one > best.value]


@pytest.mark.parametrize("kind", ["class", "tags"])
def test_adapters_are_asked_like_whole_models(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, evaluation = learn(make_config(tmp_path, kind, lora_rank=4, max_steps=20), "fp32", tmp_path / "run")
    assert (tmp_path / "run/model/adapter_config.json").exists()
    predict(PredictConfig(run="run", split="validation"))
    assert capsys.readouterr().out.startswith(f"{format_metrics(evaluation.metrics)}\n")


def test_rows_of_a_file_are_answered_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With labels or without: the same answers; and in batches of another size."""
    learn(make_config(tmp_path, "tags"), "fp32", tmp_path / "run")
    sentences = [["the", "old", "red", "dog"], ["cat"], ["green", "is", "red"]]
    Path("new.jsonl").write_text("".join(json.dumps({"tokens": words}) + "\n" for words in sentences))
    predict(PredictConfig(run="run", file="new.jsonl", output="out/x.csv", batch_size=2))
    assert capsys.readouterr().out == "predictions: out/x.csv\n"
    found = read_csv("out/x.csv")
    told = [(int(row["index"]), row["token"]) for row in found]
    assert told == [(number, word) for number, words in enumerate(sentences) for word in words]
    assert [row["prediction"] for row in found] == ["O", "O", "B-COL", "B-ANI", "B-ANI", "B-COL", "O", "B-COL"]
    assert all(float(row[f"p_{row['prediction']}"]) > 0.5 for row in found)


def test_predictions_replace_earlier_ones_only_when_that_is_asked_for(tmp_path: Path, trained: Path) -> None:
    Path("new.csv").write_text("text\na\n")
    asked = PredictConfig(run=str(trained), file="new.csv", output="x.csv")
    Path("x.csv").write_text("index,label\n0,mine\n")
    with pytest.raises(CpuftError, match=r"x\.csv exists: give another --output, or replace the file with --overwr"):
        predict(asked)
    Path("x.csv").unlink()
    os.mkfifo("x.csv")  # to open it would wait for somebody who reads it
    with pytest.raises(CpuftError, match=r"x\.csv is a folder or no regular file, which cannot"):
        predict(asked)
    os.symlink("/dev/null", "null.csv")
    with pytest.raises(CpuftError, match=r"null\.csv is a folder or no regular file, which cannot"):
        predict(replace(asked, output="null.csv", overwrite=True))


def test_texts_are_written_beside_their_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(make_config(tmp_path, "class", max_steps=2), "fp32", tmp_path / "run")
    Path("new.csv").write_text("number,text,label\n7,the cat,not red\n9,=red(),red\n")
    request = PredictConfig(run="run", file="new.csv", with_input=True, id_column="number")
    predict(request)
    found = read_csv("run/predictions.csv")
    assert [(row["index"], row["number"], row["text"], row["label"]) for row in found] == [
        ("0", "7", "the cat", "not red"),
        ("1", "9", "'=red()", "red"),
    ]
    predict(replace(request, overwrite=True, with_input=False, id_column=""))
    assert read_csv("run/predictions.csv")[0].keys() == {"index", "label", "prediction", "p_red", "p_not red"}
    for ending in (".tsv", ".jsonl", ".parquet"):
        predict(replace(request, output=f"x{ending}"))
        cells = {name: text.removeprefix("'") for name, text in found[1].items()}
        (*_, (_, row)) = read_table(Path(f"x{ending}")).rows
        assert {name: row[name] for name in ("index", "number", "label", "prediction")} == {
            name: cells[name] for name in ("index", "number", "label", "prediction")
        }
        assert float(str(row["p_red"])) == pytest.approx(float(cells["p_red"]), abs=1e-6)

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cpuft.train.predict._describe_failures", interrupt)
    with pytest.raises(KeyboardInterrupt):
        predict(replace(request, output="y.csv"))
    assert read_csv("y.csv") == found


def test_batches_are_those_of_the_evaluation() -> None:
    """Rows by length, dealt to two ranks, two at a time; and outputs come back in the rows' order."""
    tokens = make_tokens([5, 1, 4, 2, 3], types=False)
    shares = [[batch.tolist() for batch in share] for share in plan_batches(tokens, 2, 2)]
    assert shares == [[[1, 4], [0]], [[3, 2]]]
    asked = []

    class Echo(Objective):
        def make_batch(self, tokens: Any, rows: Any, epoch: int = -1) -> Any:
            asked.append(rows.tolist())
            return rows

        def outputs(self, model: Any, batch: Any) -> Any:
            return np.stack([batch, batch * 10], 1).astype(np.float32)

    outputs = compute_outputs(None, Echo((), (), 0, 0), tokens, 2, 2, "fp32")  # type: ignore[arg-type]
    assert asked == [[1, 4], [0], [3, 2]]
    assert outputs.tolist() == [[row, 10 * row] for row in range(5)]


def test_words_that_were_seen_are_measured_by_their_own_tags() -> None:
    rows = Examples([("a", "b", "c"), ("d",)], [(2, 1, 0), (1,)])
    assert number_words(rows).labels == [(0, 1, 2), (0,)]
    numbered = replace(make_tokens([4, 2]), labels=np.asarray([-100, 0, 2, -100, -100, 0], np.int32))
    assert tag_tokens(numbered, rows).labels.tolist() == [-100, 2, 0, -100, -100, 1]


@pytest.mark.parametrize(
    "file, text, options, message",
    [
        (
            "x.csv",
            "body,label\na,red\n",
            {},
            "no column of x.csv is named text, sentence or sentence1 (it has body): name the",
        ),
        ("x.csv", "", {}, "x.csv is empty: give a file with rows"),
        ("x.csv", "text\n", {}, "x.csv has no rows: give a file with at least one row below its header"),
        (
            "x.csv",
            "text,label\na,blue\n",
            {},
            "x.csv, line 2: label 'blue' is not one of not red, red: correct that line",
        ),
        ("x.csv", "text\na\n", {"label_column": "colour"}, "x.csv has no column 'colour'"),
        ("x.csv", "text\na\n", {"id_column": "id"}, "x.csv has no column 'id': "),
        (
            "x.jsonl",
            '{"text": "a", "id": [1]}\n',
            {"id_column": "id"},
            "x.jsonl, line 1 has no text in the column",
        ),
        (
            "x.csv",
            "text\na\n",
            {"text_columns": "txt"},
            "x.csv has no column 'txt' (its columns are",
        ),
        ("x.csv", "text\na\n", {"output": "x.csv"}, "x.csv is one of the files that are read: give"),
        (
            "x.jsonl",
            '{"text": ["a"]}\n{"text": ["a"]}\n',
            {},
            "x.jsonl, line 1: 'text' must be one text, as in the other lines",
        ),
    ],
)
def test_rows_that_cannot_be_answered(
    file: str, text: str, options: dict[str, Any], message: str, tmp_path: Path, trained: Path
) -> None:
    Path(file).write_text(text)
    with pytest.raises(CpuftError) as error:
        predict(PredictConfig(run=str(trained), file=file, **options))
    assert message in str(error.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is read of a run before its model is: nothing here was trained."""
    from cpuft.record import Writer
    from tests.records import make_record

    folder = tmp_path_factory.mktemp("trained")
    with Writer(str(folder)) as writer:
        writer.write(make_record(1, task="files").header)
    (folder / "model").mkdir()
    settings = {"problem_type": "single_label_classification", "id2label": {"0": "not red", "1": "red"}}
    (folder / "model/config.json").write_text(json.dumps({"architectures": ["XForSequenceClassification"], **settings}))
    return folder
