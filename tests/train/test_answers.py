"""What is written of a model's answers, to the letter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpuft.errors import CpuftError
from cpuft.train.answers import (
    TABLES,
    add_input,
    check_output,
    format_submission,
    guard_formula,
    name_submission,
    write_table,
)
from cpuft.train.data.prepare import UNTAGGED
from cpuft.train.data.tasks import TASKS, Rows, Task
from tests.train.tokens import make_tokens

LOGITS = np.log(np.asarray([[0.25, 0.75], [0.9, 0.1]], np.float32))
AWKWARD = ('a,"b', "no\nmore")


def make_task(kind: str, labels: tuple[str, ...]) -> Task:
    return replace(TASKS["files"], kind=kind, labels=labels)


def table(task: Task, outputs: object, path: Path, rows: int = 2) -> str:
    texts = Rows([("x",)] * rows, [0.0] * rows)
    write_table(path, TABLES[task.kind](task, texts, np.asarray(outputs, np.float32), make_tokens([1] * rows)))
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
    rows = Rows([("New", "\u200e", "a,b"), ("x", "y")], [0.0, 0.0])
    write_table(tmp_path / "x.csv", TABLES["tags"](make_task("tags", ("B-X", "O")), rows, outputs, tokens))
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
    for text in ("index,label,p_a\n", "index\tprediction\n"):
        path.write_text(text)
        check_output(path, overwrite=True)
        with pytest.raises(CpuftError, match=r"x\.csv holds predictions already: add --overwrite to replace them, or"):
            check_output(path)
    path.write_text("")
    check_output(path)
    for text in ("text,label\n", "indexes\n"):
        path.write_text(text)
        with pytest.raises(
            CpuftError, match=r"x\.csv is there already, and holds no predictions: name another --output"
        ):
            check_output(path, overwrite=True)
    with pytest.raises(CpuftError, match="is a folder, and only a regular file can be written: name another file"):
        check_output(tmp_path)


def test_no_text_of_a_table_is_a_formula(tmp_path: Path) -> None:
    """Numbers, lone characters and probabilities stay as they are."""
    texts = ["=1+2", "+cmd|x", "-x", "@SUM(A1)", "\t=1", "-1", "+1.5e3", "-", "--", "a=b", "", "'=1"]
    guarded = ["'=1+2", "'+cmd|x", "'-x", "'@SUM(A1)", "'\t=1", "-1", "+1.5e3", "-", "'--", "a=b", "", "'=1"]
    assert [guard_formula(text) for text in texts] == guarded
    wanted = "index,label,p_=a(),p_ham\n0,ham,0.250000,0.750000\n1,'=a(),0.900000,0.100000\n"
    assert table(make_task("class", ("=a()", "ham")), LOGITS, tmp_path / "x.csv") == wanted
    rows, tokens = Rows([("=a()", "-")], [0.0]), replace(make_tokens([2]), labels=np.asarray([0, 1], np.int32))
    outputs = np.asarray([[[0, 1], [0, 1]]], np.float32)
    found = list(TABLES["tags"](make_task("tags", ("O", "@X")), rows, outputs, tokens))
    assert [cells[1:3] for cells in found[1:]] == [("'=a()", "'@X"), ("-", "'@X")]


def test_texts_stand_beside_what_was_predicted() -> None:
    task = replace(make_task("class", ("ham", "spam")), texts=("question", "label"))
    rows = Rows([("=a", "b"), ("c", "d")], [0.0, 0.0])
    found = list(add_input(rows, task.texts, TABLES["class"](task, rows, LOGITS, make_tokens([1, 1]))))
    assert [cells[:4] for cells in found] == [
        ("index", "question", "input_label", "label"),
        (0, "'=a", "b", "spam"),
        (1, "c", "d", "ham"),
    ]
