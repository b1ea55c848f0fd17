"""fp32 master weights beside bf16 compute weights, and optimizers that update the masters.

bf16 keeps 8 bits: an update of less than 1/256 of a weight rounds away, as most do with a learning rate of 2e-5. So any
optimizer gets the masters in place of the compute weights for its step; Adam and AdamW have a kernel, see `adamw.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpuft.train.fast.token_embedding import EmbeddingGradient

MASTERS_ATTRIBUTE = "_cpuft_masters"
"""Attribute of an accelerated model that holds its `MasterWeights`."""


class MasterWeights:
    """The fp32 masters of a model's bf16 parameters, which state dicts have under the parameters' own names; what
    something writes to a parameter (a copy, an initialiser), the next step or save takes for the master.
    """

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Make masters of the fp32 `parameters` of `model`, which become bf16 and lose their gradients."""
        wanted = {id(p) for p in parameters}
        self.parameters = {name: p for name, p in model.named_parameters() if id(p) in wanted}
        """The bf16 parameters by their names in the model, also those whose masters are handed over."""
        self._masters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        """torch's version of a parameter when it was its master's rounded value."""
        self.embedding: EmbeddingGradient | None = None
        """None if the model's token embedding is not patched."""
        for parameter in self.parameters.values():
            self._masters[parameter] = parameter.detach()
            parameter.data = parameter.detach().to(torch.bfloat16)
            parameter.grad = None
        self.mark_rounded(self._masters)
        # On the modules that own parameters: libraries that hold a model in another module save it without that module.
        for module in model.modules():
            if own := {name: p for name, p in module.named_parameters(recurse=False) if p in self._masters}:
                hooks = _StateHooks(self, own)
                module.register_state_dict_post_hook(hooks)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(hooks.load)  # type: ignore[no-untyped-call]
        setattr(model, MASTERS_ATTRIBUTE, self)

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._masters

    def get(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's fp32 master itself, with what others wrote to the parameter; None if it has none."""
        master = self._masters.get(parameter)
        if master is not None and parameter._version != self._versions[parameter]:
            self._follow(parameter)
        return master

    def hand_over(self, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Remove and return the masters of those parameters that have one: the caller updates both from now on. Until
        `take_back`, saving the model's state raises KeyError, and values that are loaded are rounded to bf16.
        """
        return {parameter: self._masters.pop(parameter) for parameter in parameters if parameter in self._masters}

    def take_back(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Hold these masters again. The parameters must be their rounded values: nothing checks it."""
        self._masters.update(masters)
        self.mark_rounded(masters)

    def mark_rounded(self, parameters: Iterable[Tensor]) -> None:
        """Record that the present values of those parameters that have masters are these, rounded to bf16."""
        self._versions.update((p, p._version) for p in parameters if p in self._masters)

    @torch.no_grad()
    def _follow(self, parameter: Tensor) -> None:
        master = self._masters[parameter]
        value = parameter.detach()
        rounded = master.to(value.dtype)
        if not torch.equal(value, rounded):
            master.copy_(torch.where(value == rounded, master, value.float()))
        self.mark_rounded([parameter])

    @torch.no_grad()
    def round(self, parameters: Iterable[Tensor]) -> None:
        """Write the masters, rounded to bf16, to those of these parameters that have one."""
        mine = [parameter for parameter in parameters if parameter in self._masters]
        for parameter in mine:
            parameter.copy_(self._masters[parameter])
        self.mark_rounded(mine)

    def save(self, parameter: Tensor) -> Tensor:
        """Return a parameter's master for a state dict, with what others wrote to the parameter, also through `.data`.
        Raises KeyError: it has none, or has handed it over.
        """
        self._follow(parameter)
        return self._masters[parameter]

    @contextmanager
    def in_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, `optimizer` has masters, with fp32 gradients, for bf16 parameters; leaving writes these, rounded."""
        mine = [p for group in optimizer.param_groups for p in group["params"] if p in self._masters]
        # The parameters do not get their masters' data: one that gets data of another dtype loses the hook by which DDP
        # learns of its gradient, because torch then makes it a new gradient accumulator.
        masters = {p: nn.Parameter(master) for p in mine if (master := self.get(p)) is not None}
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        _replace_parameters(optimizer, masters)
        try:
            yield
        finally:
            _replace_parameters(optimizer, {master: parameter for parameter, master in masters.items()})
            for parameter, master in masters.items():
                if master.data_ptr() != self._masters[parameter].data_ptr():  # the optimizer has assigned to `data`
                    self._masters[parameter].copy_(master.detach())
            self.round(masters)


class _StateHooks:
    """Hooks on one module's own entries in state dicts. A method refuses the attribute that torch sets on its hook."""

    def __init__(self, masters: MasterWeights, parameters: Mapping[str, nn.Parameter]) -> None:
        self.masters = masters
        self.parameters = parameters

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace bf16 parameters in a state dict by their masters, not copied."""
        for name, parameter in self.parameters.items():
            if prefix + name in state:
                state[prefix + name] = self.masters.save(parameter)

    @torch.no_grad()
    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Copy the values of a state dict into the masters."""
        for name, parameter in self.parameters.items():
            value, master = state.get(prefix + name), self.masters.get(parameter)
            if isinstance(value, Tensor) and value.shape == parameter.shape and master is not None:
                master.copy_(value)


def _replace_parameters(optimizer: Optimizer, replacements: Mapping[Any, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [replacements.get(p, p) for p in group["params"]]
    state = list(optimizer.state.items())
    optimizer.state.clear()
    for parameter, values in state:
        optimizer.state[replacements.get(parameter, parameter)] = values


@contextmanager
def fp32_weights(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the weights of these parameters, in their order, to write to: fp32 masters, on leaving rounded into their
    bf16 parameters, or a parameter itself if it has none. Their memory is the same every time.
    """
    masters: MasterWeights | None = getattr(model, MASTERS_ATTRIBUTE, None)
    if masters is None:
        yield [*parameters]
        return
    try:
        yield [p if (master := masters.get(p)) is None else nn.Parameter(master) for p in parameters]
    finally:
        masters.round(parameters)


def set_gradient_rows(model: nn.Module, rows: Tensor) -> None:
    """State, after writing to the token embedding's gradient, the rows outside of which it is zero: int64, ascending.
    Otherwise clipping and AdamW process all rows. Does nothing for a model without a patched embedding.
    """
    masters: MasterWeights | None = getattr(model, MASTERS_ATTRIBUTE, None)
    if masters and masters.embedding:
        masters.embedding.set_rows(rows)


class MasterStep(Optimizer):
    """Mixed in before the class of an optimizer that updates masters, whatever optimizer it is."""

    masters: list[MasterWeights]
    """One for each model; parameters without a master are updated as they are."""
    swapped: ExitStack
    """What ends the exchange of weights after a step; not of a `FusedStep`."""

    @contextmanager
    def with_masters(self) -> Iterator[None]:
        """Inside, the optimizer's groups and state have masters in place of bf16 parameters, see `in_optimizer`."""
        with ExitStack() as stack:
            for one in self.masters:
                stack.enter_context(one.in_optimizer(self))
            yield

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state as torch does, with fp32 moments for the masters."""
        with self.with_masters():
            super().load_state_dict(state_dict)

    def enter_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Swap the weights before `step`, and return its arguments, with another closure if there is one."""
        self._swap()
        own, *others = args
        others = [self._wrap_closure(one) if callable(one) else one for one in others]
        return (own, *others), {name: self._wrap_closure(one) if callable(one) else one for name, one in kwargs.items()}

    def leave_step(self, *call: Any) -> None:
        """Give the optimizer the compute weights back after `step`."""
        self.swapped.close()

    def _swap(self) -> None:
        self.leave_step()  # a step that has raised an error has left the masters in the groups
        self.swapped.enter_context(self.with_masters())

    def _wrap_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that runs with the compute weights: layers compute in bf16, and gradients go to these."""

        def run() -> Any:
            self.leave_step()
            loss = closure()
            self._swap()
            return loss

        return run
