"""Texts that are equal or nearly so, and have different labels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from cpuft.judge.predictions import RunPredictions

MOST_CHARACTERS = 500
"""The beginning of each text that predictions.parquet has, so that longer texts cannot be compared."""
_MOST_TEXTS = 50_000
"""Largest number of different texts among which near-identical ones are searched."""
_MOST_SEARCHES = 2_000
"""Largest number of wrong examples for which near-identical texts are searched."""
_NEIGHBOURS = 8
_LEAST_SIMILARITY = 0.9
_BLOCK_MEGABYTES = 64

_Groups = dict[tuple[str, ...], dict[Hashable, int]]
"""The first row with each label, by texts without differences of case and spaces."""


def find_contradictions(predictions: RunPredictions, wrong: Sequence[int]) -> list[tuple[int, int, float]]:
    """Return (row, later row, similarity from 0.9 to 1.0) of similar texts with different labels, equal ones first.

    Texts that differ only in case and spaces are equal; of these, only the first row with each label counts. Others are
    searched for the first 2,000 rows of `wrong` only, the worst one first, not for tags, and not among more than
    50,000 texts. The similarity is the cosine of the n-grams of characters, weighted by TF-IDF; of two texts, the lower
    one. Texts of 500 characters or more are left out. The list is empty without texts, and for kinds without classes.
    """
    kind, table = predictions.about.kind, predictions.table
    if kind not in ("class", "labels", "tags") or "text" not in table.column_names:
        return []
    groups: _Groups = {}
    for row, (texts, label) in enumerate(zip(table.column("text").to_pylist(), table.column("label").to_pylist())):
        if texts and all(len(text) < MOST_CHARACTERS for text in texts):
            key = tuple(" ".join(text.casefold().split()) for text in texts)
            groups.setdefault(key, {}).setdefault(tuple(label) if isinstance(label, list) else label, row)
    equal = [(first, row, 1.0) for first, *others in map(dict.values, groups.values()) for row in others]
    # Sentences that differ in a name may well have different tags.
    is_searched = kind != "tags" and 1 < len(groups) <= _MOST_TEXTS
    return equal + (_find_similar(groups, wrong) if is_searched else [])


def _find_similar(groups: _Groups, wrong: Sequence[int]) -> list[tuple[int, int, float]]:
    from scipy.sparse import hstack
    from sklearn import config_context
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
    from sklearn.neighbors import NearestNeighbors
    from sklearn.pipeline import make_pipeline

    owners = {row: (number, label) for number, rows in enumerate(groups.values()) for label, row in rows.items()}
    asked = [row for row in wrong if row in owners][:_MOST_SEARCHES]
    if not asked:
        return []
    grams = HashingVectorizer(
        analyzer="char_wb", ngram_range=(3, 4), n_features=1 << 18, alternate_sign=False, norm=None, dtype=np.float32
    )
    # Both texts of a row have the same weight, so that a long equal one does not hide that the short ones differ.
    parts = [make_pipeline(grams, TfidfTransformer(sublinear_tf=True)).fit_transform(texts) for texts in zip(*groups)]
    vectors = hstack(parts, format="csr")
    with config_context(working_memory=_BLOCK_MEGABYTES):
        nearest = NearestNeighbors(n_neighbors=min(_NEIGHBOURS, len(groups)), metric="cosine").fit(vectors)
        places = nearest.kneighbors(vectors[[owners[row][0] for row in asked]], return_distance=False)
    rows_of, found = list(groups.values()), dict[tuple[int, int], float]()
    for row, neighbours in zip(asked, places.tolist()):
        number, label = owners[row]
        for other in neighbours:
            similarity = min(float(part[number].multiply(part[other]).sum()) for part in parts)
            different = [one for its_label, one in rows_of[other].items() if its_label != label]
            if other != number and different and similarity >= _LEAST_SIMILARITY:
                found[min(row, different[0]), max(row, different[0])] = min(similarity, 1.0)
    return [(*pair, similarity) for pair, similarity in sorted(found.items(), key=lambda one: (-one[1], one[0]))]
