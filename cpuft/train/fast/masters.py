"""fp32 master weights beside bf16 compute weights: what is trained, saved and loaded is the fp32 one.

Why: bf16 keeps 8 bits. A step of relative size below 1/256 rounds away, and with a learning rate of 2e-5 most do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpuft.train.fast.embedding import Words

MASTERS_ATTRIBUTE = "_cpuft_masters"


class Masters:
    """The fp32 masters of a model's bf16 parameters.

    `state_dict` of the model (and so `save_pretrained`, and DistributedDataParallel's `state_dict`) gives masters
    under the parameters' own names; `load_state_dict` takes fp32 values into them. A parameter that something else
    writes to (a copy, an initialiser) overrules its master: the next step or save sees the difference.
    """

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        wanted = {id(p) for p in parameters}
        self.parameters = {name: p for name, p in model.named_parameters() if id(p) in wanted}
        self._masters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self.words: Words | None = None
        """The model's word embedding, where its gradient is by rows."""
        for parameter in self.parameters.values():
            self._masters[parameter] = parameter.detach()
            parameter.data = parameter.detach().to(torch.bfloat16)
            parameter.grad = None
            self.mark(parameter)
        model.register_state_dict_post_hook(_SaveHook(self))  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(self._load)  # type: ignore[no-untyped-call]
        setattr(model, MASTERS_ATTRIBUTE, self)

    def get(self, parameter: Tensor) -> Tensor | None:
        """The master of a parameter, brought up to date if the parameter was written to; None for an fp32 one."""
        master = self._masters.get(parameter)
        if master is not None and parameter._version != self._versions[parameter]:
            self._follow(parameter)
        return master

    def hand_over(self, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Give away the masters that these parameters have: whoever asks for them is in charge of both from now on.

        Meanwhile the model cannot be saved, and what is loaded is rounded.
        """
        return {parameter: self._masters.pop(parameter) for parameter in parameters if parameter in self._masters}

    def take_back(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Have masters again, of which the parameters are the rounded values."""
        self._masters.update(masters)
        for parameter in masters:
            self.mark(parameter)

    def mark(self, parameter: Tensor) -> None:
        """Remember that a parameter's value now is its master, rounded."""
        self._versions[parameter] = parameter._version

    @torch.no_grad()
    def _follow(self, parameter: Tensor) -> None:
        master = self._masters[parameter]
        value = parameter.detach()
        rounded = master.to(value.dtype)
        if not torch.equal(value, rounded):
            master.copy_(torch.where(value == rounded, master, value.float()))
        self.mark(parameter)

    def save(self, state: dict[str, Any], prefix: str) -> None:
        """Put the masters into a state dict of the model, made with `prefix`."""
        for name, parameter in self.parameters.items():
            if prefix + name in state:
                self._follow(parameter)
                state[prefix + name] = self._masters[parameter]

    @torch.no_grad()
    def _load(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, parameter in self.parameters.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.shape and parameter in self._masters:
                self._masters[parameter].copy_(value)

    @contextmanager
    def in_place(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Inside, the bf16 ones of `parameters` are their masters, with fp32 gradients: what any optimizer can step.

        On the way out the masters are rounded into the compute weights, and the bf16 gradients are back.
        """
        mine = [p for p in parameters if p in self._masters]
        compute = [(p, p.data, p.grad) for p in mine]
        for parameter, _, grad in compute:
            master = self.get(parameter)
            assert master is not None
            parameter.grad = None
            parameter.data = master
            parameter.grad = None if grad is None else grad.float()
        try:
            yield
        finally:
            for parameter, data, grad in compute:
                parameter.grad = None
                # A closure or a loader may have given the parameter new storage: that is its master from now on.
                self._masters[parameter] = parameter.data
                parameter.data = data
                with torch.no_grad():
                    parameter.copy_(self._masters[parameter])
                parameter.grad = grad
                self.mark(parameter)

    @contextmanager
    def standing_in(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, `optimizer` holds the masters themselves, with fp32 gradients, in the place of bf16 parameters.

        Those keep their dtype all the while: a parameter that is given data of another one loses the hook by which
        DistributedDataParallel learns of its gradient (torch then makes it a new gradient accumulator).
        """
        mine = [p for group in optimizer.param_groups for p in group["params"] if p in self._masters]
        masters = {p: nn.Parameter(master) for p in mine if (master := self.get(p)) is not None}
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        _exchange(optimizer, masters)
        try:
            yield
        finally:
            _exchange(optimizer, {master: parameter for parameter, master in masters.items()})
            for parameter, master in masters.items():
                with torch.no_grad():
                    parameter.copy_(master)
                self.mark(parameter)


def _exchange(optimizer: Optimizer, others: Mapping[Any, nn.Parameter]) -> None:
    """Put others in the place of parameters, their state with them."""
    for group in optimizer.param_groups:
        group["params"][:] = [others.get(p, p) for p in group["params"]]
    state = list(optimizer.state.items())
    optimizer.state.clear()
    for parameter, values in state:
        optimizer.state[others.get(parameter, parameter)] = values


@contextmanager
def fp32_weights(model: nn.Module) -> Iterator[None]:
    """Inside, the parameters of an accelerated model are their fp32 masters; on the way out they are rounded.

    For whoever reads or writes weights between steps and wants all their bits: averaging over ranks, moving averages.
    No forward pass inside. A model that is not accelerated is left alone.
    """
    masters: Masters | None = getattr(model, MASTERS_ATTRIBUTE, None)
    if masters is None:
        yield
        return
    with masters.in_place(list(masters.parameters.values())):
        yield


def note_rows(model: nn.Module, rows: Tensor) -> None:
    """Tell an accelerated model that of its word embedding's gradient all but these rows is zero, see `Words.note`."""
    masters: Masters | None = getattr(model, MASTERS_ATTRIBUTE, None)
    if masters and masters.words:
        masters.words.note(rows)


class _SaveHook:
    """An object, because torch sets an attribute on this hook, and with a method's meaning, so that deepcopy works."""

    def __init__(self, masters: Masters) -> None:
        self.masters = masters

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self.masters.save(state, prefix)
