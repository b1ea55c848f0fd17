"""Gradients of word embeddings in fewer bytes: only the rows that an update's tokens name are sent.

All others are zero on every rank, so the mean is the whole exchange's, to the bit. A word embedding is half of a small
encoder's parameters and a fifth of BERT-base's, and its gradient comes last in backward: nothing is left to hide it
behind.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cpuft.comm.compression.int8 import average_blocks
from cpuft.comm.compression.table import to_wire_type

_OTHER_LOOKUPS = "_cpuft_other_lookups"
"""Attribute of an embedding module that is looked up by more than a batch's input ids."""


def find_embedding(model: torch.nn.Module) -> torch.nn.Embedding | None:
    """The module that looks up a model's tokens, where its weight is trained and nothing else reads it.

    A weight that an output layer or a second look-up shares has gradients in every row: None, as for a module that is
    more than a look-up, and for one of which `check_lookups` found that it is looked up by more than input ids.
    """
    try:
        module = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    if type(module) is not torch.nn.Embedding or not module.weight.requires_grad:
        return None
    readers = [owner for owner in model.modules() if any(p is module.weight for p in owner.parameters(recurse=False))]
    return module if len(readers) == 1 and not hasattr(module, _OTHER_LOOKUPS) else None


def check_lookups(model: torch.nn.Module, input_ids: torch.Tensor, forward: Callable[[], object]) -> bool:
    """Return whether a model looks up its word embedding by nothing but a batch's input ids.

    If not, `find_embedding` returns None for this model from now on, so that its gradient is exchanged whole. GPT-2,
    for example, also looks up token types in its word embedding: an exchange of the rows that input ids name would
    lose the gradients of these rows.

    Parameters
    ----------
    input_ids: of the batch, int64.
    forward: runs a forward pass of the model on the batch. It is called once.
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
    # Some models transpose the ids first: their order does not matter.
    named = input_ids.flatten().sort().values
    only_ids = all(torch.equal(tokens.flatten().sort().values, named) for tokens in lookups)
    if not only_ids:
        setattr(embedding, _OTHER_LOOKUPS, True)
    return only_ids


class RowExchange:
    """Averages a model's word embedding gradient over the ranks, in the place of DistributedDataParallel.

    To be made before the model is wrapped, which then leaves that parameter alone: its values, too, so all ranks must
    have the same.
    """

    def __init__(
        self, model: torch.nn.Module, embedding: torch.nn.Embedding, compression: str, group: dist.ProcessGroup
    ) -> None:
        self.weight, self._compression, self._group = embedding.weight, compression, group
        # What a row has not sent waits until its word comes again.
        self._unsent = torch.zeros(embedding.weight.shape) if compression in ("int8", "powersgd") else None
        names = [name for name, parameter in model.named_parameters() if parameter is embedding.weight]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def average(self, tokens: torch.Tensor) -> torch.Tensor:
        """Average the gradient. A collective, to be called after backward and before anything reads the gradient.

        Parameters
        ----------
        tokens: all that any rank has looked up since the gradient was zero, int64, of any shape, with repetitions;
            the same set on every rank.

        Returns
        -------
        The rows that may be other than zero, int64, rising, each once.
        """
        gradient = self.weight.grad
        assert gradient is not None
        named = torch.zeros(len(gradient), dtype=torch.bool)
        named[tokens.reshape(-1)] = True
        rows = named.nonzero()[:, 0]
        packed = gradient[rows]
        if self._unsent is not None:
            unsent = self._unsent[rows]
            packed = average_blocks(packed.view(-1), unsent.view(-1), self._group).view_as(packed)
            self._unsent[rows] = unsent
        else:
            packed = to_wire_type(packed, self._compression).div_(self._group.size())
            dist.all_reduce(packed, group=self._group)
        gradient[rows] = packed.to(gradient.dtype)
        return rows

    def clear(self) -> None:
        """Forget the gradient, so that backward need not add to zeros."""
        self.weight.grad = None


def exchange_rows(model: torch.nn.Module, compression: str, group: dist.ProcessGroup) -> RowExchange | None:
    """A model's row exchange, where it can have one."""
    embedding = find_embedding(model)
    return None if embedding is None else RowExchange(model, embedding, compression, group)
