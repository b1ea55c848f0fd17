"""What can be had without a model, compared with plain scripts."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_matrix, hstack
from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer, TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier

from cpuft.judge.simple_models import Bm25, fit
from cpuft.train.data.demo import make_pairs

PAIRS = make_pairs(120, 1)
SINGLES = [(first,) for first, _, _ in PAIRS]
CLASSES = [("was" in text) + 2 * ("noon" in text or "winter" in text) for (text,) in SINGLES]


def count_plainly(texts: list[str], fitted: list[str]) -> Any:
    """TF-IDF of words, pairs of words and groups of four characters, as the documentation of scikit-learn shows it."""
    words = CountVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b").build_analyzer()
    groups = CountVectorizer(analyzer="char_wb", ngram_range=(4, 4)).build_analyzer()
    counts = HashingVectorizer(
        analyzer=lambda text: words(text) + ["\0" + group for group in groups(text)],
        n_features=2**16,
        norm=None,
        alternate_sign=False,
        dtype=np.float32,
    )
    return TfidfTransformer(sublinear_tf=True).fit(counts.transform(fitted)).transform(counts.transform(texts))


def test_classes_equal_a_plain_script() -> None:
    texts = [text for (text,) in SINGLES]
    model = OneVsRestClassifier(LogisticRegression(C=10.0, tol=1e-3))
    model.fit(count_plainly(texts[:80], texts[:80]), CLASSES[:80])
    found = fit("class", SINGLES[:80], [float(one) for one in CLASSES[:80]], 4)(SINGLES[80:])
    assert found.tolist() == model.predict(count_plainly(texts[80:], texts[:80])).tolist()
    assert len({*found}) > 1


def test_several_classes_equal_a_plain_script() -> None:
    texts, marks = [text for (text,) in SINGLES], [[one & 1, one >> 1] for one in CLASSES]
    model = OneVsRestClassifier(LogisticRegression(C=10.0, tol=1e-3))
    model.fit(count_plainly(texts[:80], texts[:80]), np.asarray(marks[:80]))
    labels = [tuple(np.flatnonzero(row).tolist()) for row in marks]
    found = fit("labels", SINGLES[:80], labels[:80], 2)(SINGLES[80:])
    assert found.tolist() == model.predict(count_plainly(texts[80:], texts[:80])).tolist()


def test_pairs_equal_a_plain_script() -> None:
    learned, others = PAIRS[:80], PAIRS[80:]
    fitted = [text for row in learned for text in row[:2]]

    def join(rows: list[tuple[str, str, int]]) -> Any:
        one, other = (count_plainly([str(row[place]) for row in rows], fitted) for place in (0, 1))
        product = one.multiply(other)
        return hstack([product, abs(one - other), csr_matrix(5 * product.sum(1).reshape(-1, 1))], "csr", np.float32)

    model = LogisticRegression(C=10.0, tol=1e-3).fit(join(learned), [row[2] for row in learned])
    found = fit("class", [row[:2] for row in learned], [float(row[2]) for row in learned], 2)
    predicted = found([row[:2] for row in others])
    assert predicted.tolist() == model.predict(join(others)).tolist()
    assert {*predicted} == {0.0, 1.0}


def test_one_class_is_always_predicted() -> None:
    assert fit("class", SINGLES[:3], [1.0, 1.0, 1.0], 2)(SINGLES[:2]).tolist() == [1.0, 1.0]


def test_the_mean_and_the_cosine() -> None:
    assert fit("score", SINGLES[:2], [1.0, 2.0], 0)(SINGLES[:3]).tolist() == [1.5] * 3
    predict = fit("similarity", [row[:2] for row in PAIRS], [0.0] * len(PAIRS), 0)
    found = predict([("the same text", "the same text"), ("one thing", "xyz"), ("", "")])
    assert found == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)


def test_a_word_has_its_most_frequent_tag_and_an_unknown_word_that_of_all() -> None:
    predict = fit("tags", [("a", "b"), ("b", "b", "c"), ("b",)], [(0, 1), (2, 2, 0), (1,)], 3)
    assert predict([("b", "a", "new"), ()]) == [[1, 0, 0], []]


def score_plainly(query: str, document: str, documents: list[str]) -> float:
    """Lucene's BM25: https://lucene.apache.org, BM25Similarity."""
    split = [re.findall(r"\w+", text.lower()) for text in documents]
    words, mean = re.findall(r"\w+", document.lower()), sum(map(len, split)) / len(split)
    score = 0.0
    for word in re.findall(r"\w+", query.lower()):
        having, times = sum(word in one for one in split), words.count(word)
        rarity = math.log(1 + (len(split) - having + 0.5) / (having + 0.5))
        score += rarity * times / (times + 1.2 * (1 - 0.75 + 0.75 * len(words) / mean))
    return score


def test_bm25_is_its_formula_and_ranks_equal_scores_by_their_number() -> None:
    choose = random.Random(3).choices
    documents = [" ".join(choose("abcdefgh", k=length)) for length in (3, 5, 9, 4, 7, 3, 8, 2)] + ["z"] * 4
    queries = ["a b", "Z", "a a h", "none of these"]
    wanted = np.asarray([[score_plainly(query, one, documents) for one in documents] for query in queries])
    bm25 = Bm25(documents)
    for row, query in zip(wanted, queries):
        assert bm25.score([query] * len(row), np.arange(len(row))) == pytest.approx(row, rel=1e-5)
    best = np.argsort(-wanted.round(5), axis=1, kind="stable")
    assert bm25.rank(queries, 5).tolist() == best[:, :5].tolist()
    assert bm25.rank(queries, 99).tolist() == best.tolist()
    assert bm25.rank(queries, 5)[1].tolist() == [8, 9, 10, 11, 0]
