"""Rows that are prepared once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.options.fields import TrainConfig
from cpuft.train.data.prepare import UNTAGGED, Prepared, prepare, read_prepared
from cpuft.train.model import load_tokenizer
from tests.train.data.test_own import lines
from tests.train.data.test_rows import files


def test_rows_that_others_could_have_written_are_not_read(own_cache: None) -> None:
    path = prepare(TrainConfig(max_train_samples=8))
    assert prepare(TrainConfig(max_train_samples=8)) == path
    path.parent.chmod(0o777)
    with pytest.raises(CpuftError, match=r"is open to others' writing \(mode 777\)"):
        prepare(TrainConfig(max_train_samples=8))


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04-\x00", b"PK\x05\x06" + bytes(18), b"\x93NUMPY\x01\x00"])
def test_an_archive_that_is_none_of_ours(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(data)
    with pytest.raises(CpuftError, match=r"data\.npz is no prepared data \(.+\): remove it, and start again"):
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


def test_several_labels_are_marked(own_cache: None, tmp_path: Path) -> None:
    rows = ({"text": "x", "label": ["b", "a"]}, {"text": "y", "label": []}, {"text": "z", "label": ["c"]})
    found = prepared(lines(*rows), tmp_path)
    assert (found.kind, found.labels) == ("labels", ("a", "b", "c"))
    assert found.train.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_the_kind_is_part_of_what_is_kept(own_cache: None, tmp_path: Path) -> None:
    """The same texts, one class each: not the rows of several labels that are kept."""
    several = prepared(lines({"text": "x", "label": ["a"]}, {"text": "y", "label": ["b"]}), tmp_path)
    single = prepared(lines({"text": "x", "label": "a"}, {"text": "y", "label": "b"}), tmp_path)
    assert (several.kind, single.kind) == ("labels", "class")
    assert several.checksum != single.checksum
