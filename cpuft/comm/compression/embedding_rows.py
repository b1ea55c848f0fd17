"""Exchange of word embedding gradients by rows: only the rows of an update's tokens are sent.

All other rows are zero on every rank, so the result is that of the complete exchange, to the bit if rows are sent in
bf16, fp16 or fp32. A word embedding has half of a small encoder's parameters and a fifth of BERT-base's. Its gradient
is the last one of the backward pass, so nothing hides its exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cpuft.comm.compression.hierarchical import HostGroups
from cpuft.comm.compression.int8 import all_gather, decode_message, encode_message, encoded_bytes
from cpuft.comm.compression.table import to_wire_type
from cpuft.compressions import COMPRESSIONS_WITH_FEEDBACK

_OTHER_LOOKUPS = "_cpuft_other_lookups"
"""Attribute of an embedding module that looks up more than a batch's input ids."""


def find_embedding(model: torch.nn.Module) -> torch.nn.Embedding | None:
    """Return the word embedding whose gradient can be exchanged by rows, or None if there is none.

    It must be a trained torch.nn.Embedding, returned by the model's get_input_embeddings(), whose weight no other
    module uses: a weight that an output layer or a second embedding shares has gradients in every row. It must not look
    up more than input ids, which is known after `check_lookups`. For a model without get_input_embeddings(), such as a
    SentenceTransformer, the only module in it that has this method is asked; with none or several, there is none.
    """
    owners = list(_list_embedding_owners(model))
    try:
        module = owners[0].get_input_embeddings() if len(owners) == 1 else None
    except (AttributeError, NotImplementedError):
        return None
    if type(module) is not torch.nn.Embedding or not module.weight.requires_grad:
        return None
    users = [owner for owner in model.modules() if any(p is module.weight for p in owner.parameters(recurse=False))]
    return module if len(users) == 1 and not hasattr(module, _OTHER_LOOKUPS) else None


def _list_embedding_owners(model: torch.nn.Module) -> Iterator[Any]:
    """The outermost modules that have get_input_embeddings()."""
    if hasattr(model, "get_input_embeddings"):
        yield model
        return
    for child in model.children():
        yield from _list_embedding_owners(child)


def check_lookups(model: torch.nn.Module, input_ids: torch.Tensor, forward: Callable[[], object]) -> bool:
    """Run a forward pass and return whether it looks up the word embedding by nothing but a batch's input ids.

    If not, `find_embedding` returns None for this model from now on, so that its gradient is exchanged whole. GPT-2,
    for example, also looks up token types in its word embedding: an exchange of the rows of input ids would lose the
    gradients of these rows. The result is True if `find_embedding` returns None already, or if nothing is looked up.

    Parameters
    ----------
    input_ids: of the batch, int64, any shape.
    forward: runs a forward pass of the model on the batch. It is called once; its exceptions are passed on.
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
class Senders:
    """Which rows of an update a rank of a group sends to whom. Rows are named by their places among all rows.

    Of n ranks, each averages every n-th row. Frequent tokens have small numbers, so that the first n-th of all rows
    would be those that most ranks have.
    """

    own: torch.Tensor
    """This rank's rows: int64, those that the first rank averages come first, each part ascending."""
    own_counts: list[int]
    """How many of them each rank averages."""
    arriving: torch.Tensor
    """The rows that this rank averages and others have: int64, with those of the first rank first; none of its own."""
    arriving_counts: list[int]
    """How many of them each rank sends."""


def find_senders(rows: torch.Tensor, tokens: Sequence[torch.Tensor], vocabulary: int, rank: int) -> Senders:
    """Return what a rank sends and receives.

    Parameters
    ----------
    rows: all rows of the update: int64, ascending, each once.
    tokens: of each rank of the group: int64, one-dimensional, with repetitions. All of them are among the rows.
    vocabulary: number of rows of the embedding.
    """
    ranks, count = len(tokens), len(rows)
    number = torch.empty(vocabulary, dtype=torch.int64)
    number[rows] = torch.arange(count)
    own = torch.unique(number[tokens[rank]])
    averager = own % ranks
    places = number[torch.cat(list(tokens))]
    owner = torch.repeat_interleave(torch.arange(ranks), torch.tensor([len(one) for one in tokens]))
    is_arriving = (places % ranks == rank) & (owner != rank)
    found = torch.unique(owner[is_arriving] * count + places[is_arriving])
    return Senders(
        own[averager.argsort(stable=True)],
        torch.bincount(averager, minlength=ranks).tolist(),
        found % count,
        torch.bincount(found // count, minlength=ranks).tolist(),
    )


def average_rows(
    gradient: torch.Tensor, rows: torch.Tensor, senders: Senders, unsent: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the mean over the ranks of a group of rows of which each rank has only some, as int8 blocks.

    Each rank receives the rows that it averages from the ranks that have them, and sends their mean to all ranks.
    Collective; it blocks until the mean is there.

    Parameters
    ----------
    gradient: fp32 or bf16, (vocabulary, width), zero outside of this rank's rows.
    rows: all rows of the update, at least one, the same on all ranks.
    senders: what `find_senders` returned for these rows and this rank.
    unsent: what this rank has not sent so far: fp32, (vocabulary, width). It is added where this rank sends a row or
        averages it, and what is not sent of these rows now takes its place.

    Returns the mean with the same bits on all ranks, in the type of the gradient: (rows, width).
    """
    ranks, rank, width = group.size(), group.rank(), gradient.shape[1]
    mine = rows[senders.own]
    summed = gradient[mine].float().add_(unsent[mine])
    parts, of_rows = torch.split(summed, senders.own_counts), torch.split(mine, senders.own_counts)

    # Send the rows that other ranks average. This rank's part of those that it averages itself is not rounded.
    messages = []
    for to, (part, some) in enumerate(zip(parts, of_rows, strict=True)):
        numbers = part.reshape(-1) if to != rank else part.new_empty(0)
        messages.append(encode_message(numbers, error := torch.empty_like(numbers)))
        if to != rank:
            unsent[some] = error.view(part.shape)
    sizes = [count * width for count in senders.arriving_counts]
    nbytes = [encoded_bytes(size, 1) for size in sizes]
    received = torch.empty(sum(nbytes), dtype=torch.int8)
    dist.all_to_all_single(received, torch.cat(messages), nbytes, [len(one) for one in messages], group=group)

    # Average every n-th row.
    averaged = rows[rank::ranks]
    total = torch.zeros(-(-len(rows) // ranks), width)
    total[: len(averaged)] = unsent[averaged]
    total[senders.own[senders.own % ranks == rank] // ranks] = parts[rank]
    numbers = torch.empty(sum(sizes))
    for part, message in zip(torch.split(numbers, sizes), torch.split(received, nbytes), strict=True):
        decode_message(message, part)
    total.index_add_(0, senders.arriving // ranks, numbers.view(-1, width))
    mean, error = total.div_(ranks).view(-1), torch.empty(total.numel())
    message = encode_message(mean, error)
    # Rounding the mean loses as much of every rank's rows.
    unsent[averaged] = error.view(total.shape)[: len(averaged)].mul_(ranks)

    # Send the means to all ranks.
    means = message.new_empty(ranks * len(message))
    all_gather(means, message, group=group)
    result = gradient.new_empty(len(rows), width)
    part = gradient.new_empty(total.shape)
    for first, message in enumerate(means.view(ranks, -1)):
        decode_message(message, part.view(-1))
        target = result[first::ranks]
        target.copy_(part[: len(target)])
    return result


class RowExchange:
    """Averages the gradient of a model's word embedding over the ranks, instead of DistributedDataParallel.

    It must be made before the model is wrapped. DistributedDataParallel then ignores the parameter and its initial
    value, so all ranks must have the same value.

    Parameters
    ----------
    embedding: what `find_embedding` returned for the model.
    compression: a value of --grad-compression other than auto: rows are sent as bf16 or fp16 for these names, as int8
        blocks with error feedback for int8 and powersgd, and in the gradient's own type otherwise.
    hosts: what `make_host_groups` returned for the same compression and group. If it is given, rows are averaged within
        each host first.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        embedding: torch.nn.Embedding,
        compression: str,
        group: dist.ProcessGroup,
        hosts: HostGroups | None = None,
    ) -> None:
        self.weight, self._compression, self._group, self._hosts = embedding.weight, compression, group, hosts
        # What was not sent of a row is added when its token appears again. Other ranks than leaders send nothing.
        has_feedback = compression in COMPRESSIONS_WITH_FEEDBACK and (hosts is None or hosts.leaders is not None)
        self._unsent = torch.zeros(embedding.weight.shape) if has_feedback else None
        names = [name for name, parameter in model.named_parameters() if parameter is embedding.weight]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def average(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Average the gradient in place. All ranks call this after the backward pass, before anything reads it.

        It blocks until all ranks' rows are there. The weight must have a gradient.

        Parameters
        ----------
        tokens: for each rank of the group all tokens that it may have looked up since the gradient was zero: int64, of
            any shape, with repetitions. They are the same on all ranks.

        Returns the rows that may differ from zero: int64, one-dimensional, ascending, without repetitions.

        Raises IndexError: a token is not in the vocabulary.
        """
        gradient = self.weight.grad
        assert gradient is not None
        flat = [one.reshape(-1) for one in tokens]
        is_used = torch.zeros(len(gradient), dtype=torch.bool)
        is_used[torch.cat(flat)] = True
        rows = is_used.nonzero()[:, 0]
        if self._hosts is not None:
            size = self._hosts.sums.size()
            of_hosts = [torch.cat(flat[first : first + size]) for first in range(0, len(flat), size)]
            packed = self._hosts.average(gradient[rows].float(), partial(self._average_on_leaders, rows, of_hosts))
        elif self._unsent is not None:
            senders = find_senders(rows, flat, len(gradient), self._group.rank())
            packed = average_rows(gradient, rows, senders, self._unsent, self._group)
        else:
            packed = to_wire_type(gradient[rows], self._compression).div_(self._group.size())
            dist.all_reduce(packed, group=self._group)
        gradient[rows] = packed.to(gradient.dtype)
        return rows

    def _average_on_leaders(
        self, rows: torch.Tensor, tokens: Sequence[torch.Tensor], packed: torch.Tensor, leaders: dist.ProcessGroup
    ) -> torch.Tensor:
        """Return the mean over the leaders of the rows of their hosts: fp32, in the shape of `packed`.

        Parameters
        ----------
        tokens: of each host.
        packed: fp32, (rows, width), the mean of this host's ranks.
        """
        assert self._unsent is not None
        senders = find_senders(rows, tokens, len(self._unsent), leaders.rank())
        unsent = self._unsent[rows]
        mean = average_rows(packed, torch.arange(len(rows)), senders, unsent, leaders)
        self._unsent[rows] = unsent
        return mean

    def clear(self) -> None:
        """Set the weight's gradient to None, so that the backward pass need not add to zeros."""
        self.weight.grad = None


def make_row_exchange(
    model: torch.nn.Module, compression: str, group: dist.ProcessGroup, hosts: HostGroups | None = None
) -> RowExchange | None:
    """Return the row exchange of a model, or None if its word embedding cannot be exchanged by rows.

    With a row exchange, a DistributedDataParallel that is made later leaves the word embedding alone. It can be
    exchanged by rows if it is trained, a torch.nn.Embedding, and its weight is not shared.

    Parameters
    ----------
    compression: a value of --grad-compression other than auto.
    hosts: what `make_host_groups` returned for the same compression and group.
    """
    embedding = find_embedding(model)
    return None if embedding is None else RowExchange(model, embedding, compression, group, hosts)
