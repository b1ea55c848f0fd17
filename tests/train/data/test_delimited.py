"""CSV files and their relatives: delimiters, and quotation marks that are a part of the texts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.sources import read_data
from cpuft.train.data.tables import Table, read_table
from tests.conftest import GLUE, needs_glue


def rows(count: int, delimiter: str) -> str:
    return "".join(f"text {number}{delimiter}{number % 2}\n" for number in range(count))


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.write_text(text, newline="")
    return path


def list_texts(table: Table) -> list[object]:
    return [row["text"] for _, row in table.rows]


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.txt"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found_in_the_header(name: str, delimiter: str) -> None:
    found = read_table(write(name, f"text{delimiter}label\na{delimiter}1\n"))
    assert [row for _, row in found.rows] == [{"text": "a", "label": "1"}]


def test_the_delimiter_may_be_named() -> None:
    path = write("x.csv", "a,b;c\n1,2;3\n")
    assert read_table(path).columns == ["a", "b;c"]
    assert read_table(path, options=TrainConfig(delimiter="semicolon")).columns == ["a,b", "c"]


@pytest.mark.parametrize("delimiter, name", [(",", "x.csv"), ("\t", "x.tsv")])
@pytest.mark.parametrize("line", ['"Yes," he said{}1', '"Yes, he said{}1', '"{}1'])
def test_a_file_that_can_only_be_read_without_quoting_is_read_so(delimiter: str, name: str, line: str) -> None:
    """A reader that honours quotation marks takes the rest of the file, or loses them."""
    line = line.format(delimiter).replace("Yes,", "Yes") if delimiter == "," else line.format(delimiter)
    found = read_table(write(name, f"text{delimiter}label\n{rows(5, delimiter)}{line}\n{rows(4, delimiter)}"))
    assert len(list_texts(found)) == 10
    assert list_texts(found)[5] == line.partition(delimiter)[0]
    assert found.notes == (f"{name} read without quoting, because of the quotation mark in line 7",)


@pytest.mark.parametrize("delimiter, name", [(",", "x.csv"), ("\t", "x.tsv"), (";", "x.csv")])
@pytest.mark.parametrize("swallowed", [0, 3, 40])
def test_a_quotation_mark_that_swallows_rows_is_named(delimiter: str, name: str, swallowed: int) -> None:
    text = f"text{delimiter}label\n{rows(5, delimiter)}"
    text += f'"I agree.{delimiter}1\n{rows(swallowed, delimiter)}So do I."{delimiter}0\n{rows(44, delimiter)}'
    path = write(name, text)
    with pytest.raises(CpuftError) as error:
        read_table(path)
    assert str(error.value) == (
        f"{name}, line 7: a quotation mark opens a cell of {swallowed + 2} lines, and each of these lines has as many "
        f"columns as the header: give --quoting none if quotation marks are a part of the texts, or --quoting csv if "
        f"they surround cells with line breaks"
    )
    assert len(list_texts(read_table(path, options=TrainConfig(quoting="none")))) == 51 + swallowed
    quoted = list(read_table(path, options=TrainConfig(quoting="csv")).rows)
    assert len(quoted) == 50
    assert quoted[5][0] == f"{name}, line {8 + swallowed} (a quotation mark in line 7 opens it)"


def test_many_swallowed_rows_are_noticed_among_cells_with_line_breaks() -> None:
    swallowing = '"I agree,1\n' + rows(20, ",") + 'So do I.",0\n'
    path = write("x.csv", f'text,label\n"One\ntwo, three.",1\n{swallowing}')
    with pytest.raises(CpuftError, match="line 4: a quotation mark opens a cell of 22 lines"):
        read_table(path)


@pytest.mark.parametrize(
    "text",
    ['"Hello, you\nthere",1\n', '"One\n\n\ntwo",1\n', '"a ""b"" c",1\n', '"' + "line\n" * 50 + '",1\n', '"a, b",1\n'],
)
def test_quoted_cells_are_read_as_before(text: str) -> None:
    found = read_table(write("x.csv", f"text,label\nplain,0\n{text}"))
    ((_, row),) = list(found.rows)[1:]
    assert row == {"text": text[1:-4].replace('""', '"'), "label": "1"}
    assert not found.notes


def test_quotation_marks_that_surround_most_cells_are_not_taken_for_texts() -> None:
    path = write("x.csv", '"text","label"\n"a","1"\n"b,"0"\n"c","0"\n')
    with pytest.raises(CpuftError, match=r"x\.csv, line 3: a quotation mark opens a cell there"):
        read_table(path)


@pytest.mark.parametrize(
    "name, delimiter, other",
    [("x.tsv", "\t", "notes, remarks, doubts"), ("x.csv", ",", "a;b;c;d"), ("x.csv", ";", "one, two, three")],
)
def test_delimiters_within_names_of_columns_do_not_divide(name: str, delimiter: str, other: str) -> None:
    columns = ["text", "label", other]
    table = read_table(write(name, f"{delimiter.join(columns)}\n{delimiter.join(('a', '1', 'b'))}\n"))
    assert table.columns == columns
    assert list_texts(table) == ["a"]


def test_a_line_that_only_excel_reads_is_named() -> None:
    with pytest.raises(CpuftError, match=r"x\.csv begins with the line 'sep=;', which only Excel reads") as error:
        read_table(write("x.csv", "sep=;\ntext;label\na;1\n"))
    subprocess.run(["sh", "-c", str(error.value).partition(" instead: ")[2]], check=True, timeout=60)
    assert list_texts(read_table(Path("x-rows.csv"))) == ["a"]


@pytest.mark.parametrize("line", ['"He said \\"yes\\" twice",1', '"a, b" c,1', '"a, b'])
def test_a_cell_that_is_not_closed_is_named_with_the_line_of_its_quotation_mark(line: str) -> None:
    path = write("x.csv", f'text,label\n"x, y",1\n{line}\nplain,0\n')
    with pytest.raises(CpuftError, match=r"x\.csv, line 3: a quotation mark opens a cell there and does not close"):
        read_table(path)


@needs_glue
@pytest.mark.parametrize(
    "name, texts, label, count",
    [
        ("MRPC/train.tsv", "#1 String,#2 String", "Quality", 3668),
        ("STS-B/train.tsv", "", "score", 5749),
        ("QNLI/dev.tsv", "question,sentence", "label", 5463),
        ("SST-2/train.tsv", "", "label", 67349),
    ],
)
def test_files_of_glue_are_read_as_files_of_the_user(name: str, texts: str, label: str, count: int) -> None:
    data = read_data(TrainConfig(task="files", train_file=str(GLUE / name), text_columns=texts, label_column=label))
    assert len(data.train) + len(data.validation[""]) == count
