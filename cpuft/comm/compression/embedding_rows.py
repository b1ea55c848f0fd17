"""Exchange of word embedding gradients by rows: all rows but those of an update's tokens are zero on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.compression.hierarchical import HostGroups
from cpuft.comm.compression.int8 import all_gather, decode_message, encode_message, encoded_bytes
from cpuft.comm.compression.powersgd import EXACT_UPDATES, P_BITS
from cpuft.comm.compression.table import to_wire_type
from cpuft.comm.process_group import ProgressThread
from cpuft.compressions import COMPRESSION_FACTS, COMPRESSIONS_WITH_FEEDBACK

_OTHER_LOOKUPS = "_cpuft_other_lookups"
"""Attribute of an embedding module that looks up more than a batch's input ids."""


def find_embedding(model: torch.nn.Module) -> torch.nn.Embedding | None:
    """Return the word embedding whose gradient can be exchanged by rows, or None.

    None also if there are several, its weight is frozen or shared, or `check_lookups` has returned False for it.
    """
    owners = list(_list_embedding_owners(model))
    try:
        module = owners[0].get_input_embeddings() if len(owners) == 1 else None
    except (AttributeError, NotImplementedError):
        return None
    if type(module) is not torch.nn.Embedding or not module.weight.requires_grad:
        return None
    # A weight that an output layer or a second embedding shares has gradients in every row.
    users = [owner for owner in model.modules() if any(p is module.weight for p in owner.parameters(recurse=False))]
    return module if len(users) == 1 and not hasattr(module, _OTHER_LOOKUPS) else None


def _list_embedding_owners(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the outermost modules that have get_input_embeddings(): in a SentenceTransformer, one that it contains."""
    if hasattr(model, "get_input_embeddings"):
        yield model
        return
    for child in model.children():
        yield from _list_embedding_owners(child)


def check_lookups(model: torch.nn.Module, input_ids: torch.Tensor, forward: Callable[[], object]) -> bool:
    """Run a forward pass; return whether each lookup of the word embedding has just a batch's input ids, in any order.

    True without an embedding. If False, as for GPT-2 with token types, `find_embedding` returns None from now on.
    """
    embedding = find_embedding(model)
    if embedding is None:
        forward()
        return True
    lookups: list[torch.Tensor] = []
    hook = embedding.register_forward_hook(
        lambda module, args, kwargs, output: lookups.append(args[0] if args else kwargs["input"]), with_kwargs=True
    )
    try:
        forward()
    finally:
        hook.remove()
    # Some models transpose the ids first, so the order must not matter.
    expected = input_ids.flatten().sort().values
    only_ids = all(torch.equal(tokens.flatten().sort().values, expected) for tokens in lookups)
    if not only_ids:
        setattr(embedding, _OTHER_LOOKUPS, True)
    return only_ids


@dataclass(frozen=True)
class RowRoutes:
    """Which rows of an update a rank sends to whom, and which ones it receives.

    Of n ranks, rank r averages the rows r, r + n, r + 2n and so on, in every update, because it keeps the rounding
    error of a row's mean for the next one. Contiguous shares would be uneven: small token ids are frequent.
    """

    rows: torch.Tensor
    """All rows of the update, int64: first those that rank 0 averages, ascending, then those of rank 1, and so on."""
    row_counts: list[int]
    own: torch.Tensor
    """The rows of this rank's tokens, int64, in the same order."""
    own_counts: list[int]
    received: list[torch.Tensor]
    """For each sending rank, ascending int64 indices into the rows that this rank averages; none for this rank."""


def plan_row_routes(tokens: Sequence[torch.Tensor], vocabulary: int, rank: int) -> RowRoutes:
    """Return what `rank` sends and receives; `tokens` are each rank's ids, int64, (n,). RuntimeError: one is no row."""
    ranks, flat = len(tokens), torch.cat(list(tokens))
    rows = _find_rows(flat, vocabulary)
    own = torch.unique(tokens[rank])
    sender = torch.repeat_interleave(torch.arange(ranks), torch.tensor([len(one) for one in tokens]))
    is_received = (flat % ranks == rank) & (sender != rank)
    found = torch.unique(sender[is_received] * vocabulary + flat[is_received])
    averaged = rows[rows % ranks == rank]
    counts = torch.bincount(found // vocabulary, minlength=ranks).tolist()
    return RowRoutes(
        rows[(rows % ranks).argsort(stable=True)],
        torch.bincount(rows % ranks, minlength=ranks).tolist(),
        own[(own % ranks).argsort(stable=True)],
        torch.bincount(own % ranks, minlength=ranks).tolist(),
        list(torch.split(torch.searchsorted(averaged, found % vocabulary), counts)),
    )


def _find_rows(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    # Unlike an index, scatter_ refuses negative numbers.
    return torch.zeros(vocabulary, dtype=torch.bool).scatter_(0, tokens, True).nonzero()[:, 0]


def average_rows(
    own: torch.Tensor, routes: RowRoutes, unsent: torch.Tensor, group: dist.ProcessGroup, bits: int
) -> torch.Tensor:
    """Return the mean of embedding rows over a group whose ranks each have only some of the rows.

    Collective; it blocks until the mean is there. `own`, (rows, width), is in the order of `routes.own`, and the mean
    in that of `routes.rows`, with the same bits on all ranks. Of `unsent`, fp32, (vocabulary, width), the rounding
    errors of the rows that this rank sends or averages are added, and replaced by the new ones.
    """
    ranks, rank, width = group.size(), group.rank(), own.shape[1]
    summed = unsent.index_select(0, routes.own).add_(own)
    parts, own_rows = torch.split(summed, routes.own_counts), torch.split(routes.own, routes.own_counts)

    # Send the rows that other ranks average. A rank has a message for itself, too, which nobody reads: traffic is
    # counted as if a message had the shares of all ranks.
    messages = []
    for to, (part, some) in enumerate(zip(parts, own_rows, strict=True)):
        if to == rank:
            messages.append(torch.zeros(encoded_bytes(part.numel(), 1, bits), dtype=torch.int8))
            continue
        messages.append(encode_message(part.reshape(-1), error := torch.empty(part.numel()), bits))
        unsent.index_copy_(0, some, error.view(part.shape))
    sizes = [len(one) * width for one in routes.received]
    sizes[rank] = parts[rank].numel()
    nbytes = [encoded_bytes(size, 1, bits) for size in sizes]
    arrived = torch.empty(sum(nbytes), dtype=torch.int8)
    dist.all_to_all_single(arrived, torch.cat(messages), nbytes, [len(one) for one in messages], group=group)

    # Average this rank's share of the rows; its own part of them was not rounded.
    averaged = torch.split(routes.rows, routes.row_counts)[rank]
    total = torch.zeros(max(routes.row_counts), width)
    torch.index_select(unsent, 0, averaged, out=total[: len(averaged)])
    total.index_copy_(0, torch.searchsorted(averaged, own_rows[rank]), parts[rank])
    for places, message in zip(routes.received, torch.split(arrived, nbytes), strict=True):
        if len(places):
            numbers = torch.empty(len(places), width)
            decode_message(message, numbers.view(-1), bits)
            total.index_add_(0, places, numbers)
    mean, error = total.div_(ranks).view(-1), torch.empty(total.numel())
    message = encode_message(mean, error, bits)
    # The next mean is divided by the number of ranks, so this rank keeps that many times the error of this one.
    unsent.index_copy_(0, averaged, error.view(total.shape)[: len(averaged)].mul_(ranks))

    # Send the means to all ranks.
    means = message.new_empty(ranks * len(message))
    all_gather(means, message, group=group)
    result = own.new_empty(len(routes.rows), width)
    for part, message in zip(torch.split(result, routes.row_counts), means.view(ranks, -1), strict=True):
        decode_message(message, part.view(-1), bits)
    return result


class RowExchange:
    """Averages the gradient of a model's word embedding over the ranks. Making one is collective."""

    def __init__(
        self, embedding: torch.nn.Embedding, compression: str, group: dist.ProcessGroup, hosts: HostGroups | None = None
    ) -> None:
        self.weight, self._compression, self._group, self._hosts = embedding.weight, compression, group, hosts
        # What was not sent of a row is added when this rank sends or averages it again. Other ranks than leaders send
        # nothing.
        has_feedback = compression in COMPRESSIONS_WITH_FEEDBACK and (hosts is None or hosts.leaders is not None)
        self._unsent = torch.zeros(embedding.weight.shape) if has_feedback else None
        self._updates = 0
        self._thread: ProgressThread | None = None
        """Averages late rows while the next update computes."""
        self._late: tuple[torch.Tensor, Future[torch.Tensor]] | None = None
        """Late rows and their mean, which was not applied yet."""
        if has_feedback and hosts is None and COMPRESSION_FACTS[compression].has_late_rows:
            self._thread = ProgressThread("embedding rows")
            # A group of its own, because the thread sends and receives at any time.
            self._group = dist.new_group(dist.get_process_group_ranks(group), timeout=getattr(group, "timeout", None))

    @property
    def _bits(self) -> int:
        return P_BITS if self._compression == "powersgd" and self._updates > EXACT_UPDATES else 8

    @torch.no_grad()
    def average(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Average the gradient in place, and return the rows that may differ from zero: int64, ascending, each once.

        All ranks call this after the backward pass, before anything reads the gradient, with the same `tokens`: for
        each rank, all that it may have looked up since the gradient was zero. Late rows (powersgd without `hosts`,
        after the first 6 updates) become the mean of the update before, which is zero at first.
        """
        gradient = self.weight.grad
        assert gradient is not None
        self._updates += 1
        flat = [one.reshape(-1) for one in tokens]
        rows = _find_rows(torch.cat(flat), len(gradient))
        if self._hosts is not None:
            size = self._hosts.sums.size()
            of_hosts = [torch.cat(flat[first : first + size]) for first in range(0, len(flat), size)]
            packed = gradient.index_select(0, rows).float()
            packed = self._hosts.average(packed, partial(self._average_on_leaders, rows, of_hosts))
            gradient.index_copy_(0, rows, packed.to(gradient.dtype))
        elif self._unsent is not None:
            routes = plan_row_routes(flat, len(gradient), self._group.rank())
            own = gradient.index_select(0, routes.own)
            average = partial(average_rows, own, routes, self._unsent, self._group, self._bits)
            if self._thread is not None:
                return self._apply_late(gradient, routes.rows, self._thread.submit(average))
            gradient.index_copy_(0, routes.rows, average())
        else:
            packed = to_wire_type(gradient.index_select(0, rows), self._compression).div_(self._group.size())
            dist.all_reduce(packed, group=self._group)
            gradient.index_copy_(0, rows, packed.to(gradient.dtype))
        return rows

    def _apply_late(self, gradient: torch.Tensor, rows: torch.Tensor, mean: Future[torch.Tensor]) -> torch.Tensor:
        """Write the mean of the update before into the gradient; return the rows that may differ from zero.

        The first EXACT_UPDATES updates apply their own mean; in the update after them, the gradient is zero. The mean
        of the last update is not applied.
        """
        if self._updates <= EXACT_UPDATES:
            gradient.index_copy_(0, rows, mean.result())
            return rows.sort().values
        gradient.index_fill_(0, rows, 0.0)
        before, self._late = self._late, (rows, mean)
        if before is None:
            return rows.sort().values
        gradient.index_copy_(0, before[0], before[1].result())
        return _find_rows(torch.cat([rows, before[0]]), len(gradient))

    def _average_on_leaders(
        self, rows: torch.Tensor, tokens: Sequence[torch.Tensor], packed: torch.Tensor, leaders: dist.ProcessGroup
    ) -> torch.Tensor:
        assert self._unsent is not None
        routes = plan_row_routes(tokens, len(self._unsent), leaders.rank())
        own = packed.index_select(0, torch.searchsorted(rows, routes.own))
        mean = torch.empty_like(packed)
        places = torch.searchsorted(rows, routes.rows)
        return mean.index_copy_(0, places, average_rows(own, routes, self._unsent, leaders, self._bits))

    def wait(self) -> None:
        """Wait for a late exchange of rows, if one is under way; raises its error. The next update applies the mean."""
        if self._late is not None:
            self._late[1].result()

    def clear(self) -> None:
        """Set the weight's gradient to None, so that the backward pass need not add to zeros."""
        self.weight.grad = None


def make_row_exchange(
    model: torch.nn.Module, compression: str, group: dist.ProcessGroup, hosts: HostGroups | None = None
) -> RowExchange | None:
    """Return the row exchange of a model, None if `find_embedding` finds none. Collective."""
    embedding = find_embedding(model)
    return None if embedding is None else RowExchange(embedding, compression, group, hosts)
