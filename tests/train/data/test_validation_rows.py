"""What prepared data keeps of validation rows as they were read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuft.config.conflicts import refuse_conflicts
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.archive import Prepared, read_prepared
from cpuft.train.data.prepare import prepare
from tests.train.data.test_sources import files, lines

TRAIN = "text,label,language\na,x,de\nb,y,en\n"
VALIDATION = "text,label,language\n" + "".join(f"{'ä' * n}{n},x,{('en', 'de')[n % 2]}\n" for n in (600, 1, 2, 3))


def read(config: TrainConfig) -> Prepared:
    return read_prepared(str(prepare(config)))


def list_texts(found: Prepared) -> list[list[str] | None]:
    return found.validation_rows[""].list_texts(np.arange(len(found.validation[""])))


def test_rows_are_those_that_were_read(own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = files(tmp_path, TRAIN, VALIDATION)
    monkeypatch.setattr("cpuft.train.data.prepare._MOST_TEXTS", 3)
    plain = read(config)
    assert list_texts(plain) == [["ä" * 500], ["ä1"], ["ää2"], None]
    assert len(plain.validation_rows[""].slice_numbers) == 0
    sliced = read(replace(config, slice_by="language"))
    kept = sliced.validation_rows[""]
    assert [kept.slice_values[number] for number in kept.slice_numbers] == ["en", "de", "en", "de"]
    assert list_texts(sliced) == list_texts(plain)
    # Neither changes what is trained on, and the rows are equal whatever their tokens are.
    assert (sliced.checksum, sliced.rows) == (plain.checksum, plain.rows)
    assert list_texts(read(replace(config, examples=False))) == [None] * 4
    shorter = read(replace(config, max_length=16))
    assert (shorter.checksum == plain.checksum, shorter.rows == plain.rows) == (False, True)
    other = read(files(tmp_path, TRAIN, VALIDATION.replace("ä1", "ö1")))
    assert other.rows != plain.rows
    # Other values in a file that is otherwise the same are read again.
    files(tmp_path, TRAIN, VALIDATION.replace(",de", ",fr"))
    assert read(replace(config, slice_by="language")).validation_rows[""].slice_values == ("en", "fr")


def test_the_words_of_a_row_are_one_text(own_cache: None, tmp_path: Path) -> None:
    rows = lines(
        {"tokens": ["Ann", "is"], "tags": ["B-PER", "O"], "from": "x"}, {"tokens": ["a"], "tags": ["O"], "from": ["y"]}
    )
    found = read(replace(files(tmp_path, rows, rows, "jsonl"), slice_by="from"))
    assert list_texts(found) == [["Ann is"], ["a"]]
    assert found.validation_rows[""].slice_values == ("x", "y")


def test_queries_are_kept_and_compared_without_prompts(own_cache: None, tmp_path: Path) -> None:
    text = "query,document\nq1,d1\nq2,d2\n"
    config = replace(files(tmp_path, text, text), task="pairs")
    plain, prompted = (read(replace(config, query_prompt=prompt, document_prompt="d: ")) for prompt in ("", "q: "))
    assert prompted.checksum != plain.checksum
    assert prompted.rows == plain.rows
    assert list_texts(prompted) == [["q1"], ["q2"], None, None]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"slice_by": "country"}, r"has no column 'country' \(its columns are .*'language'.*\): name one of them with"),
        ({"slice_by": "number"}, r"more than 100 values in 'number': give --slice-by a column with fewer"),
    ],
)
def test_a_column_that_cannot_slice_is_refused(
    options: dict[str, Any], message: str, own_cache: None, tmp_path: Path
) -> None:
    rows = "text,label,language,number\n" + "".join(f"t,{'xy'[n % 2]},de,{n}\n" for n in range(101))
    with pytest.raises(CpuftError, match=message):
        prepare(replace(files(tmp_path, rows, rows), **options))


def test_only_files_have_columns_to_slice_by() -> None:
    with pytest.raises(CpuftError, match="--slice-by has no effect with --task mrpc: leave it out, or give"):
        refuse_conflicts(TrainConfig(task="mrpc", slice_by="language"))
