"""What could be had in a second instead of a trained model, by scikit-learn: counts, BM25, guesses. No torch."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.tasks import EMBEDDING_KINDS, LABEL_KINDS

Texts = Sequence[tuple[str, ...]]
"""One or two texts for each example; for the kind tags, its words."""
Predict = Callable[[Texts], Any]
"""Returns for each example a class number or a score; for the kind labels, 0 or 1 for each class; for the kind tags, a
list with a class number for each word."""
Encode = Callable[[list[str]], Any]
"""Returns a matrix with the features of each text, perhaps a sparse one, fp32, shape (texts, features)."""

KINDS = (*LABEL_KINDS, *EMBEDDING_KINDS, "relevance")
MOST_CLASSES = 100
"""Largest number of classes for which a linear model is fitted: each class takes as much time."""
LONGEST_TEXT = 10_000
"""Number of characters of a text that are counted."""
_FEATURES = 1 << 16
_C = 10.0
"""Inverse strength of the regularization of logistic regression."""
_COSINE = 5.0
"""Factor of the cosine of two texts, which counts for more than the product of a word."""
_WORD = r"(?u)\b\w+\b"
_SATURATION, _LENGTH_SHARE = 1.2, 0.75
"""The parameters k1 and b of BM25, as in Lucene."""
_SCORES_AT_ONCE = 1 << 22


def name_baseline(kind: str) -> str:
    """Return what the baseline of a kind of task is: "BM25" for pairs and relevance, other words for score, tags and
    similarity, and for all other kinds, also unknown ones, "word and character counts with a linear model".
    """
    names = {
        "score": "the mean of the training scores",
        "tags": "the most frequent tag of each word",
        "similarity": "cosine of word and character counts",
        "pairs": "BM25",
        "relevance": "BM25",
    }
    return names.get(kind, "word and character counts with a linear model")


def fit(kind: str, texts: Texts, labels: Sequence[Any], classes: int) -> Predict:
    """Fit the baseline of a kind but pairs and relevance; return its function of texts. `classes` is for labels."""
    if kind == "tags":
        return _fit_tags(texts, labels)
    if kind == "score":
        mean = float(np.mean(labels))
        return lambda others: np.full(len(others), mean)
    encode, columns = _fit_counts(texts)
    if kind == "similarity":
        return lambda others: _multiply_rows(*encode_columns(encode, others))
    return fit_linear_model(encode, columns, labels, classes if kind == "labels" else 0)


def _fit_counts(texts: Texts) -> tuple[Encode, list[Any]]:
    """Return a function that makes TF-IDF vectors of words, pairs and groups of characters, and these of the texts."""
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer, TfidfTransformer

    list_words = CountVectorizer(token_pattern=_WORD, ngram_range=(1, 2)).build_analyzer()
    list_groups = CountVectorizer(analyzer="char_wb", ngram_range=(4, 4)).build_analyzer()

    def analyze(text: str) -> list[str]:
        text = text[:LONGEST_TEXT]
        # A group of characters is another feature than a word of the same characters.
        return [*list_words(text), *(f"\0{group}" for group in list_groups(text))]

    # Unlike a vocabulary, hashes take no memory that grows with the texts.
    count = HashingVectorizer(
        analyzer=analyze, n_features=_FEATURES, norm=None, alternate_sign=False, dtype=np.float32
    ).transform
    counts = [count(column) for column in zip(*texts)]
    weigh = TfidfTransformer(sublinear_tf=True).fit(vstack(counts) if len(counts) > 1 else counts[0])
    return lambda some: weigh.transform(count(some), copy=False), [weigh.transform(one, copy=False) for one in counts]


def encode_columns(encode: Encode, texts: Texts) -> list[Any]:
    """Return a list: the features of all first texts, and then those of all second texts if examples have two."""
    return [encode(list(column)) for column in zip(*texts)]


def fit_linear_model(encode: Encode, columns: list[Any], labels: Sequence[Any], classes: int) -> Predict:
    """Fit logistic regression to encoded columns; `classes` is 0, or their number if each label is a tuple of classes.

    Of two texts, the features are the products and the absolute differences of those of both, and their cosine.
    """
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    wanted: Any = np.asarray(labels) if not classes else mark_classes(labels, classes)
    model: Any = LogisticRegression(C=_C, tol=1e-3)
    if classes or len(set(labels)) > 2:
        model = OneVsRestClassifier(model)
    elif len(set(labels)) == 1:
        model = DummyClassifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a class without examples, and of a fit that is not exact
        model.fit(_join_features(columns), wanted)
    return lambda others: model.predict(_join_features(encode_columns(encode, others)))


def mark_classes(labels: Sequence[Sequence[int]], classes: int) -> NDArray[np.float32]:
    """Return 1 for each class that an example has, else 0: fp32, shape (examples, classes)."""
    marks = np.zeros((len(labels), classes), np.float32)
    for row, numbers in zip(marks, labels):
        row[list(numbers)] = 1
    return marks


def _multiply_rows(one: Any, other: Any) -> NDArray[Any]:
    return np.asarray(one.multiply(other).sum(1)).ravel()


def _join_features(columns: list[Any]) -> Any:
    from scipy.sparse import csr_matrix, hstack

    first, *others = map(csr_matrix, columns)
    if not others:
        return first
    (second,) = others
    parts = (first.multiply(second), abs(first - second), _COSINE * _multiply_rows(first, second)[:, None])
    return hstack([csr_matrix(part) for part in parts], "csr", np.float32)


def _fit_tags(texts: Texts, labels: Sequence[Sequence[int]]) -> Predict:
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for words, tags in zip(texts, labels):
        for word, tag in zip(words, tags):
            found[word][tag] += 1
    usual = Counter(tag for tags in labels for tag in tags).most_common(1)[0][0]
    tag_of = {word: counts.most_common(1)[0][0] for word, counts in found.items()}
    return lambda others: [[tag_of.get(word, usual) for word in words] for words in others]


class Bm25:
    """Scores of documents for queries: Okapi BM25 of words, with the constants and the IDF of Lucene."""

    def __init__(self, documents: Sequence[str]) -> None:
        from sklearn.feature_extraction.text import CountVectorizer

        self._counter = CountVectorizer(token_pattern=_WORD, dtype=np.float32)
        weights = self._counter.fit_transform(text[:LONGEST_TEXT] for text in documents)
        lengths = np.asarray(weights.sum(1)).ravel()
        having = np.bincount(weights.indices, minlength=weights.shape[1])
        rarity = np.log1p((len(documents) - having + 0.5) / (having + 0.5))
        norms = _SATURATION * (1 - _LENGTH_SHARE + _LENGTH_SHARE * lengths / lengths.mean())
        times = np.repeat(norms, np.diff(weights.indptr))
        weights.data = (rarity[weights.indices] * weights.data / (weights.data + times)).astype(np.float32)
        self._weights = weights

    def score(self, queries: Sequence[str], documents: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the score of the n-th query for the document with the number `documents[n]`: fp32, (queries,)."""
        return _multiply_rows(self._counter.transform(queries), self._weights[documents])

    def rank(self, queries: Sequence[str], count: int) -> NDArray[np.int64]:
        """Return each query's `count` best documents, or all, best first, equal ones by number: (queries, numbers)."""
        asked, documents = self._counter.transform(queries), self._weights.T.tocsc()
        count, size = min(count, documents.shape[1]), max(1, _SCORES_AT_ONCE // documents.shape[1])
        best = np.empty((len(queries), count), np.int64)
        for start in range(0, len(queries), size):
            for row, scores in enumerate((asked[start : start + size] @ documents).toarray(), start):
                least = np.partition(scores, -count)[-count]
                found = np.flatnonzero(scores >= least)
                best[row] = found[np.argsort(-scores[found], kind="stable")[:count]]
        return best
