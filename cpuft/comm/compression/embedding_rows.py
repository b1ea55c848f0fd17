"""Exchange of word embedding gradients by rows: only the rows of an update's tokens are sent.

All other rows are zero on every rank, so the result is that of the complete exchange, to the bit if rows are sent in
bf16, fp16 or fp32. A word embedding has half of a small encoder's parameters and a fifth of BERT-base's. Its gradient
is the last one of the backward pass, so nothing hides its exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def average_rows(
    own: torch.Tensor, places: Sequence[torch.Tensor], unsent: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the mean over the ranks of a group of rows of which each rank has only some, as int8 blocks.

    Of n ranks, each averages every n-th row: it receives these rows from the ranks that have them, and sends their mean
    to all ranks. (Frequent tokens have small numbers, so that the first n-th of all rows would be those that most ranks
    have.) Collective; it blocks until the mean is there.

    Parameters
    ----------
    own: this rank's rows in the order of their places, (rows, width), fp32 or bf16.
    places: of the rows of each rank of the group among all rows: int64, ascending, each once.
    unsent: what this rank has not sent so far of all rows: fp32, (all rows, width). It is added where this rank sends a
        row or averages it, and what is not sent of these rows now takes its place.

    Returns the mean with the same bits on all ranks: fp32, in the shape of `unsent`.
    """
    (count, width), ranks, rank = unsent.shape, group.size(), group.rank()
    mine = places[rank]
    summed = own.float() + unsent[mine]

    # Send the rows that other ranks average. This rank's part of those that it averages itself is not rounded.
    messages = []
    for other in range(ranks):
        of_other = (mine % ranks == other).nonzero()[:, 0]
        numbers = summed[of_other] if other != rank else summed[:0]
        messages.append(encode_message(numbers.view(-1), error := torch.empty(numbers.numel())))
        if other != rank:
            unsent[mine[of_other]] = error.view(-1, width)
    arriving = [one[one % ranks == rank] if other != rank else one[:0] for other, one in enumerate(places)]
    nbytes = [encoded_bytes(len(one) * width, 1) for one in arriving]
    received = torch.empty(sum(nbytes), dtype=torch.int8)
    dist.all_to_all_single(received, torch.cat(messages), nbytes, [len(one) for one in messages], group=group)

    # Average every n-th row.
    averaged = unsent[rank::ranks]  # a view
    total = torch.zeros(-(-count // ranks), width)
    total[: len(averaged)] = averaged
    is_averaged = mine % ranks == rank
    total[mine[is_averaged] // ranks] = summed[is_averaged]
    for one, message in zip(arriving, torch.split(received, nbytes), strict=True):
        numbers = torch.empty(len(one), width)
        decode_message(message, numbers.view(-1))
        total.index_add_(0, one // ranks, numbers)
    mean = total.div_(ranks)
    error = torch.empty_like(mean)
    message = encode_message(mean.view(-1), error.view(-1))
    averaged.copy_(error[: len(averaged)].mul_(ranks))  # rounding the mean loses as much of every rank's rows

    # Send the means to all ranks.
    means = message.new_empty(ranks * len(message))
    all_gather(means, message, group=group)
    result = torch.empty(ranks, *mean.shape)
    for numbers, message in zip(result, means.view(ranks, -1), strict=True):
        decode_message(message, numbers.view(-1))
    return result.transpose(0, 1).reshape(-1, width)[:count]


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
        is_used = torch.zeros(len(gradient), dtype=torch.bool)
        for one in tokens:
            is_used[one.reshape(-1)] = True
        rows = is_used.nonzero()[:, 0]
        packed = gradient[rows]
        if self._hosts is not None:
            size = self._hosts.sums.size()
            of_hosts = [
                torch.cat([one.reshape(-1) for one in tokens[i : i + size]]) for i in range(0, len(tokens), size)
            ]
            packed = self._hosts.average(packed.float(), partial(self._average_blocks, rows, of_hosts))
        elif self._unsent is not None:
            packed = self._average_blocks(rows, tokens, packed, self._group)
        else:
            packed = to_wire_type(packed, self._compression).div_(self._group.size())
            dist.all_reduce(packed, group=self._group)
        gradient[rows] = packed.to(gradient.dtype)
        return rows

    def _average_blocks(
        self, rows: torch.Tensor, tokens: Sequence[torch.Tensor], packed: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Return the mean of these rows of the gradient over the group: fp32, in the shape of `packed`.

        Parameters
        ----------
        tokens: of each rank of the group.
        """
        assert self._unsent is not None
        number = torch.empty(len(self._unsent), dtype=torch.int64)
        number[rows] = torch.arange(len(rows))
        places = []
        for one in tokens:
            is_own = torch.zeros(len(number), dtype=torch.bool)
            is_own[one.reshape(-1)] = True
            places.append(number[is_own])
        unsent = self._unsent[rows]
        mean = average_rows(packed[places[group.rank()]], places, unsent, group)
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
