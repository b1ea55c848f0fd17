"""Reading retrieval sets in BEIR's form, and making them of contrastive examples."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.train.data.retrieval import RetrievalSet, make_retrieval_set, read_beir

CORPUS = [
    {"_id": "d2", "title": "Oak", "text": "A tree."},
    {"_id": "d10", "title": "", "text": " A bird.\n", "metadata": {"url": "x"}},
    {"_id": 3, "text": "A fish."},
]
QUERIES = [{"_id": "q2", "text": "what swims?"}, {"_id": "q0", "text": "unjudged"}, {"_id": "q1", "text": "trees"}]
QRELS = [("q1", "d2", "2"), ("q2", "3", "1"), ("q2", "d10", "0"), ("q0", "d2", "-1"), ("q1", "d10", "1.0")]


def write(
    folder: Path,
    corpus: list[dict[str, object]] | None = None,
    queries: list[dict[str, object]] | None = None,
    qrels: list[tuple[str, ...]] | None = None,
    header: tuple[str, ...] = ("query-id", "corpus-id", "score"),
    split: str = "test",
) -> str:
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", corpus or CORPUS), ("queries", queries or QUERIES)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["\t".join(row) for row in [header, *(QRELS if qrels is None else qrels)]]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return str(folder)


def read(folder: str) -> RetrievalSet:
    return read_beir(folder, "--validation-file")


def test_a_folder_of_beir(tmp_path: Path) -> None:
    found = read(write(tmp_path))
    assert found.documents == ["A fish.", "A bird.", "Oak A tree."], "in the order of their ids 3, d10 and d2"
    assert found.queries == ["what swims?", "trees"], "in the order of their file, without those nobody judged"
    assert found.relevant.tolist() == [[1, 2, 2], [0, 0, 1], [1, 1, 1]]
    assert found.relevant.dtype.name == "int32"


def test_compressed_files_and_the_split_dev(tmp_path: Path) -> None:
    plain = read(write(tmp_path / "plain"))
    write(tmp_path / "dev", split="dev")
    for path in [path for path in (tmp_path / "dev").rglob("*") if path.is_file()]:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    found = read(str(tmp_path / "dev"))
    assert (found.queries, found.documents) == (plain.queries, plain.documents)
    assert found.relevant.tolist() == plain.relevant.tolist()
    write(tmp_path / "dev", qrels=[("q2", "d2", "1")])
    assert read(str(tmp_path / "dev")).relevant.tolist() == [[0, 2, 1]], "test comes before dev"


def test_equal_judgements_count_once(tmp_path: Path) -> None:
    assert read(write(tmp_path, qrels=[("q1", "d2", "1")] * 2)).relevant.tolist() == [[0, 2, 1]]


BAD_JUDGEMENTS = [
    ([("q1", "d4", "1")], "test.tsv, line 2: the relevant document 'd4' is not in corpus.jsonl: add it"),
    ([("q9", "d2", "1")], "test.tsv, line 2: the query 'q9' is not in queries.jsonl: add it"),
    ([("q1", "d2", "0")], "has a score above 0: give judgements"),
    ([], "has a score above 0: give judgements"),
    ([("q1", "d2", "1"), ("q1", "d2")], "test.tsv, line 3 has 2 columns, but the header has 3"),
    ([("q1", "d2", "0.5")], "test.tsv, line 2: the score '0.5' is not a whole number: correct"),
    ([("q1", "d2", "nan")], "test.tsv, line 2: the score 'nan' is not a whole number: correct"),
    ([("q1", "d2", "1"), ("q1", "d2", "0")], "test.tsv, line 3 judges query 'q1' and document 'd2' again: keep one"),
]


@pytest.mark.parametrize(("qrels", "message"), BAD_JUDGEMENTS)
def test_bad_judgements(qrels: list[tuple[str, ...]], message: str, tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=message):
        read(write(tmp_path, qrels=qrels))


def test_judgements_of_another_form(tmp_path: Path) -> None:
    write(tmp_path, header=("q1", "0", "d2"))
    with pytest.raises(
        CpuftError, match=r"no column 'query-id' .*: give it a header line with query-id, corpus-id and"
    ):
        read(str(tmp_path))


BAD_TEXTS: list[tuple[list[dict[str, object]], str]] = [
    ([{"_id": "d2", "text": "a"}, {"_id": "d2", "text": "b"}], "line 2: the _id 'd2' is there twice: give each line"),
    ([{"text": "a"}], "line 1 has no '_id': give each line the keys"),
    ([{"_id": "d2", "title": "a"}], "line 1 has no text in 'text': give each line the keys"),
    ([{"_id": "d2", "text": ["a"]}], "line 1 has no text in 'text': give each line the keys"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_TEXTS)
@pytest.mark.parametrize("name", ["corpus", "queries"])
def test_bad_texts(rows: list[dict[str, object]], message: str, name: str, tmp_path: Path) -> None:
    write(tmp_path, rows if name == "corpus" else None, rows if name == "queries" else None)
    with pytest.raises(CpuftError, match=f"{name}.jsonl, {message}"):
        read(str(tmp_path))


def test_a_query_without_text(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=r"the query 'q1' in .*queries.jsonl has no text: correct or remove it"):
        read(write(tmp_path, queries=[{"_id": "q1", "text": " "}, {"_id": "q2", "text": "a"}]))


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_a_missing_an_empty_and_a_cut_file(name: str, tmp_path: Path) -> None:
    path = Path(write(tmp_path), name)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    if name != "qrels/test.tsv":
        with pytest.raises(CpuftError, match=f"{name}, line 3 is not a JSON object"):
            read(str(tmp_path))
    path.write_bytes(gzip.compress(whole)[:-9])
    with pytest.raises(CpuftError, match=f"{name} is cut off or damaged: copy or download it again"):
        read(str(tmp_path))
    path.write_bytes(b"")
    with pytest.raises(CpuftError, match=f"{name} is empty: give a file with rows"):
        read(str(tmp_path))
    path.unlink()
    with pytest.raises(CpuftError, match=f"there is no file {name}.*: give a folder with corpus.jsonl"):
        read(str(tmp_path))


def test_no_folder() -> None:
    with pytest.raises(CpuftError, match="--validation-file nowhere: there is no such folder: give a folder with"):
        read("nowhere")


def test_a_set_made_of_contrastive_examples() -> None:
    found = make_retrieval_set([("a", "x", "y"), ("b", "y", "z", "x"), ("a", "z"), ("a", "x")])
    assert found.queries == ["a", "b"]
    assert found.documents == ["x", "y", "z"]
    assert found.relevant.tolist() == [[0, 0, 1], [1, 1, 1], [0, 2, 1]]
