"""The built-in task."""

from __future__ import annotations

from collections import Counter

from cpuft.train.data.demo import make_pairs


def test_the_same_seed_gives_the_same_pairs() -> None:
    assert make_pairs(50, 1) == make_pairs(50, 1)
    assert make_pairs(50, 1) != make_pairs(50, 2)


def test_both_labels_are_even_and_lengths_do_not_tell() -> None:
    pairs = make_pairs(4000, 3)
    counts = Counter(label for _, _, label in pairs)
    assert 0.47 < counts[1] / 4000 < 0.53
    lengths = {label: [len(a) + len(b) for a, b, same in pairs if same == label] for label in (0, 1)}
    means = [sum(values) / len(values) for values in lengths.values()]
    assert abs(means[0] - means[1]) < 2


def test_shared_words_alone_are_not_enough() -> None:
    """The best threshold on the share of common words gets less than nine in ten right."""
    pairs = make_pairs(2000, 4)
    shares = [(len(words(a) & words(b)) / len(words(a) | words(b)), same) for a, b, same in pairs]
    best = max(sum((share > cut / 50) == bool(same) for share, same in shares) for cut in range(50)) / len(pairs)
    assert best < 0.9


def words(text: str) -> set[str]:
    return set(text.lower().rstrip(".").replace(",", "").split())
