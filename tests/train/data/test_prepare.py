"""Data that is prepared once: its labels, what is said about it, and the cache folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.archive import UNTAGGED, Prepared, read_prepared
from cpuft.train.data.describe import describe_data
from cpuft.train.data.prepare import prepare
from cpuft.train.data.tokenizer import load_tokenizer
from cpuft.train.model import find_model
from tests.train.data.test_sources import files, lines


def test_a_cache_folder_that_others_can_write_to_is_refused(own_cache: None) -> None:
    path = prepare(TrainConfig(max_train_samples=8))
    assert prepare(TrainConfig(max_train_samples=8)) == path
    path.parent.chmod(0o777)
    with pytest.raises(CpuftError, match=r"can be written to by other users \(mode 777\)"):
        prepare(TrainConfig(max_train_samples=8))


def test_data_that_is_in_the_cache_is_found_without_importing_transformers(own_cache: None) -> None:
    code = (
        "import sys; from cpuft.config.train import TrainConfig; from cpuft.train.data.prepare import prepare; "
        "prepare(TrainConfig(max_train_samples=8)); sys.exit('transformers' in sys.modules)"
    )
    codes = [subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode for _ in range(2)]
    assert codes == [1, 0]


def test_data_in_the_cache_does_not_serve_a_model_with_fewer_positions(own_cache: None, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(find_model("minilm"), model)
    config = TrainConfig(model=str(model), max_train_samples=8)
    prepare(config)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 64}))
    with pytest.raises(CpuftError, match="has 64 positions: give --max-length 64 or less"):
        prepare(config)


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04-\x00", b"PK\x05\x06" + bytes(18), b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_not_an_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(data)
    with pytest.raises(CpuftError, match=r"data\.npz is not prepared data \(.+\): remove it, and start again"):
        read_prepared(str(path))


def prepared(train: str, folder: Path, max_length: int = 128) -> Prepared:
    """The same rows for training and validation."""
    return read_prepared(str(prepare(replace(files(folder, train, train, "jsonl"), max_length=max_length))))


def test_a_word_s_first_token_has_its_tag(own_cache: None, tmp_path: Path) -> None:
    rows = (
        {"tokens": ["Unaffable", "\u200e", "Ann"], "tags": ["O", "O", "B-PER"]},
        {"tokens": ["a", "Ann", "a", "a", "a", "a", "a", "a"], "tags": ["O", "B-PER", *["O"] * 6]},
    )
    tokens = prepared(lines(*rows), tmp_path, max_length=8).train
    words = load_tokenizer("minilm").convert_ids_to_tokens(tokens.ids)
    assert words[:7] == ["[CLS]", "una", "##ffa", "##ble", "ann", "[SEP]", "[CLS]"]
    assert tokens.labels[:6].tolist() == [UNTAGGED, 1, UNTAGGED, UNTAGGED, 0, UNTAGGED]
    # The second row is cut: two of its words are not seen.
    assert tokens.labels[6:].tolist() == [UNTAGGED, 1, 0, 1, 1, 1, 1, UNTAGGED]
    assert len(tokens) == 2


def test_several_labels_become_a_row_of_zeros_and_ones(own_cache: None, tmp_path: Path) -> None:
    rows = ({"text": "x", "label": ["b", "a"]}, {"text": "y", "label": []}, {"text": "z", "label": ["c"]})
    found = prepared(lines(*rows), tmp_path)
    assert (found.kind, found.labels) == ("labels", ("a", "b", "c"))
    assert found.train.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_the_kind_of_task_is_part_of_the_checksum(own_cache: None, tmp_path: Path) -> None:
    """The same texts, one class each: not the rows of several labels that are kept."""
    several = prepared(lines({"text": "x", "label": ["a"]}, {"text": "y", "label": ["b"]}), tmp_path)
    single = prepared(lines({"text": "x", "label": "a"}, {"text": "y", "label": "b"}), tmp_path)
    assert (several.kind, single.kind) == ("labels", "class")
    assert several.checksum != single.checksum


@pytest.mark.parametrize(
    "rows, options, told",
    [
        (
            [{"sentence1": "x " * 20, "sentence2": "y", "label": "no"}, *[{"sentence1": "x", "label": "yes"}] * 3],
            {},
            "training on 4 examples, validating on 4; labels: 2 classes, no (1), yes (3); columns: sentence1, "
            "sentence2 -> label; 25.0 % of the examples cut at --max-length 16",
        ),
        (
            [{"text": "x", "label": number} for number in (1, 2, 2, 5)],
            {},
            "training on 4 examples, validating on 4; labels: 3 classes, 1 (1), 2 (2), 5 (1) (the labels are numbers: "
            "--label-type number learns them by regression); columns: text -> label; none of the examples cut at "
            "--max-length 16",
        ),
        (
            [{"text": "x", "stars": number} for number in (1, 2, 2, 5)],
            {"label_type": "number", "label_column": "stars"},
            "training on 4 examples, validating on 4; labels: numbers from 1 to 5, learned by regression (--label-type "
            "class learns them as classes); columns: text -> stars; none of the examples cut at --max-length 16",
        ),
        (
            [{"text": "x", "label": ["a", "b"]}, {"text": "x", "label": ["b"]}],
            {},
            "training on 2 examples, validating on 2; labels: 2 classes, of which an example may have several, a (1), "
            "b (2); columns: text -> label; none of the examples cut at --max-length 16",
        ),
        (
            [{"tokens": ["Ann", "is", "at", "home"], "tags": ["B-PER", "O", "O", "O"]}],
            {},
            "training on 1 example, validating on 1; labels: 2 tags of words, B-PER (1), O (3); columns: tokens -> "
            "tags; none of the examples cut at --max-length 16",
        ),
        (
            [{"text": "x", "label": f"c{number:02}"} for number in [*range(12), 11, 10]],
            {},
            "training on 14 examples, validating on 14; labels: 12 classes, c00 (1), c01 (1), c02 (1), c03 (1), "
            "c04 (1), c05 (1), c06 (1), c07 (1), c10 (2), c11 (2) and 2 rarer ones; columns: text -> label; none of "
            "the examples cut at --max-length 16",
        ),
    ],
)
def test_the_data_is_described_in_one_line(
    rows: list[dict[str, Any]], options: dict[str, Any], told: str, own_cache: None, tmp_path: Path
) -> None:
    if "sentence1" in rows[0]:
        rows = [{"sentence2": "y", **row} for row in rows]
    config = replace(files(tmp_path, lines(*rows), lines(*rows), "jsonl"), max_length=16, **options)
    for _ in range(2):  # the second time from the cache
        assert describe_data(read_prepared(str(prepare(config))), config) == told


def test_the_same_examples_in_other_columns_have_their_own_description(own_cache: None, tmp_path: Path) -> None:
    for name in ("text", "sentence"):
        rows = lines({name: "x", "label": "a"}, {name: "y", "label": "b"})
        config = files(tmp_path, rows, rows, "jsonl")
        assert f"columns: {name} -> label" in describe_data(read_prepared(str(prepare(config))), config)


def test_texts_without_labels_are_described_too(own_cache: None, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("the old cat\n" * 200)
    config = TrainConfig(task="text", train_file=str(path), max_length=16)
    told = describe_data(read_prepared(str(prepare(config))), config)
    wanted = r"training on \d+ examples, validating on \d+; each example is a piece of text of up to 16 tokens"
    assert re.match(wanted, told)
