"""Exchange of word embedding gradients by rows: only the rows of an update's tokens are sent.

All other rows are zero on every rank, so the result is that of the complete exchange, to the bit. A word embedding has
half of a small encoder's parameters and a fifth of BERT-base's. Its gradient is the last one of the backward pass, so
nothing hides its exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cpuft.comm.compression.hierarchical import HostGroups
from cpuft.comm.compression.int8 import average_blocks
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
    def average(self, tokens: torch.Tensor) -> torch.Tensor:
        """Average the gradient in place. All ranks call this after the backward pass, before anything reads it.

        It blocks until all ranks' rows are there. The weight must have a gradient.

        Parameters
        ----------
        tokens: all tokens that any rank has looked up since the gradient was zero, int64, of any shape, with
            repetitions; the same set on every rank.

        Returns the rows that may differ from zero: int64, one-dimensional, ascending, without repetitions.

        Raises IndexError: a token is not in the vocabulary.
        """
        gradient = self.weight.grad
        assert gradient is not None
        is_used = torch.zeros(len(gradient), dtype=torch.bool)
        is_used[tokens.reshape(-1)] = True
        rows = is_used.nonzero()[:, 0]
        packed = gradient[rows]
        if self._hosts is not None:
            packed = self._hosts.average(packed.float(), partial(self._average_blocks, rows))
        elif self._unsent is not None:
            packed = self._average_blocks(rows, packed, self._group)
        else:
            packed = to_wire_type(packed, self._compression).div_(self._group.size())
            dist.all_reduce(packed, group=self._group)
        gradient[rows] = packed.to(gradient.dtype)
        return rows

    def _average_blocks(self, rows: torch.Tensor, packed: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the mean of these rows of the gradient over the group: fp32, in the shape of `packed`."""
        assert self._unsent is not None
        unsent = self._unsent[rows]
        mean = average_blocks(packed.view(-1), unsent.view(-1), group).view_as(packed)
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
