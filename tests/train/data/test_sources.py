"""Examples of tasks: GLUE's files, the user's own, the built-in task, and mistakes in them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.tasks import TASKS, Task
from cpuft.train.data.demo import make_pairs
from cpuft.train.data.labels import choose_metrics, parse_label
from cpuft.train.data.sources import (
    Examples,
    list_test_splits,
    parse_glue_tsv,
    read_data,
    read_file_to_predict,
    read_glue_file,
    read_splits,
)
from cpuft.train.data.tables import read_table
from tests.conftest import GLUE, needs_glue

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
GOOD = HEADER + '1\t7\t8\tHe said "yes.\tShe said so.\n0\t7\t8\ta\tb\n'


class Loaded(NamedTuple):
    """A TaskData whose examples are in memory."""

    task: Task
    train: Examples
    validation: dict[str, Examples]


def read_all(config: TrainConfig) -> Loaded:
    data = read_data(config)
    return Loaded(data.task, data.train.load(), {key: found.load() for key, found in data.validation.items()})


CELLS = st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(st.tuples(CELLS, CELLS, st.sampled_from("01")), min_size=1))
def test_every_text_reads_back_quotation_marks_and_all(rows: list[tuple[str, str, str]]) -> None:
    text = HEADER + "".join(f"{label}\t1\t2\t{first}\t{second}\n" for first, second, label in rows)
    found = parse_glue_tsv(text, TASKS["mrpc"], "x")
    assert found.texts == [(first, second) for first, second, _ in rows]
    assert found.labels == [float(label) for _, _, label in rows]


@pytest.mark.parametrize(
    "text, message",
    [
        (HEADER, "x has no rows: give a file with at least one row below its header"),
        ("", "x has no column '#1 String'"),
        ("Quality\t#1 Strin\t#2 String\n", "x has no column '#1 String': did you mean #1 Strin or #2 String?"),
        (GOOD + "1\t7\t8\tonly\n", "x, line 4 has 4 columns, '#2 String' is column 5: correct or remove that line"),
        (GOOD + "2\t7\t8\ta\tb\n", "x, line 4: label '2' is not one of 0, 1: correct that line"),
    ],
)
def test_a_mistake_in_a_glue_file_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(CpuftError) as error:
        parse_glue_tsv(text, TASKS["mrpc"], "x")
    assert str(error.value).startswith(message)


def test_cola_has_no_header_and_stsb_scores() -> None:
    assert parse_glue_tsv("gj04\t1\t\tOne more.\n", TASKS["cola"], "x").texts == [("One more.",)]
    stsb = "index\tsentence1\tsentence2\tscore\n0\ta\tb\t3.25\n"
    assert parse_glue_tsv(stsb, TASKS["stsb"], "x").labels == [3.25]
    with pytest.raises(CpuftError, match=r"x, line 2: score 'high' is not a number"):
        parse_glue_tsv(stsb.replace("3.25", "high"), TASKS["stsb"], "x")


@needs_glue
@pytest.mark.parametrize(
    "name, rows, dev", [("mrpc", 3668, 408), ("sst2", 67349, 872), ("stsb", 5749, 1500), ("wnli", 635, 71)]
)
def test_real_files_have_all_their_rows(name: str, rows: int, dev: int) -> None:
    data = read_all(TrainConfig(task=name, data_dir=str(GLUE)))
    assert (len(data.train.labels), len(data.validation[""].labels)) == (rows, dev)


@needs_glue
def test_test_rows_have_texts_and_no_labels() -> None:
    (rows,) = read_splits(TASKS["mrpc"], TrainConfig(data_dir=str(GLUE)), list_test_splits(TASKS["mrpc"])).values()
    assert (len(rows.texts), len(rows.labels), rows.has_labels) == (1725, 1725, False)
    assert rows.texts[0][0].startswith("PCCW's chief operating officer")
    with pytest.raises(CpuftError, match=r"there is no file .*STS-B/test\.tsv: check --data-dir"):
        read_splits(TASKS["stsb"], TrainConfig(data_dir=str(GLUE)), list_test_splits(TASKS["stsb"]))


def test_every_glue_task_has_test_rows_of_its_own_columns(tmp_path: Path) -> None:
    """Cola's have a header line, unlike its others; no file has labels, and Mnli has two."""
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\tOne more.\n")
    config = TrainConfig(data_dir=str(tmp_path))
    assert read_splits(TASKS["cola"], config, list_test_splits(TASKS["cola"]))[""].texts == [("One more.",)]
    assert list_test_splits(TASKS["mnli"]) == (("", "test_matched"), ("_mismatched", "test_mismatched"))
    assert list_test_splits(TASKS["demo"]) == ()


def test_a_file_in_a_task_s_own_layout_is_read_without_quoting(tmp_path: Path) -> None:
    path = tmp_path / "dev.tsv"
    path.write_text(GOOD)
    rows = read_glue_file(TASKS["mrpc"], path)
    assert rows is not None
    assert (rows.texts, rows.labels) == ([('He said "yes.', "She said so."), ("a", "b")], [1.0, 0.0])
    path.write_text("id\t#1 String\t#2 String\n5\ta\tb\n")
    assert read_glue_file(TASKS["mrpc"], path) == Examples([("a", "b")], [0.0], has_labels=False)
    path.write_text("sentence1\tsentence2\na\tb\n")
    assert read_glue_file(TASKS["mrpc"], path) is None
    assert read_glue_file(TASKS["mrpc"], tmp_path / "dev.csv") is None


def files(folder: Path, train: str, validation: str, ending: str = "csv") -> TrainConfig:
    paths = [folder / f"{name}.{ending}" for name in ("train", "validation")]
    for path, text in zip(paths, (train, validation)):
        path.write_text(text, encoding="utf-8")
    return TrainConfig(task="files", train_file=str(paths[0]), validation_file=str(paths[1]))


def test_the_users_csv(tmp_path: Path) -> None:
    data = read_all(files(tmp_path, 'text,label\n"a, ""b""\nc",spam\nd,ham\n', "text,label\ne,ham\n"))
    assert data.train.texts == [('a, "b"\nc',), ("d",)]
    assert (data.task.labels, data.train.labels, data.validation[""].labels) == (("ham", "spam"), [1.0, 0.0], [0.0])


QUOTED = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
"""Whatever a quoted text may hold: U+2028, U+0085, form feeds, line ends. A null byte means that a file is no text."""

LABELS = st.sampled_from("01")


@pytest.mark.parametrize("dialect, ending", [("excel", "csv"), ("excel-tab", "tsv"), ("unix", "csv")])
@given(rows=st.lists(st.tuples(QUOTED, LABELS), min_size=1))
@example(rows=[("a\u2028b\x85c\x0cd\x1ce\r\nf\rg\n", "1"), ("x" * 200_000, "0"), ("\x0c", "1")])
def test_every_quoted_text_reads_back(rows: list[tuple[str, str]], dialect: str, ending: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"x.{ending}")
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, dialect, quoting=csv.QUOTE_ALL).writerows([("text", "label"), *rows])
        assert [tuple(row.values()) for _, row in read_table(path).rows] == rows


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@given(rows=st.lists(st.tuples(QUOTED, LABELS), min_size=1))
@example(rows=[("a\u2028b\x85c\u2029d", "1")])
def test_every_json_text_reads_back(rows: list[tuple[str, str]], end: str) -> None:
    lines = [json.dumps({"text": text, "label": int(label)}, ensure_ascii=False) + end for text, label in rows]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.jsonl")
        path.write_bytes("".join(lines).encode())
        assert [(where, row["text"], row["label"]) for where, row in read_table(path).rows] == [
            (f"{path}, line {number}", *row) for number, row in enumerate(rows, start=1)
        ]


def test_what_no_csv_file_has_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\na,1\nb\rc,2\n")
    with pytest.raises(CpuftError, match=r"x.csv, line 3"):
        list(read_table(tmp_path / "x.csv").rows)


@pytest.mark.parametrize("label", ["inf", "-inf", "Infinity", "1e999"])
def test_a_label_that_is_no_number_is_named_with_its_line(label: str, tmp_path: Path) -> None:
    config = files(tmp_path, f"text,label\na,0\nb,{label}\n", "text,label\na,0\n")
    with pytest.raises(CpuftError, match=rf"train.csv, line 3: score '{label}' is not a number: correct that line"):
        read_data(config)
    config = files(tmp_path, "text,label\na,0.5\nb,1\n", f"text,label\na,1\nb,{label}\n")
    with pytest.raises(
        CpuftError, match=rf"validation.csv, line 3: score '{label}' is not a number: correct that line"
    ):
        read_data(config)
    with pytest.raises(CpuftError, match=rf"x, line 2: score '{label}' is not a number: correct that line"):
        parse_glue_tsv(f"index\tsentence1\tsentence2\tscore\n0\ta\tb\t{label}\n", TASKS["stsb"], "x")


def test_a_score_that_no_model_can_meet(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=r"train.csv, line 3: score '1e300' is not a number: correct that line"):
        read_data(files(tmp_path, "text,label\na,0.5\nb,1e300\n", "text,label\na,1\n"))


def test_a_word_that_could_be_a_number_is_a_class_among_words(tmp_path: Path) -> None:
    """nan is a language, Min Nan Chinese."""
    data = read_all(files(tmp_path, "text,label\na,nan\nb,deu\n", "text,label\na,nan\n"))
    assert data.task.labels == ("deu", "nan")


def test_the_users_json_lines(tmp_path: Path) -> None:
    row = '{"sentence1": "a", "sentence2": "b", "label": 0.5}\n'
    data = read_all(files(tmp_path, row, row, "jsonl"))
    assert (data.train.texts, data.task.kind, data.task.metrics) == ([("a", "b")], "score", ("pearson", "spearman"))


@pytest.mark.parametrize(
    "train, message",
    [
        ("text,label\n", "train.csv has no rows"),
        (
            "text\na\n",
            "train.csv has no column 'label' (its columns are 'text'): give the name of the column of the labels "
            "with --label-column",
        ),
        (
            "body,label\na,1\n",
            "train.csv is named text, sentence or sentence1 (it has body): name the column of the texts, or two "
            "columns for pairs, with --text-columns",
        ),
        ("label\na\n", "train.csv has no column but 'label': give a file that also has a column of texts"),
        ("text,label\na,1\nb\n", "train.csv, line 3 has 1 column, but the header has 2: correct that line"),
        (
            "text,label\na, b,1\n",
            "line 2 has 3 columns, but the header has 2: put a text that contains a comma in quotation marks",
        ),
        ("text,label\na,1\nb,\n", "train.csv, line 3 has no 'label': correct or remove that line"),
        ("text,label\na,1\nb,1\n", "train.csv have the label '1': give rows with at least two different labels"),
        ("text,label\na,0\nb,2\n", "validation.csv, line 2: no row of "),
        ("", "train.csv is empty: give a file with rows"),
    ],
)
def test_what_is_wrong_with_the_users_files(train: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CpuftError) as error:
        read_data(files(tmp_path, train, "text,label\na,1\n"))
    assert message in str(error.value)


UNLABELLED = "correct or remove that line, or leave out rows with --skip-unlabelled"


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "a"}', f"train.jsonl, line 2 has no 'label': {UNLABELLED}"),
        ('{"label": 1}', "train.jsonl, line 2 has no 'text': correct or remove that line"),
        ('{"text": "a", "label": null}', f"train.jsonl, line 2 has no 'label': {UNLABELLED}"),
        ('{"text": [["a"]], "label": 1}', "train.jsonl, line 2 has no 'text': correct or remove that line"),
        ('{"text": ["a"], "label": 1}', "line 2: 'text' must be one text, as in the other lines: correct that line"),
        ('{"text": "a", "label": {"b": 1}}', f"train.jsonl, line 2 has no 'label': {UNLABELLED}"),
    ],
)
def test_gaps_in_json_lines(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CpuftError) as error:
        read_data(files(tmp_path, '{"text": "a", "label": 0}\n' + line, '{"text": "a", "label": 0}', "jsonl"))
    assert str(error.value).endswith(message)


@pytest.mark.parametrize("line", ["[" * 100_000, "5", '{"a": ' + "9" * 5000 + "}", '{"text": "\\ud800"}', "{} {}"])
def test_lines_that_are_no_json_rows(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a", "label": 1, "others": [[1]]}\n' + line + "\n")
    with pytest.raises(CpuftError, match=r"x\.jsonl, line 2 is not a JSON object \([^\n]+\): write one object a line"):
        list(read_table(tmp_path / "x.jsonl").rows)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match="--task files needs --train-file"):
        read_data(TrainConfig(task="files"))
    with pytest.raises(CpuftError, match="there is no file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(CpuftError, match="none does not exist: give the folder"):
        read_data(TrainConfig(task="mrpc", data_dir=str(tmp_path / "none")))
    with pytest.raises(CpuftError, match=r"there is no file .*MRPC/train\.tsv"):
        read_data(TrainConfig(task="mrpc", data_dir=str(tmp_path)))
    (tmp_path / "bad.jsonl").write_text('{"text": "a", "label": 1}\nnot json\n')
    with pytest.raises(CpuftError, match=r"bad\.jsonl, line 2 is not a JSON object"):
        list(read_table(tmp_path / "bad.jsonl").rows)


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda **_: (_ for _ in ()).throw(ConnectionError("offline")))
    answers = {
        "": r"the data of --task rte could not be loaded from the Hugging Face hub \(offline\): give",
        "the hub is away": "the data of --task rte is not in the cache of data sets, and the hub is away: check the",
    }
    for problem, message in answers.items():
        monkeypatch.setattr("cpuft.train.data.tables.find_hub_problem", lambda problem=problem: problem)
        with pytest.raises(CpuftError, match=message):
            read_data(TrainConfig(task="rte"))


def test_rows_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is an endpoint that cannot be had here: a table of its form stands in."""
    table = {"premise": ["a"], "hypothesis": ["b"], "label": [2]}
    names = ("train", "validation_matched", "validation_mismatched")
    monkeypatch.setattr("datasets.load_dataset", lambda path, name: dict.fromkeys(names, table))
    monkeypatch.setattr("cpuft.train.data.tables.find_hub_problem", lambda: "")
    data = read_all(TrainConfig(task="mnli"))
    assert data.train.texts == [("a", "b")]
    assert data.train.labels == [2.0]
    assert list(data.validation) == ["", "_mismatched"]


@pytest.mark.parametrize(
    "name, content, problem",
    [
        (
            "x.jsonl.gz",
            b"\x1f\x8b\x08",
            "x.jsonl.gz is cut off or damaged: copy or download it again, or check --train-file",
        ),
        (
            "x.xlsx",
            b"PK\x03\x04\x14",
            "x.xlsx is a spreadsheet, which cpuft does not read: save it as CSV in UTF-8 with commas between the "
            "columns, then give the CSV file instead",
        ),
        (
            "x.bin",
            b"\x00\x01\xff",
            "x.bin is a binary file, which cpuft does not read: give CSV, TSV or JSON lines in UTF-8",
        ),
        (
            "x.csv",
            b"\xef\xbb\xbftext,label\na,b\ncaf\xe9,b\n",
            "x.csv, line 3 is not UTF-8 text (byte 0xe9): correct that line; or, if the file comes from Windows or "
            "Excel, give --encoding windows-1252",
        ),
        (
            "x.json",
            b'[{"text": "a", "label": "b"}]',
            "x.json is a JSON array, and cpuft reads JSON lines, one object a line: convert it with this command, then "
            'give x-lines.jsonl instead: python -c "import '
            "json; [print(json.dumps(row)) for row in json.load(open('x.json'))]\" > x-lines.jsonl",
        ),
        (
            "x.csv",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n",
            "x.csv is a pointer of Git LFS, not the file itself: fetch the file with this command in its repository: "
            "git lfs pull --include x.csv",
        ),
        (
            "x.parquet",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n",
            "x.parquet is a pointer of Git LFS, not the file itself: fetch the file with this command in its "
            "repository: git lfs pull --include x.parquet",
        ),
        ("x.csv", b"<!DOCTYPE html>\n", "x.csv is a web page, which cpuft does not read: download the file itself"),
        (
            "x.csv",
            b"PK\x03\x04\x14",
            "x.csv is a spreadsheet or another zip archive, which cpuft does not read: unpack it, then give the file "
            "that it holds, or save it as CSV in UTF-8 with commas between the columns, then give the CSV file instead",
        ),
        (
            "x.csv",
            "text,label\n".encode("utf-16-le"),
            "x.csv, line 1 has a null byte, so that it is not text: give other files, or name the file's encoding with "
            "--encoding",
        ),
    ],
)
def test_files_of_other_formats_are_answered_with_what_to_do(name: str, content: bytes, problem: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(CpuftError) as error:
        read_table(Path(name))
    assert str(error.value) == problem


def write_rows(folder: Path, header: str, rows: Iterable[str]) -> TrainConfig:
    """Write a file of rows without validation rows."""
    (folder / "x.csv").write_text("\n".join([header, *rows, ""]))
    return TrainConfig(task="files", train_file=str(folder / "x.csv"))


def test_columns_of_one_name_are_told_apart_and_refused_only_where_they_are_used(tmp_path: Path) -> None:
    config = write_rows(tmp_path, "text,label,id,id", (f"a{one},{one % 2},x,y" for one in range(9)))
    assert read_data(config).task.labels == ("0", "1")
    config = write_rows(tmp_path, "text,label,text", (f"a{one},{one % 2},b{one % 3}" for one in range(9)))
    with pytest.raises(CpuftError, match=r"it has text \(column 1\), text \(column 3\)"):
        read_data(config)
    named = read_data(replace(config, text_columns="text (column 3)"))
    assert set(named.train.list_texts()) <= {"b0", "b1", "b2"}


@pytest.mark.parametrize("label", ["nan", "NA", "None"])
@pytest.mark.parametrize("others", [("0", "1"), ("0.5", "1")])
def test_a_missing_label_among_numbers_is_no_class_and_no_fraction(
    label: str, others: tuple[str, str], tmp_path: Path
) -> None:
    config = write_rows(tmp_path, "text,label", [*(f"a{one},{others[one % 2]}" for one in range(40)), f"b,{label}"])
    with pytest.raises(
        CpuftError, match=rf"x.csv, line 42 has the label '{label}'.*: correct that line, or add --skip-unlabelled"
    ):
        read_data(config)
    data = read_data(replace(config, skip_unlabelled=True))
    assert len(data.train) + len(data.validation[""]) == 40
    assert label in read_data(replace(config, label_type="class")).task.labels


@pytest.mark.parametrize("labels", [("[NEG]", "[POS]"), ("(1)", "(2)"), ("[non-toxic]", "[toxic]")])
def test_names_in_brackets_are_labels(labels: tuple[str, str], tmp_path: Path) -> None:
    config = write_rows(tmp_path, "text,label", (f"a{one},{labels[one % 2]}" for one in range(20)))
    assert read_data(config).task.labels == labels


@pytest.mark.parametrize("vectors", [([0, 1, 0], [1, 0, 0]), ([1.0, 0.0], [0.0, 1.0]), ([True, False], [False, True])])
def test_vectors_in_place_of_lists_of_labels_are_refused(vectors: tuple[list[float], ...], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"a{one}", "label": vectors[one % 2]}) + "\n" for one in range(20)))
    with pytest.raises(CpuftError, match=r"x.jsonl, line \d+: 'label' has a number for each label, as all lists of"):
        read_data(TrainConfig(task="files", train_file=str(path)))
    path.write_text(path.read_text() + '{"text": "b", "label": [0]}\n')
    assert read_data(TrainConfig(task="files", train_file=str(path))).task.kind == "labels"


def test_a_damaged_file_of_gzip_with_the_name_of_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff")
    with pytest.raises(CpuftError, match=r"x.parquet is cut off or damaged"):
        read_table(tmp_path / "x.parquet")


def test_one_row_with_a_nested_list_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "Ann barks", "entities": [{"start": 0}]}\n')
    assert read_table(path).columns == ["text"]
    path.write_text('["Ann barks", "pos"]\n["Bob", "neg"]\n')
    with pytest.raises(CpuftError, match=r"x.jsonl has a list in a line: write one object a line"):
        read_table(path)


RECORDS = [{"text": "a, b; c", "label": "d"}, {"text": "\u00e9", "label": "e"}]
FRAME = pandas.DataFrame(RECORDS)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_answered_with_the_command_that_makes_lines_of_it(indent: int | None) -> None:
    Path("x.json").write_text(json.dumps(RECORDS, indent=indent))
    with pytest.raises(CpuftError, match="a JSON array") as error:
        read_table(Path("x.json"))
    run_conversion(str(error.value))
    assert [(row["text"], row["label"]) for _, row in read_table(Path("x-lines.jsonl")).rows] == [
        (row["text"], row["label"]) for row in RECORDS
    ]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"data": RECORDS}),
        json.dumps({"version": "1", "rows": RECORDS}, indent=1),
        json.dumps(RECORDS[0], indent=1),
        FRAME.to_json(),
        json.dumps(FRAME.to_dict("list")),
        FRAME.to_json(orient="index"),
        FRAME.to_json(orient="split"),
    ],
)
def test_a_json_object_with_all_rows_is_refused(text: str) -> None:
    Path("x.json").write_text(text)
    with pytest.raises(CpuftError, match=r"x.json is one JSON object, and cpuft reads JSON lines, one object a line"):
        read_table(Path("x.json"))


def run_conversion(message: str) -> None:
    """Run the command at the end of an error message."""
    command = message.partition(" instead: ")[2].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(["sh", "-c", command], check=True, timeout=60)


@pytest.mark.parametrize("name", ["x.txt", "x.csv"])
def test_json_is_known_by_its_first_line(name: str) -> None:
    Path(name).write_text(lines(*RECORDS))
    assert [row for _, row in read_table(Path(name)).rows] == RECORDS
    for text in (json.dumps(RECORDS), json.dumps({"data": RECORDS}, indent=1)):
        Path(name).write_text(text)
        with pytest.raises(CpuftError, match="and cpuft reads JSON lines, one object a line"):
            read_table(Path(name))


def test_a_file_of_windows_is_read_with_its_encoding() -> None:
    Path("x.csv").write_bytes("text,label\n\u20ac,e\n".encode("cp1252"))
    table = read_table(Path("x.csv"), options=TrainConfig(encoding="windows-1252"))
    assert [row["text"] for _, row in table.rows] == ["\u20ac"]
    Path("x.csv").write_bytes("text\tlabel\n\u20ac\te\n".encode("utf-16"))
    assert [row["text"] for _, row in read_table(Path("x.csv")).rows] == ["\u20ac"]
    with pytest.raises(CpuftError, match="--encoding 'utf-9' is unknown: give for example windows-1252"):
        read_table(Path("x.csv"), options=TrainConfig(encoding="utf-9"))


@pytest.mark.parametrize("cell", ["['a', 'b']", '["a", "b, c"]', "['a' 'b']", "[0 1]", "array([0, 1])", "{'a', 'b'}"])
def test_a_list_that_was_printed_is_no_class(cell: str) -> None:
    FRAME.iloc[[0]].assign(label=cell).to_csv("x.csv", index=False)
    config = TrainConfig(task="files", train_file="x.csv", validation_file="x.csv")
    for label_type in ("auto", "multi"):
        with pytest.raises(
            CpuftError, match=r"x.csv, line 2: 'label' is a list that was printed as text .*: write the"
        ):
            read_data(replace(config, label_type=label_type))
    with pytest.raises(CpuftError, match=r"all rows of x\.csv have the label"):
        read_data(replace(config, label_type="class"))


def test_a_key_or_a_column_that_is_there_twice_is_named() -> None:
    Path("x.jsonl").write_text('{"text": "a", "label": 1, "text": "b"}\n')
    with pytest.raises(CpuftError, match=r"line 1 is not a JSON object \(the key 'text' is there twice\)"):
        read_table(Path("x.jsonl"))


def table(labels: Sequence[object], texts: str = "text {}") -> str:
    return "text,label\n" + "".join(f'{texts.format(number)},"{label}"\n' for number, label in enumerate(labels))


@pytest.mark.parametrize(
    "train, validation, labels",
    [
        ([0, 1], ["0.0", "1.0"], ("0", "1")),
        ([0, 1, "1.0"], [0], ("0", "1")),
        (["True", "False"], [1, 0], ("False", "True")),
        ([0, 1], ["true", "FALSE"], ("0", "1")),
        (["-1", "1", "-1.0"], ["1.0"], ("-1", "1")),
        (["True", "False", "1"], ["2"], ()),
        (["spam", "ham "], ["ham", "spam "], ("ham", "spam")),
    ],
)
def test_labels_of_the_same_value_are_one_class(
    train: list[object], validation: list[object], labels: tuple[str, ...], tmp_path: Path
) -> None:
    config = files(tmp_path, table(train), table(validation))
    if not labels:
        with pytest.raises(CpuftError, match="has the label '2'"):
            read_data(config)
        return
    data = read_all(config)
    assert data.task.labels == labels
    assert set(data.train.labels) == {0.0, 1.0}
    assert {float(labels.index(str(one).strip())) for one in train if str(one).strip() in labels} == {0.0, 1.0}


@pytest.mark.parametrize(
    "labels, problem, answers",
    [
        (
            [*[0, 1] * 20, "0|1"],
            "a label with a bar, such as a|b, means several labels, and only 1 of 41 labels has one, first in ",
            {"multi": "labels", "class": "class"},
        ),
        (
            [*[0, 1] * 20, 0.5],
            "a label with a fraction means that numbers are learned by regression, and only 2 of 82 labels have one, "
            "first in ",
            {"number": "score", "class": "class"},
        ),
        (
            ["0,5", "1,5", "2"],
            "line 2: the label '0,5' is a number with a comma",
            {"number": "score", "class": "class"},
        ),
        (
            ["Spam", "ham", "spam"],
            "line 4 has the label 'spam', and ",
            {"class": "class", "multi": "labels"},
        ),
    ],
)
def test_a_convention_that_is_in_doubt_is_refused_until_the_label_type_is_given(
    labels: list[object], problem: str, answers: dict[str, str], tmp_path: Path
) -> None:
    config = files(tmp_path, table(labels), table(labels))
    with pytest.raises(CpuftError) as error:
        read_data(config)
    assert problem in str(error.value)
    for label_type, kind in answers.items():
        assert f"--label-type {label_type}" in str(error.value) or f"(or {label_type})" in str(error.value)
        assert read_data(replace(config, label_type=label_type)).task.kind == kind


def test_a_decimal_comma_is_read_in_numbers_and_thousands_are_not(tmp_path: Path) -> None:
    config = replace(files(tmp_path, table(["0,5", "-1,25", "2"]), table(["0,125"])), label_type="number")
    data = read_all(config)
    assert (data.train.labels, data.validation[""].labels) == ([0.5, -1.25, 2.0], [0.125])
    with pytest.raises(CpuftError, match="score '1,250' is not a number"):
        read_data(replace(files(tmp_path, table(["1,250"]), table([1])), label_type="number"))


def test_the_row_that_decided_on_the_kind_is_told(tmp_path: Path) -> None:
    data = read_data(files(tmp_path, table(["a|b", "a"]), table(["b"])))
    assert data.notes == (
        f"an example may have several labels, because the label in {tmp_path}/train.csv, line 2 has a bar",
    )


def test_rows_without_a_label_are_all_counted_and_may_be_left_out(tmp_path: Path) -> None:
    config = files(tmp_path, table(["", 1, "", 0, " "]), table([1, ""]))
    with pytest.raises(CpuftError) as error:
        read_data(config)
    assert str(error.value).endswith(
        "train.csv, line 2 has no 'label': correct or remove that line, or leave out rows with --skip-unlabelled"
    )
    data = read_all(replace(config, skip_unlabelled=True))
    assert (data.train.texts, data.train.labels) == ([("text 1",), ("text 3",)], [1.0, 0.0])
    assert len(data.validation[""]) == 1
    run = replace(config, skip_unlabelled=True)
    _, examples = read_file_to_predict(data.task, PredictConfig(split="validation"), run)
    assert examples == data.validation[""]
    for labels, known in ((("0", "1"), False), (("1", "NA"), True)):
        (tmp_path / "asked.csv").write_text(table([1, "NA"]))
        task, asked = replace(data.task, labels=labels), PredictConfig(file=str(tmp_path / "asked.csv"))
        assert read_file_to_predict(task, asked, run)[1].has_labels == known
    notes = read_data(replace(config, skip_unlabelled=True)).notes
    assert [note.rpartition("/")[2] for note in notes] == [
        "train.csv without a label left out",
        "validation.csv without a label left out",
    ]
    assert notes[0].startswith("3 rows of ")


def test_labels_that_programs_write_for_none_may_be_left_out(tmp_path: Path) -> None:
    cells = table([1, "nan", 0, "None", "NA", "<NA>", "NULL", 1])
    data = read_all(replace(files(tmp_path, cells, cells), skip_unlabelled=True))
    assert (data.task.labels, data.train.labels) == (("0", "1"), [1.0, 0.0, 1.0])


def test_a_missing_header_is_suspected(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match="if its first line is a row, write a header such as text,label above it"):
        read_data(files(tmp_path, "good,1\nbad,0\n", "good,1\n"))


@pytest.mark.parametrize(
    "columns, problem",
    [
        ("label", "the column 'label' cannot be text and label"),
        ("text,label,text", "--text-columns 'text,label,text' names 3 columns: name one column or two"),
    ],
)
def test_text_columns_that_cannot_be_meant(columns: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=problem):
        read_data(replace(files(tmp_path, table([0, 1]), table([0])), text_columns=columns))


def test_of_many_labels_a_few_are_listed(tmp_path: Path) -> None:
    task = replace(TASKS["files"], labels=tuple(map(str, range(250))))
    with pytest.raises(CpuftError) as error:
        parse_label("word", task, "x.csv, line 3")
    assert str(error.value).endswith("17, 18, 19 and 230 others: correct that line")


@pytest.mark.parametrize(
    "found, problem",
    [
        (
            (),
            "x is a folder: give a file of rows, or all files in it, for example --train-file 'x/*.csv'",
        ),
        (
            ("dataset_dict.json", "train/state.json", "test/state.json"),
            "x holds several splits: give one of them, for example --train-file x/train",
        ),
    ],
)
def test_a_folder_is_no_file_of_rows(found: tuple[str, ...], problem: str) -> None:
    Path("x").mkdir()
    for name in found:
        Path("x", name).parent.mkdir(exist_ok=True)
        Path("x", name).touch()
    with pytest.raises(CpuftError) as error:
        read_table(Path("x"))
    assert str(error.value) == problem


def test_a_first_json_line_without_the_label_is_named(tmp_path: Path) -> None:
    """It was said that the column does not exist, though every other line has it."""
    rows = '{"text": "a"}\n{"text": "b", "label": "c"}\n{"text": "b", "label": "d"}\n'
    with pytest.raises(CpuftError, match=r"train\.jsonl, line 1 has no 'label': correct or remove that line"):
        read_data(files(tmp_path, rows, rows, "jsonl"))
    with pytest.raises(CpuftError, match=r"train\.jsonl, line 1 has no 'text': correct or remove that line"):
        read_data(files(tmp_path, rows.replace('"text": "a"', '"label": "c"'), rows, "jsonl"))


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda word: word.strip())
TAGS = ("B-LOC", "I-LOC", "O")
SENTENCES = st.lists(st.tuples(WORDS, st.sampled_from(TAGS)), min_size=1)
EVERY_TAG = [("x", tag) for tag in TAGS]
TAGGED = '{"tokens": ["Bath", "is", "old"], "tags": ["B-LOC", "O", "O"]}\n'


def read(train: str, validation: str, ending: str = "jsonl") -> Loaded:
    with tempfile.TemporaryDirectory() as folder:
        return read_all(files(Path(folder), train, validation, ending))


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def tag_lines(sentences: Sequence[Sequence[tuple[str, str]]]) -> str:
    return lines(*({"tokens": [w for w, _ in row], "tags": [t for _, t in row]} for row in sentences))


@given(st.lists(SENTENCES, min_size=1))
def test_every_word_reads_back_with_its_tag(sentences: list[list[tuple[str, str]]]) -> None:
    data = read(tag_lines([EVERY_TAG]), tag_lines(sentences))
    rows = data.validation[""]
    assert (data.task.kind, data.task.labels, data.task.texts, data.task.label) == ("tags", TAGS, ("tokens",), "tags")
    assert [
        [(word, data.task.labels[number]) for word, number in zip(*row)] for row in zip(rows.texts, rows.labels)
    ] == sentences


CLASS_NAMES = ("a", "b c", "d")
SEVERAL = st.lists(st.lists(st.sampled_from(CLASS_NAMES), unique=True), min_size=1)


@given(SEVERAL)
def test_several_labels_read_back_from_lists_and_from_cells(rows: list[list[str]]) -> None:
    wanted = [tuple(map(CLASS_NAMES.index, row)) for row in rows]
    found = read(
        lines({"text": "x", "label": list(CLASS_NAMES)}), lines(*({"text": "", "label": labels} for labels in rows))
    )
    cells = [" | ".join(labels) for labels in rows]
    table = read(
        f"text,label\nx,{'|'.join(CLASS_NAMES)}\n", "text,label\n" + "".join(f"x,{cell}\n" for cell in cells), "csv"
    )
    for data in (found, table):
        assert (data.task.kind, data.task.labels) == ("labels", CLASS_NAMES)
        assert data.validation[""].labels == wanted


@pytest.mark.parametrize(
    "kind, labels, metrics",
    [
        ("tags", ("B-X", "E-X", "I-X", "O", "S-X"), ("f1", "precision", "recall", "accuracy")),
        ("tags", ("ADJ", "NOUN"), ("accuracy",)),
        ("labels", ("a", "b"), ("f1_micro", "f1_macro", "accuracy")),
        ("class", ("a", "b"), ("accuracy", "f1")),
        ("class", ("a", "b", "c"), ("accuracy",)),
    ],
)
def test_metrics_depend_on_the_kind_and_the_labels(
    kind: str, labels: tuple[str, ...], metrics: tuple[str, ...]
) -> None:
    assert choose_metrics(kind, labels) == metrics


def test_words_and_tags_by_other_names(tmp_path: Path) -> None:
    row = lines({"words": ["a", "b"], "ner": [0, 1]})
    config = replace(files(tmp_path, row, row, "jsonl"), text_columns="words", label_column="ner")
    data = read_all(config)
    assert (data.task.kind, data.task.labels, data.train.labels) == ("tags", ("0", "1"), [(0, 1)])


@pytest.mark.parametrize(
    "row, message",
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "line 2 has 2 tokens and 1 tag: correct that line"),
        ({"tokens": ["a"], "tags": ["O", "O"]}, "line 2 has 1 token and 2 tags: correct that line"),
        ({"tokens": ["a", "b"], "tags": ["O", " "]}, "line 2 has 2 tokens and 1 tag: correct that line"),
        ({"tokens": [], "tags": []}, "line 2 has no 'tokens': correct or remove that line"),
        ({"tokens": [" "], "tags": ["O"]}, "line 2 has no 'tokens': correct or remove that line"),
        ({"tokens": [["a"]], "tags": ["O"]}, "line 2 has no 'tokens': correct or remove that line"),
        ({"tokens": ["a"]}, "line 2 has no 'tags': correct or remove that line"),
        ({"tokens": ["a"], "tags": ["O", None]}, "line 2 has no 'tags': correct or remove that line"),
        ({"tokens": "a b", "tags": ["O", "O"]}, "line 2: 'tokens' must be a list, as in the other lines: correct that"),
        ({"tokens": ["a"], "tags": "O"}, "line 2: 'tags' must be a list, as in the other lines: correct that line"),
    ],
)
def test_words_and_tags_that_do_not_fit(row: dict[str, Any], message: str) -> None:
    for train, validation in ((TAGGED + lines(row), TAGGED), (TAGGED, TAGGED + lines(row))):
        with pytest.raises(CpuftError) as error:
            read(train, validation)
        assert message in str(error.value)


@pytest.mark.parametrize(
    "train, validation, message",
    [
        (TAGGED, TAGGED.replace("B-", "I-"), "jsonl, line 1: no row of "),
        (TAGGED.replace("B-LOC", "O"), TAGGED, "have the label 'O': give rows with at least two different labels"),
        (lines({"text": "a", "label": []}), TAGGED, "validation.jsonl has no column 'text'"),
        (lines({"text": "a", "label": []}), lines({"text": "a", "label": []}), "train.jsonl has no labels: give rows"),
        (lines({"text": "a", "label": ["x"]}), lines({"text": "a", "label": ["x"]}), "have the label 'x': give rows"),
        (
            lines({"text": "a", "label": ["x", "y"]}, {"text": "b", "label": "x"}),
            lines({"text": "a", "label": ["x"]}),
            "train.jsonl, line 2: 'label' must be a list, as in the other lines: correct that line",
        ),
        (
            lines({"text": "a", "label": ["x", "y"]}),
            lines({"text": "a", "label": ["x", "z"]}),
            "has the label 'z': correct that line, or train on such rows",
        ),
        (
            lines({"text": "a", "label": "x"}, {"text": "b", "label": "y"}),
            lines({"text": "a", "label": "x"}, {"text": "b", "label": ["y"]}),
            "validation.jsonl, line 2: 'label' must be one text, as in the other lines: correct that line",
        ),
    ],
)
def test_labels_that_are_all_the_same_or_unknown_are_refused(train: str, validation: str, message: str) -> None:
    with pytest.raises(CpuftError) as error:
        read(train, validation)
    assert message in str(error.value)


def test_words_need_exactly_one_column(tmp_path: Path) -> None:
    row = lines(*[{"a": ["x"], "b": ["y"], "tags": ["O"]}] * 2)
    config = replace(files(tmp_path, row, row, "jsonl"), text_columns="a,b", label_column="tags")
    with pytest.raises(
        CpuftError, match="has lists of words, which need exactly one column: give it by --text-columns"
    ):
        read_data(config)


RATINGS = "text,label\n" + "".join(f"x,{number}\n" for number in (1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    "wanted, cells, kind, labels",
    [
        ("auto", RATINGS, "class", ("1", "2", "3", "4", "5")),
        ("number", RATINGS, "score", ()),
        ("class", "text,label\nx,0.5\nx,1.5\n", "class", ("0.5", "1.5")),
        ("auto", "text,label\nx,0.5\nx,1.5\n", "score", ()),
        ("class", "text,label\nx,a|b\nx,c\n", "class", ("a|b", "c")),
        ("multi", "text,label\nx,a\nx,b\n", "labels", ("a", "b")),
    ],
)
def test_the_label_type_may_be_chosen(
    wanted: str, cells: str, kind: str, labels: tuple[str, ...], tmp_path: Path
) -> None:
    data = read_all(replace(files(tmp_path, cells, cells), label_type=wanted))
    assert (data.task.kind, data.task.labels) == (kind, labels)


@pytest.mark.parametrize(
    "wanted, train, ending, problem",
    [
        ("number", "text,label\nx,good\nx,bad\n", "csv", r"line 2: score 'good' is not a number"),
        ("number", TAGGED, "jsonl", r"has lists of words in 'tokens', .*: leave --label-type number out"),
        ("class", lines({"text": "x", "label": ["a", "b"]}), "jsonl", r"line 1: 'label' must be one text"),
    ],
)
def test_labels_that_are_not_of_the_chosen_type(
    wanted: str, train: str, ending: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(CpuftError, match=problem):
        read_data(replace(files(tmp_path, train, train, ending), label_type=wanted))


def test_the_same_seed_gives_the_same_pairs() -> None:
    assert make_pairs(50, 1) == make_pairs(50, 1)
    assert make_pairs(50, 1) != make_pairs(50, 2)


def test_both_labels_are_even_and_lengths_do_not_tell() -> None:
    pairs = make_pairs(4000, 3)
    counts = Counter(label for _, _, label in pairs)
    assert 0.47 < counts[1] / 4000 < 0.53
    lengths = {label: [len(a) + len(b) for a, b, same in pairs if same == label] for label in (0, 1)}
    means = [sum(values) / len(values) for values in lengths.values()]
    assert abs(means[0] - means[1]) < 2


def test_shared_words_alone_are_not_enough() -> None:
    """The best threshold on the share of common lowercase_words gets less than nine in ten right."""
    pairs = make_pairs(2000, 4)
    shares = [
        (len(lowercase_words(a) & lowercase_words(b)) / len(lowercase_words(a) | lowercase_words(b)), same)
        for a, b, same in pairs
    ]
    best = max(sum((share > cut / 50) == bool(same) for share, same in shares) for cut in range(50)) / len(pairs)
    assert best < 0.9


def lowercase_words(text: str) -> set[str]:
    return set(text.lower().rstrip(".").replace(",", "").split())


def test_a_file_that_lost_rows_since_it_was_checked_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    lines = ["text,label", *(f"line {number},{'yes' if number % 2 else 'no'}" for number in range(40))]
    file.write_text("\n".join(lines))
    data = read_data(TrainConfig(task="files", train_file=str(file)))
    file.write_text("\n".join(lines[:11]))
    with pytest.raises(CpuftError, match=r"rows\.csv had 36 rows, and has \d+ now: start again"):
        data.train.load()
