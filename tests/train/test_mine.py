"""Hard negatives are those of sentence-transformers on the same embeddings, exact, and never a positive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import cpuft.train.mine
from cpuft.config.mine import MineConfig
from cpuft.errors import CpuftError
from cpuft.train.embedder import Embeddings
from cpuft.train.embedding_form import EmbeddingForm
from cpuft.train.mine import (
    MiningTask,
    Negatives,
    check_rules,
    find_largest,
    make_mining_task,
    mine_negatives,
    search_negatives,
)


def embed(texts: Sequence[str]) -> Embeddings:
    """Embeddings of 16 dimensions that depend on the texts only, and are not of length 1.

    Those of texts with the same last word, such as `question 3` and `answer 3`, are similar.
    """

    def draw(text: str) -> NDArray[np.float64]:
        return np.random.default_rng(list(text.encode())).normal(size=16)

    return np.asarray([draw(text.split()[-1]) + 0.7 * draw(text) for text in texts], np.float32)


class Peer:
    """What sentence-transformers' function uses of a model, with the embeddings of `embed`."""

    device = torch.device("cpu")

    def encode_query(self, texts: list[str], **options: Any) -> Embeddings:
        found = embed(texts)
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))

    encode_document = encode_query

    def similarity(self, left: Any, right: Any) -> torch.Tensor:
        return torch.as_tensor(left) @ torch.as_tensor(right).t()

    def similarity_pairwise(self, left: Any, right: Any) -> torch.Tensor:
        return (torch.as_tensor(left) * torch.as_tensor(right)).sum(1)


def mine(task: MiningTask, count: int, rules: MineConfig) -> Negatives:
    return search_negatives(embed(task.anchors), embed(task.documents), task, replace(rules, negatives=count))


def list_rows(task: MiningTask, found: Negatives) -> set[tuple[str, ...]]:
    """Rows of anchor, positive and negatives, of the anchors that have all negatives."""
    return {
        (anchor, task.documents[positive], *(task.documents[number] for number in found.numbers[place]))
        for place, anchor in enumerate(task.anchors)
        if found.complete[place]
        for positive in task.positives[place]
    }


def make_rows(count: int) -> tuple[list[str], list[str]]:
    """Every tenth anchor has two positives, and some positives belong to two anchors."""
    anchors = [f"question {number - number % 10 // 9}" for number in range(count)]
    return anchors, [f"answer {number % (count - 7)}" for number in range(count)]


@pytest.mark.parametrize(
    "rules, options, is_whole",
    [
        (MineConfig(), {}, True),
        (MineConfig(skip_top=4), {"range_min": 4}, True),
        (MineConfig(search_depth=30, max_score=0.4), {"range_max": 30, "max_score": 0.4}, True),
        (MineConfig(search_depth=60, absolute_margin=0.05), {"range_max": 60, "absolute_margin": 0.05}, True),
        (
            MineConfig(skip_top=1, search_depth=60, relative_margin=0.1, min_score=-0.2),
            {"range_min": 1, "range_max": 60, "relative_margin": 0.1, "min_score": -0.2},
            True,
        ),
        (MineConfig(relative_margin=0.3), {"relative_margin": 0.3}, False),
        (MineConfig(max_score=0.6), {"max_score": 0.6}, False),
    ],
)
@pytest.mark.parametrize("with_corpus", [False, True])
def test_negatives_are_those_of_sentence_transformers(
    rules: MineConfig, options: dict[str, Any], is_whole: bool, with_corpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks only at some dozens of documents if it has no depth; where it finds negatives, they are the same."""
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    monkeypatch.setattr(cpuft.train.mine, "_ANCHORS_AT_ONCE", 37)
    monkeypatch.setattr(cpuft.train.mine, "_DOCUMENTS_AT_ONCE", 150)
    anchors, positives = make_rows(200)
    corpus = [f"text {number}" for number in range(300)] if with_corpus else None
    task = make_mining_task(anchors, positives, corpus)
    peer: Any = Peer()
    data = Dataset.from_dict({"anchor": anchors, "positive": positives})
    wanted = mine_hard_negatives(
        data, peer, corpus=corpus, num_negatives=3, output_format="n-tuple", verbose=False, **options
    )
    rows = {tuple(row.values()) for row in wanted}
    found = list_rows(task, mine(task, 3, rules))
    assert len(rows) > 30
    assert rows <= found
    assert rows == found or not is_whole


def test_neither_positives_of_an_equal_anchor_nor_the_anchor_are_negatives() -> None:
    """The anchors' own texts are in the corpus and would have the highest scores."""
    anchors, positives = ["a", "b", "a", "c"], ["a1", "b1", "a2", "b1"]
    task = make_mining_task(anchors, positives, ["a", "b", "x", "a1"])
    assert (task.anchors, task.documents) == (["a", "b", "c"], ["a", "b", "x", "a1", "b1", "a2"])
    found = mine(task, 4, MineConfig())
    lists = [{task.documents[number] for number in row if number >= 0} for row in found.numbers]
    assert lists[:2] == [{"b", "x", "b1"}, {"a", "x", "a1", "a2"}]
    assert lists[2] < {*task.documents} - {"b1"}
    assert found.complete.tolist() == [False, True, True]
    assert found.numbers[0, 3] == -1
    assert found.scores[0, 3] == -np.inf
    assert (np.diff(found.scores[1:], axis=1) <= 0).all()


def test_blocks_of_anchors_are_mined_as_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_mining_task(*make_rows(100), None)
    whole = mine(task, 2, MineConfig(skip_top=1))
    embeddings, said = (embed(task.anchors), embed(task.documents)), list[int]()
    monkeypatch.setattr(cpuft.train.mine, "_ANCHORS_AT_ONCE", 32)
    found = search_negatives(*embeddings, task, MineConfig(negatives=2, skip_top=1), said.append)
    assert found.numbers.tolist() == whole.numbers.tolist()
    assert said == [*range(32, len(task.anchors), 32), len(task.anchors)]


@pytest.mark.parametrize("columns, count", [(7, 3), (7, 9), (4096, 5), (4111, 63), (64, 1), (97, 1)])
def test_the_largest_scores_are_found(columns: int, count: int) -> None:
    torch.manual_seed(0)
    scores = torch.randn(11, columns)
    scores[:, -1] = 9.0
    values, places = find_largest(scores, count)
    wanted = scores.topk(min(count, columns)).values
    assert values.sort(1, descending=True).values.equal(wanted)
    assert scores.gather(1, places).equal(values)


def test_too_few_documents_are_refused() -> None:
    task = make_mining_task(["a", "b"], ["1", "2"], None)
    with pytest.raises(CpuftError, match="no anchor has over 1 documents besides its positives"):
        check_rules(task, MineConfig(negatives=2))
    with pytest.raises(CpuftError, match="of the 3 most similar documents 2 are skipped, so that fewer than 2 negativ"):
        check_rules(task, MineConfig(negatives=2, skip_top=2, search_depth=3))


def test_an_embedder_mines_with_its_prompts() -> None:
    class Model:
        form = EmbeddingForm(prompts={"query": "ask ", "passage": "say "})
        asked: ClassVar[list[tuple[list[str], str]]] = []

        def embed(self, texts: list[str], prompt: str) -> Embeddings:
            self.asked.append((texts, prompt))
            return embed(texts)

    model: Any = Model()
    found = mine_negatives(model, ["a 1", "a 1", "b 2"], ["x 1", "y 1", "z 2"], ["w 1"], MineConfig(negatives=2))
    assert found["a 1"] == ["w 1", "z 2"]
    assert {anchor: len(negatives) for anchor, negatives in found.items()} == {"a 1": 2, "b 2": 2}
    assert model.asked == [(["a 1", "b 2"], "ask "), (["w 1", "x 1", "y 1", "z 2"], "say ")]
