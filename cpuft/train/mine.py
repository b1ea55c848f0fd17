"""Hard negatives: for each anchor, the documents that are most similar to it and are none of its positives.

The search is exact, and block by block, so that the scores of a block are all that is in memory beside the embeddings.
The rules are those of `mine_hard_negatives` of sentence-transformers, with two differences: an anchor's own text is
never its negative, and without --search-depth all documents are candidates, not only some dozens of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config.mine import MineConfig
from cpuft.errors import CpuftError, counted

if TYPE_CHECKING:
    from cpuft.train.embedder import Embedder, Embeddings

_ANCHORS_AT_ONCE, _DOCUMENTS_AT_ONCE = 2048, 8192
"""Size of a block of scores: 64 MB in fp32."""
_GROUP = 32
"""Number of neighbouring scores of which only the maximum is compared first."""


@dataclass(frozen=True)
class MiningTask:
    """The texts of a mining, each once, and what connects them."""

    anchors: list[str]
    """The different anchors in the order of their first rows."""
    documents: list[str]
    """The different texts among which negatives are searched: those of the corpus, then the positives."""
    positives: list[NDArray[np.int64]]
    """For each anchor, the numbers of its positives in `documents`, in the order of the rows, each once."""
    itself: NDArray[np.int64]
    """For each anchor, the number of its own text in `documents`, or -1; shape (anchors,)."""


@dataclass(frozen=True)
class Negatives:
    """What a mining found for each anchor of a `MiningTask`."""

    numbers: NDArray[np.int64]
    """Numbers of documents, the most similar ones first; -1 where there are too few. Shape (anchors, count)."""
    scores: NDArray[np.float32]
    """Their scores; minus infinity where there are too few. The same shape."""

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Which anchors have all negatives that were asked for; shape (anchors,)."""
        return np.asarray((self.numbers >= 0).all(1))


def make_mining_task(anchors: Sequence[str], positives: Sequence[str], corpus: Sequence[str] | None) -> MiningTask:
    """Return the task for rows of an anchor and a positive; equal anchors share all their positives. Without `corpus`,
    negatives are searched among the positives alone. Raises ValueError: there are not as many anchors as positives.
    """
    documents = {text: number for number, text in enumerate(dict.fromkeys([*(corpus or ()), *positives]))}
    own: dict[str, dict[int, None]] = {}
    for anchor, positive in zip(anchors, positives, strict=True):
        own.setdefault(anchor, {})[documents[positive]] = None
    itself = np.asarray([documents.get(anchor, -1) for anchor in own], np.int64)
    return MiningTask(list(own), list(documents), [np.asarray(list(one), np.int64) for one in own.values()], itself)


def mine_negatives(
    embedder: Embedder,
    anchors: Sequence[str],
    positives: Sequence[str],
    corpus: Sequence[str] | None,
    rules: MineConfig,
) -> dict[str, list[str]]:
    """Return for each different anchor of the rows its --negatives, or fewer, the most similar ones first. Raises
    CpuftError: the rules leave every anchor fewer candidates; ValueError: there are not as many positives as anchors.
    """
    task = make_mining_task(anchors, positives, corpus)
    check_rules(task, rules)
    queries = embedder.embed(task.anchors, embedder.form.query_prompt)
    documents = embedder.embed(task.documents, embedder.form.document_prompt)
    found = search_negatives(queries, documents, task, rules)
    return {
        anchor: [task.documents[number] for number in numbers if number >= 0]
        for anchor, numbers in zip(task.anchors, found.numbers.tolist())
    }


def check_rules(task: MiningTask, rules: MineConfig) -> None:
    """Raise CpuftError if --skip-top, --search-depth or too few documents leave every anchor fewer than --negatives, at
    any scores.
    """
    if rules.search_depth and rules.search_depth - rules.skip_top < rules.negatives:
        raise CpuftError(
            f"of the {rules.search_depth} most similar documents {rules.skip_top} are skipped, so that fewer than "
            f"{counted(rules.negatives, 'negative')} are left: raise --search-depth, or lower --skip-top or --negatives"
        )
    most = max(len(task.documents) - len(own) for own in task.positives)
    if most < rules.skip_top + rules.negatives:
        raise CpuftError(f"no anchor has over {most} documents besides its positives: lower --negatives or --skip-top")


def search_negatives(
    anchors: Embeddings,
    documents: Embeddings,
    task: MiningTask,
    rules: MineConfig,
    say: Callable[[int], None] = lambda done: None,
) -> Negatives:
    """Return the negatives of all anchors, of equal scores the lower number first, from embeddings of the task's texts,
    which need not be normalised and may be memory maps; after each block, `say` gets the number of anchors done.
    """
    numbers = np.full((len(task.anchors), rules.negatives), -1, np.int64)
    scores = np.full((len(task.anchors), rules.negatives), -np.inf, np.float32)
    for start in range(0, len(task.anchors), _ANCHORS_AT_ONCE):
        block = np.arange(start, min(start + _ANCHORS_AT_ONCE, len(task.anchors)))
        numbers[block], scores[block] = _search_block(anchors, documents, task, block, rules)
        say(start + len(block))
    return Negatives(numbers, scores)


def _search_block(
    anchors: Embeddings, documents: Embeddings, task: MiningTask, block: NDArray[np.int64], rules: MineConfig
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    queries = _load_normalized(anchors, block)
    limits = _compute_limits(queries, documents, task, block, rules)
    excluded = _list_excluded(task, block)
    # Which documents are not allowed is known beforehand. So only as many documents are kept as are needed, unless the
    # rules count those, too, that are not allowed.
    kept = rules.skip_top + rules.negatives
    if rules.search_depth:
        kept = rules.search_depth + max(len(own) for own in task.positives)
    best, found = torch.full((len(block), 0), -torch.inf), torch.zeros((len(block), 0), dtype=torch.int64)
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        end = min(start + _DOCUMENTS_AT_ONCE, len(documents))
        scores = queries @ _load_normalized(documents, slice(start, end)).t()
        if not rules.search_depth:
            is_here = (excluded >= start) & (excluded < end)
            scores[is_here.nonzero()[:, 0], excluded[is_here] - start] = -torch.inf
            scores.masked_fill_(scores > limits[:, None], -torch.inf)
        values, places = find_largest(scores, kept)
        best, found = torch.cat([best, values], 1), torch.cat([found, places + start], 1)
        if best.shape[1] > kept:
            best, chosen = best.topk(kept, sorted=False)
            found = found.gather(1, chosen)
    if rules.search_depth:
        is_excluded = (found[:, :, None] == excluded[:, None, :]).any(2)
        best = best.masked_fill(is_excluded | (best > limits[:, None]), -torch.inf)
    if rules.min_score > -1.0:
        best = best.masked_fill(best < rules.min_score, -torch.inf)
    # Of equal scores, the document with the lower number is first, so that the result does not depend on the blocks.
    found, order = found.sort(dim=1, stable=True)
    best, order = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    found = found.gather(1, order).masked_fill(best == -torch.inf, -1)
    last = rules.skip_top + rules.negatives  # at most --search-depth
    missing = (0, max(0, last - found.shape[1]))
    found = torch.nn.functional.pad(found, missing, value=-1)[:, rules.skip_top : last]
    best = torch.nn.functional.pad(best, missing, value=-torch.inf)[:, rules.skip_top : last]
    return found.numpy(), best.numpy()


def find_largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest scores of each row, and their columns, in any order: each (rows, count or columns if fewer).

    Only groups of neighbours with the largest maxima are sorted, several times faster than `topk` of whole rows.
    """
    rows, columns = scores.shape
    count = min(count, columns)
    groups = columns // _GROUP
    if groups <= 2 * count:
        values, places = scores.topk(count, sorted=False)
        return values, places
    rest = scores[:, groups * _GROUP :]
    grouped = scores[:, : groups * _GROUP].view(rows, groups, _GROUP)
    chosen = grouped.amax(2).topk(count, sorted=False).indices
    candidates = grouped.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)
    places = (chosen[:, :, None] * _GROUP + torch.arange(_GROUP)).flatten(1)
    if rest.shape[1]:
        candidates = torch.cat([candidates, rest], 1)
        places = torch.cat([places, torch.arange(groups * _GROUP, columns).expand(rows, -1)], 1)
    values, order = candidates.topk(count, sorted=False)
    return values, places.gather(1, order)


def _load_normalized(embeddings: Embeddings, rows: slice | NDArray[np.int64]) -> torch.Tensor:
    found = torch.from_numpy(np.array(embeddings[rows], np.float32))
    return torch.nn.functional.normalize(found, dim=-1)


def _compute_limits(
    queries: torch.Tensor, documents: Embeddings, task: MiningTask, block: NDArray[np.int64], rules: MineConfig
) -> torch.Tensor:
    """Return the highest score that a negative of each anchor in `block` may have; shape (anchors of the block,)."""
    limits = torch.full((len(block),), torch.inf)
    if rules.max_score < 1.0:
        limits.fill_(rules.max_score)
    has_margin, has_relative = rules.absolute_margin > -1.0, rules.relative_margin > -1.0
    if not has_margin and not has_relative:
        return limits
    for place, anchor in enumerate(block):
        least = (_load_normalized(documents, task.positives[anchor]) @ queries[place]).min()
        if has_margin:
            limits[place] = min(limits[place], least - rules.absolute_margin)
        if has_relative:
            limits[place] = min(limits[place], least - least.abs() * rules.relative_margin)
    return limits


def _list_excluded(task: MiningTask, block: NDArray[np.int64]) -> torch.Tensor:
    """Return the documents that are never an anchor's negatives, its positives and own text, filled up with -1."""
    own = [(*task.positives[anchor], task.itself[anchor]) for anchor in block]
    excluded = torch.full((len(block), max(map(len, own))), -1)
    for place, numbers in enumerate(own):
        excluded[place, : len(numbers)] = torch.tensor(numbers)
    return excluded
