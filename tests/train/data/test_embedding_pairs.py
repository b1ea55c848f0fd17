"""Reading pairs for embedding models, with and without scores, and the retrieval sets that validate them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.tasks import TASKS
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.describe import describe_data
from cpuft.train.data.embedding_pairs import RetrievalExamples, read_pairs
from cpuft.train.data.prepare import prepare
from cpuft.train.data.recipe import check_recipe
from cpuft.train.data.sources import TaskData
from cpuft.train.embedding_form import EmbeddingForm, write_form
from cpuft.train.setup import check_negatives
from tests.train.pairs import write_pairs
from tests.train.tiny import save_tiny


def read(train: str, validation: str = "", **options: Any) -> TaskData:
    Path("train.csv").write_text(train)
    if validation:
        Path("validation.csv").write_text(validation)
    return read_files("pairs", validation_file="validation.csv" if validation else "", **options)


def read_files(task: str, **options: Any) -> TaskData:
    config = TrainConfig(task=task, train_file="train.csv", **options)
    return read_pairs(TASKS[task], config)


def test_the_anchors_of_validation_pairs_look_for_their_positives() -> None:
    data = read("anchor,positive\nq1,p1\nq2,p2\n", "anchor,positive\nq,p\nq,r\ns,p\n")
    assert data.task.texts == ("anchor", "positive")
    assert data.train.load().texts == [("q1", "p1"), ("q2", "p2")]
    found = data.validation[""]
    assert isinstance(found, RetrievalExamples)
    assert [text for (text,) in found.texts] == ["q", "s", "p", "r"]
    assert sorted(found.relevant.tolist()) == [[0, 0, 1], [0, 1, 1], [1, 0, 1]]


@pytest.mark.parametrize(
    ("header", "texts"),
    [
        ("question,answer", ("question", "answer")),
        ("id,negative_1,query,negative_2,positive", ("query", "positive", "negative_1", "negative_2")),
        ("sentence1,sentence2,label", ("sentence1", "sentence2")),
    ],
)
def test_usual_columns_are_found(header: str, texts: tuple[str, ...]) -> None:
    rows = "\n".join(",".join(f"{name} {number}" for name in header.split(",")) for number in range(4))
    assert read(f"{header}\n{rows}\n").task.texts == texts


def test_prompts_are_put_in_front(tmp_path: Path) -> None:
    folder = Path(save_tiny(tmp_path / "tiny"))
    write_form(folder, EmbeddingForm(prompts={"query": "query: ", "passage": "passage: "}), 32)
    rows = "anchor,positive,negative\na,b,c\nd,e,f\n"
    data = read(rows, rows, model=str(folder))
    assert data.train.load().texts[0] == ("query: a", "passage: b", "passage: c")
    data = read(rows, rows, model=str(folder), query_prompt="", document_prompt="doc: ")
    assert data.train.load().texts[0] == ("a", "doc: b", "doc: c")
    found = data.validation[""].load().texts
    assert ("doc: e",) in found
    assert ("a",) in found


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ("anchor,other\na,b\n", {}, "no columns anchor and positive"),
        ("anchor,positive\na,b\nc,\n", {}, "line 3 has no 'positive'"),
        ("anchor,positive\na,b\n   ,d\n", {}, "line 3 has no 'anchor'"),
        ("anchor,positive\na,b\nc,b\nd,b\n", {}, "has one text in 'positive'"),
        ("anchor,positive\na,b\nc,d\n", {"text_columns": "anchor"}, "name the columns of anchor, positive"),
        ("anchor,positive\na,b\nc,d\n", {"text_columns": "anchor,answer"}, "no column 'answer'"),
        ("anchor,positive\na,b\nc,d\n", {"text_columns": "anchor,anchor"}, "is not valid"),
    ],
)
def test_rows_that_teach_nothing_are_refused(train: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CpuftError, match=message):
        read(train, "anchor,positive\nx,y\nz,w\n", **options)


def test_scores_are_read_from_a_usual_column() -> None:
    Path("train.csv").write_text("sentence1,sentence2,score\na,b,0.5\nc,d,1\n")
    data = read_files("scored-pairs", validation_file="train.csv")
    assert (data.task.texts, data.task.label) == (("sentence1", "sentence2"), "score")
    assert data.train.load().labels == [0.5, 1.0]
    Path("train.csv").write_text("sentence1,sentence2,score\na,b,high\n")
    with pytest.raises(CpuftError, match="line 2: score 'high' is not a number"):
        read_files("scored-pairs", validation_file="train.csv")
    with pytest.raises(CpuftError, match="name two columns"):
        read_files("scored-pairs", text_columns="sentence1,sentence2,score")


def make_config(tmp_path: Path, task: str = "pairs", **options: Any) -> TrainConfig:
    path = write_pairs(tmp_path / "rows.csv", 12, score=task == "scored-pairs")
    usual: dict[str, Any] = {
        "model": save_tiny(tmp_path / "tiny"),
        "train_file": path,
        "validation_split": 0.25,
        "max_length": 32,
    }
    return TrainConfig(task=task, **usual | options)


def test_each_text_is_tokenised_by_itself(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    prepared = read_prepared(str(prepare(config)))
    tokens = prepared.train
    ids = tokens.ids[tokens.offsets[0] : tokens.offsets[1]]
    types = tokens.types[tokens.offsets[0] : tokens.offsets[1]]
    assert (ids[types == 0][0], ids[types == 1][0]) == (101, 101)  # [CLS]
    assert (ids[types == 0][-1], ids[types == 1][-1]) == (102, 102)  # [SEP]
    assert np.count_nonzero(ids == 101) == 2
    validation = prepared.validation[""]
    assert len(validation.types) == 0
    assert validation.labels.shape == (3, 3)
    assert "each anchor belongs to its positive; columns: anchor, positive" in describe_data(prepared, config)
    # A prompt makes other tokens.
    assert prepare(make_config(tmp_path, query_prompt="query: ")) != prepare(config)


def test_dimensions_and_scores_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    prepared = read_prepared(str(prepare(config)))
    with pytest.raises(CpuftError, match="have 32 dimensions: give at most 32"):
        check_recipe(make_config(tmp_path, matryoshka="64,32"), prepared)
    with pytest.raises(CpuftError, match="--matryoshka '8,x' is not valid"):
        check_recipe(make_config(tmp_path, matryoshka="8,x"), prepared)
    check_recipe(make_config(tmp_path, matryoshka="32,8"), prepared)
    rows = tmp_path / "scores.csv"
    rows.write_text("sentence1,sentence2,score\na,b,0.5\nc,d,5\ne,f,2\ng,h,3\n")
    config = make_config(tmp_path, "scored-pairs", train_file=str(rows), similarity_loss="mse")
    with pytest.raises(CpuftError, match=r"scores go from .* to [35]: divide them by"):
        check_recipe(config, read_prepared(str(prepare(config))))


def test_a_batch_of_one_without_negatives_is_refused(tmp_path: Path) -> None:
    prepared = read_prepared(str(prepare(make_config(tmp_path))))
    with pytest.raises(CpuftError, match="--batch-size 1 leaves an anchor no text"):
        check_negatives(TrainConfig(task="pairs", batch_size=1), prepared, 1)
    with pytest.raises(CpuftError, match="--batch-size 1 leaves an anchor no text"):
        check_negatives(TrainConfig(task="pairs", batch_size=1, gather_negatives=False), prepared, 4)
    check_negatives(TrainConfig(task="pairs", batch_size=1), prepared, 2)


def test_queries_and_documents_of_validation_are_told_apart(own_cache: None, tmp_path: Path) -> None:
    rows = "".join(f"question {number},answer {number}\n" for number in range(180))
    Path("x.csv").write_text(f"anchor,positive\n{rows}")
    config = TrainConfig(task="pairs", train_file="x.csv", validation_file="x.csv")
    told = describe_data(read_prepared(str(prepare(config))), config)
    assert told.startswith("training on 180 examples, validating on 180 queries among 180 documents; labels: none")


def test_it_is_said_how_both_files_are_read(tmp_path: Path) -> None:
    rows = "".join(f"question {number}\tanswer {number}\n" for number in range(9))
    Path("x.tsv").write_text(f'anchor\tpositive\n{rows}"open\tanswer\n')
    data = read_pairs(TASKS["pairs"], TrainConfig(task="pairs", train_file="x.tsv", validation_file="x.tsv"))
    assert data.notes == ("x.tsv read without quoting, because of the quotation mark in line 11",) * 2


def test_pairs_without_a_score_may_be_left_out() -> None:
    rows = "sentence1,sentence2,score\n" + "".join(f"a {number},b {number},{number / 4}\n" for number in range(4))
    Path("x.csv").write_text(rows + "c,d,\ne,f,\n")
    config = TrainConfig(task="scored-pairs", train_file="x.csv", validation_file="x.csv")
    with pytest.raises(CpuftError, match="line 6 has no 'score': correct or remove that line, or leave out"):
        read_pairs(TASKS[config.task], config)
    data = read_pairs(TASKS[config.task], replace(config, skip_unlabelled=True))
    assert len(data.train) == 4
    assert data.notes == ("2 rows of x.csv without a label left out",) * 2
    Path("x.csv").write_text("sentence1,sentence2\na,b\nc,d\n")
    with pytest.raises(CpuftError, match="name the column of the scores with --label-column"):
        read_pairs(TASKS[config.task], config)
