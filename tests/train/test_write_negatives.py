"""Files of mined negatives: formats, what is left out, and input that is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.config.mine import MineConfig
from cpuft.errors import CpuftError
from cpuft.train.data.embedding_pairs import choose_pair_columns
from cpuft.train.data.tables import read_table
from cpuft.train.embedder import Embedder
from cpuft.train.embedding_form import EmbeddingForm, write_form
from cpuft.train.mine import mine_negatives
from cpuft.train.write_negatives import write_negatives
from tests.train.pairs import write_pairs
from tests.train.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture
def request_(tmp_path: Path) -> MineConfig:
    """Of a tiny model with prompts, and a file of 30 pairs."""
    save_tiny(tmp_path / "tiny")
    write_form(tmp_path / "tiny", EmbeddingForm(prompts={"query": "ask: "}), 32)
    write_pairs(tmp_path / "pairs.csv", 30)
    (tmp_path / "corpus.jsonl").write_text("".join(f'{{"text": "the red hat {n}"}}\n' for n in range(9)))
    return MineConfig(model="tiny", file="pairs.csv", output="out.csv", negatives=2, precision="fp32")


@pytest.mark.parametrize("output, corpus", [("out.csv", "corpus.jsonl"), ("out.jsonl", ""), ("out.parquet", "")])
def test_the_file_has_the_negatives_and_can_be_trained_on(
    request_: MineConfig, output: str, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_negatives(replace(request_, output=output, corpus=corpus))
    assert capsys.readouterr().out == (
        f"negatives: {output} (30 rows of 2 negatives; 0 of 30 anchors left out, with fewer than 2 negatives)\n"
    )
    pairs = [cells for _, cells in read_table(Path("pairs.csv")).rows]
    found = read_table(Path(output))
    assert choose_pair_columns(found, "", True) == ("anchor", "positive", "negative_1", "negative_2")
    texts: list[Any] = [[cells[name] for cells in pairs] for name in ("anchor", "positive")]
    documents = [f"the red hat {n}" for n in range(9)] if corpus else None
    wanted = mine_negatives(Embedder("tiny", "fp32"), texts[0], texts[1], documents, MineConfig(negatives=2))
    rows = [[cells[name] for name in ("anchor", "positive", "negative_1", "negative_2")] for _, cells in found.rows]
    assert rows == [[anchor, positive, *wanted[anchor]] for anchor, positive in zip(*texts)]
    assert sorted(path for path in os.listdir() if path.startswith((".out", "out"))) == [output]


def test_anchors_with_too_few_negatives_are_left_out(request_: MineConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """An own positive decides for each anchor how many are below it by the margin."""
    write_negatives(replace(request_, relative_margin=0.0, negatives=15))
    said = capsys.readouterr().out
    rows = len(list(read_table(Path("out.csv")).rows))
    assert 0 < rows < 30
    assert said == (
        f"negatives: out.csv ({rows} rows of 15 negatives; {30 - rows} of 30 anchors left out, with fewer than 15 "
        f"negatives)\n"
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"output": "out.txt"},
            "out.txt has the ending '.txt': give an --output that ends in .csv, .tsv, .jsonl",
        ),
        ({"output": "bare.csv"}, "bare.csv exists: give another --output, or replace the file with --overwrite"),
        ({"output": "pairs.csv", "overwrite": True}, "pairs.csv is one of the files that are read: give another --out"),
        ({"text_columns": "anchor,answer"}, "pairs.csv has no column 'answer': "),
        (
            {"file": "blank.csv"},
            "blank.csv, line 3 has no text in the column 'positive': correct or remove that row",
        ),
        ({"file": "bare.csv"}, "bare.csv has no rows: give a file with pairs of texts"),
        (
            {"corpus": "bare.csv"},
            "bare.csv has no column 'text' (it has anchor, positive): name the one of the texts with --corpus-co",
        ),
        ({"negatives": 30}, "no anchor has over 29 documents besides its positives: lower --negatives"),
        (
            {"max_score": -0.99},
            "30 of 30 anchors left out, with fewer than 2 negatives: loosen --max-score, --min-scor",
        ),
    ],
)
def test_wrong_input_is_refused(request_: MineConfig, options: dict[str, Any], message: str) -> None:
    Path("blank.csv").write_text("anchor,positive\na,b\nc, \n")
    Path("bare.csv").write_text("anchor,positive\n")
    with pytest.raises(CpuftError) as error:
        write_negatives(replace(request_, **options))
    assert message in str(error.value)
    assert not Path("out.csv").exists()
