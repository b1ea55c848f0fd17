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
from cpuft.record import format_metrics
from cpuft.tasks import TASKS, Task
from cpuft.train.data.archive import UNTAGGED
from cpuft.train.data.sources import Examples
from cpuft.train.evaluate import compute_outputs, plan_batches
from cpuft.train.objective.base import Objective
from cpuft.train.predict import (
    add_input,
    check_output,
    format_predictions,
    format_submission,
    guard_formula,
    name_submission,
    number_words,
    predict,
    tag_tokens,
    write_table,
)
from tests.train.tiny import MAKERS, learn, make_config
from tests.train.tokens import make_tokens

pytestmark = pytest.mark.usefixtures("alone", "plain")
LOGITS = np.log(np.asarray([[0.25, 0.75], [0.9, 0.1]], np.float32))
AWKWARD = ('a,"b', "no\nmore")


def make_task(kind: str, labels: tuple[str, ...]) -> Task:
    return replace(TASKS["files"], kind=kind, labels=labels)


def table(task: Task, outputs: object, path: Path, rows: int = 2) -> str:
    texts = Examples([("x",)] * rows, [0.0] * rows)
    write_table(path, format_predictions(task, texts, np.asarray(outputs, np.float32), make_tokens([1] * rows)))
    return path.read_text(encoding="utf-8")


def test_classes(tmp_path: Path) -> None:
    wanted = "index,label,p_ham,p_spam\n0,spam,0.250000,0.750000\n1,ham,0.900000,0.100000\n"
    assert table(make_task("class", ("ham", "spam")), LOGITS, tmp_path / "x.csv") == wanted


def test_awkward_classes_are_quoted(tmp_path: Path) -> None:
    wanted = 'index,label,"p_a,""b","p_no\nmore"\n0,"no\nmore",0.250000,0.750000\n1,"a,""b",0.900000,0.100000\n'
    assert table(make_task("class", AWKWARD), LOGITS, tmp_path / "x.csv") == wanted


def test_scores(tmp_path: Path) -> None:
    assert table(make_task("score", ()), [[3.25], [-1e-3]], tmp_path / "x.csv") == "index,score\n0,3.25\n1,-0.001\n"


def test_several_labels_or_none(tmp_path: Path) -> None:
    wanted = "index,labels,p_a,p_b\n0,a|b,0.500312,0.880797\n1,,0.500000,0.119203\n"
    assert table(make_task("labels", ("a", "b")), [[1.25e-3, 2], [0, -2]], tmp_path / "x.csv") == wanted


def test_words_have_their_tags_and_those_that_were_cut_off_none(tmp_path: Path) -> None:
    """The first row's second word has no token of its own; of the second row the last word was cut off."""
    tokens = replace(make_tokens([3, 2]), labels=np.asarray([0, UNTAGGED, 2, UNTAGGED, 0], np.int32))
    outputs = np.zeros((2, 3, 2), np.float32)
    outputs[[0, 0, 1], [0, 2, 1]] = LOGITS[[0, 1, 0]]
    rows = Examples([("New", "\u200e", "a,b"), ("x", "y")], [0.0, 0.0])
    write_table(tmp_path / "x.csv", format_predictions(make_task("tags", ("B-X", "O")), rows, outputs, tokens))
    assert (tmp_path / "x.csv").read_text(encoding="utf-8") == (
        "index,token,tag,p_B-X,p_O\n"
        "0,New,O,0.250000,0.750000\n"
        "0,\u200e,,,\n"
        '0,"a,b",B-X,0.900000,0.100000\n'
        "1,x,O,0.250000,0.750000\n"
        "1,y,,,\n"
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
    write_table(tmp_path / "x.tsv", format_submission(TASKS[name], outputs.astype(np.float32)))
    assert (tmp_path / "x.tsv").read_text() == wanted


def test_glue_s_names_of_files() -> None:
    assert [name_submission(TASKS["mnli"], suffix) for suffix in ("", "_mismatched")] == ["MNLI-m.tsv", "MNLI-mm.tsv"]
    assert [name_submission(TASKS[name], "") for name in ("sst2", "stsb", "cola")] == [
        "SST-2.tsv",
        "STS-B.tsv",
        "CoLA.tsv",
    ]


def test_only_predictions_are_written_over(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    check_output(path)
    answer = '{"index": 0, "prompt": "a", "answer": "b"}\n'
    for text, has_json_lines in (("index,label,p_a\n", False), ("index\tprediction\n", False), (answer, True)):
        path.write_text(text)
        check_output(path, True, has_json_lines)
        with pytest.raises(CpuftError, match=r"x\.csv holds predictions already: add --overwrite to replace them, or"):
            check_output(path, False, has_json_lines)
        with pytest.raises(CpuftError, match=r"x\.csv exists and holds no predictions: give another --output"):
            check_output(path, True, not has_json_lines)
    path.write_text("")
    check_output(path)
    for text in ("text,label\n", "indexes\n"):
        path.write_text(text)
        with pytest.raises(CpuftError, match=r"x\.csv exists and holds no predictions: give another --output"):
            check_output(path, overwrite=True)
    with pytest.raises(CpuftError, match="is a folder, and only a regular file can be written: give another file"):
        check_output(tmp_path)


def test_no_text_of_a_table_is_a_formula(tmp_path: Path) -> None:
    """Numbers, lone characters and probabilities stay as they are."""
    texts = ["=1+2", "+cmd|x", "-x", "@SUM(A1)", "\t=1", "-1", "+1.5e3", "-", "--", "a=b", "", "'=1"]
    guarded = ["'=1+2", "'+cmd|x", "'-x", "'@SUM(A1)", "'\t=1", "-1", "+1.5e3", "-", "'--", "a=b", "", "'=1"]
    assert [guard_formula(text) for text in texts] == guarded
    wanted = "index,label,p_=a(),p_ham\n0,ham,0.250000,0.750000\n1,'=a(),0.900000,0.100000\n"
    assert table(make_task("class", ("=a()", "ham")), LOGITS, tmp_path / "x.csv") == wanted
    rows, tokens = Examples([("=a()", "-")], [0.0]), replace(make_tokens([2]), labels=np.asarray([0, 1], np.int32))
    outputs = np.asarray([[[0, 1], [0, 1]]], np.float32)
    found = list(format_predictions(make_task("tags", ("O", "@X")), rows, outputs, tokens))
    assert [cells[1:3] for cells in found[1:]] == [("'=a()", "'@X"), ("-", "'@X")]


def test_texts_stand_beside_what_was_predicted() -> None:
    task = replace(make_task("class", ("ham", "spam")), texts=("question", "label"))
    rows = Examples([("=a", "b"), ("c", "d")], [0.0, 0.0])
    found = list(add_input(rows, task.texts, format_predictions(task, rows, LOGITS, make_tokens([1, 1]))))
    assert [cells[:4] for cells in found] == [
        ("index", "question", "input_label", "label"),
        (0, "'=a", "b", "spam"),
        (1, "c", "d", "ham"),
    ]


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


WANTED = {
    "class": ({"accuracy": 0.95, "f1": 0.9}, {"index", "label", "p_red", "p_not red"}),
    "score": ({"pearson": 0.8, "spearman": 0.8}, {"index", "score"}),
    "labels": ({"f1_micro": 0.6, "f1_macro": 0.6, "accuracy": 0.3}, {"labels", "p_green", "p_red"}),
    "tags": ({"f1": 0.95, "precision": 0.95, "recall": 0.95, "accuracy": 0.95}, {"token", "tag", "p_O"}),
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
    found = read_csv("run/predictions.csv")
    rows = map(json.loads, Path("validation.jsonl").read_text().splitlines())
    assert len(found) == sum(len(row.get("tokens", ["one line"])) for row in rows)
    assert columns <= found[0].keys()


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
    assert [row["tag"] for row in found] == ["O", "O", "B-COL", "B-ANI", "B-ANI", "B-COL", "O", "B-COL"]
    assert all(float(row[f"p_{row['tag']}"]) > 0.5 for row in found)


def test_predictions_replace_earlier_ones_only_when_that_is_asked_for(tmp_path: Path, trained: Path) -> None:
    Path("new.csv").write_text("text\na\n")
    asked = PredictConfig(run=str(trained), file="new.csv", output="x.csv")
    Path("x.csv").write_text("index,label\n0,mine\n")
    with pytest.raises(CpuftError, match=r"x\.csv holds predictions already: add --overwrite to replace them"):
        predict(asked)
    Path("x.csv").unlink()
    os.mkfifo("x.csv")  # to open it would wait for somebody who reads it
    with pytest.raises(CpuftError, match=r"x\.csv is a named pipe, and only a regular file can be written"):
        predict(asked)
    with pytest.raises(CpuftError, match="/dev/null is a device, and only a regular file can be written"):
        predict(replace(asked, output="/dev/null", overwrite=True))


def test_texts_are_written_beside_their_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learn(make_config(tmp_path, "class", max_steps=2), "fp32", tmp_path / "run")
    Path("new.csv").write_text("text\nthe cat\n=red()\n")
    predict(PredictConfig(run="run", file="new.csv", with_input=True))
    found = read_csv("run/predictions.csv")
    assert [(row["index"], row["text"]) for row in found] == [("0", "the cat"), ("1", "'=red()")]
    predict(PredictConfig(run="run", file="new.csv", overwrite=True))
    assert "text" not in read_csv("run/predictions.csv")[0]


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
            "no column of x.csv is named text, sentence or sentence1: name the column",
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
        (
            "x.csv",
            "text\na\n",
            {"text_columns": "txt"},
            "x.csv has no column 'txt' (its columns are",
        ),
        ("x.csv", "text\na\n", {"output": "x.csv"}, "x.csv exists and holds no predictions: give another"),
        ("x.jsonl", '{"text": ["a"]}\n', {}, "x.jsonl, line 1: 'text' must be one text, as in the other lines"),
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
