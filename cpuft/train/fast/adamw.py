"""fp32 master weights beside bf16 compute weights, and optimizers that update the masters.

bf16 keeps 8 bits: an update of less than 1/256 of a weight rounds away, as most do with a learning rate of 2e-5. A C++
kernel makes AdamW's updates; any other optimizer gets the masters in place of the compute weights for its step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from cpuft.kernels import KERNEL_TYPES, Kernels, address_array, int64_array, kernels_for
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
        """Return a parameter's master as `get` does, for a state dict. Raises KeyError: it was handed over."""
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


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


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


class FusedStep(MasterStep):
    """Mixed in before Adam or AdamW: `step` runs the C++ kernel. The state has torch's names, as in checkpoints."""

    gradient_factor: float = 1.0
    """The next step multiplies gradients by this, and sets it to 1 again; `clip_gradients` sets it."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters with a gradient, by the kernel or torch's step; return the closure's loss or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kernels = self.find_kernels()
        if kernels is None:
            # The hooks of this step have run already, and torch has put them around the step of the class below, too.
            step: Any = super().step
            with self.with_masters():
                step.__wrapped__(self) if getattr(step, "hooked", False) else step()
            return loss
        for group in self.param_groups:
            self._update(kernels, group)
        self.gradient_factor = 1.0
        return loss

    def find_kernels(self) -> Kernels | None:
        """Return the kernels; None without any, or if a gradient is sparse or of a bf16 parameter without a master."""
        for parameter in _list_parameters(self):
            if (grad := parameter.grad) is not None:
                is_fp32 = parameter.dtype == torch.float32 or any(parameter in one for one in self.masters)
                if grad.is_sparse or not is_fp32:
                    return None
        return kernels_for(torch.empty(0))

    def list_embeddings(self) -> dict[Tensor, EmbeddingGradient]:
        """Return the gradients of token embeddings by their weights."""
        return {one.embedding.weight: one.embedding for one in self.masters if one.embedding is not None}

    def _update(self, kernels: Kernels, group: dict[str, Any]) -> None:
        """Make one step of AdamW, or of Adam, as in torch.optim, for the parameters of a group with a gradient."""
        found = [(p, p.grad.contiguous()) for p in group["params"] if p.grad is not None]
        parameters, masters = [p for p, _ in found], dict[int, Tensor]()
        for one in self.masters:
            masters.update((id(p), master) for p in parameters if (master := one.get(p)) is not None)
        embeddings = {id(weight): embedding for weight, embedding in self.list_embeddings().items()}
        alike = defaultdict[torch.dtype, list[tuple[int, ...]]](list)
        for parameter, grad in found:
            state, weights, compute = self.state[parameter], parameter, 0
            if (master := masters.get(id(parameter))) is not None:
                weights, compute = master, parameter.data_ptr()
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
            elif state["step"].dtype != torch.float32:
                state["step"] = state["step"].float()
            embedding, awake, width = embeddings.get(id(parameter)), 0, 1
            if embedding is not None and (touched := embedding.touched_rows(state)) is not None:
                awake, width = touched.data_ptr(), weights.shape[1]
            moments = state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()
            count, sizes = state["step"].data_ptr(), (weights.numel(), width)
            alike[grad.dtype].append((weights.data_ptr(), compute, grad.data_ptr(), *moments, awake, count, *sizes))
        torch.autograd.graph.increment_version(parameters)
        for one in self.masters:
            one.mark_rounded(parameters)
        rates = [float(rate) for rate in (group["lr"], *group["betas"])]
        decay = float(group["weight_decay"])
        shrink, pull = (1.0 - rates[0] * decay, 0.0) if group.get("decoupled_weight_decay") else (1.0, decay)
        scalars = (float(group["eps"]), shrink, pull, self.gradient_factor)
        for dtype, updates in alike.items():
            columns = map(int64_array, zip(*updates, strict=True))
            kernels.run("adamw", dtype, *columns, torch.tensor(rates, dtype=torch.float64), len(updates), *scalars)


def clip_gradients(
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    sum_over_ranks: Callable[[Tensor], object] | None = None,
    share_plain: Callable[[Tensor], object] | None = None,
) -> float:
    """Clip the gradients of `parameters` for the optimizer's next step; return their L2 norm before clipping.

    If the kernels can read all gradients, and the optimizer is a `FusedStep` with all these parameters, its next step
    scales the gradients, which saves a pass over memory. Where this rank holds a shard of the gradients,
    `sum_over_ranks` sums the squared norm, an fp64 scalar, in place. Where all ranks have the same gradients,
    `share_plain` gives them one rank's squared norm, in place, if torch computes it: its sums depend on the CPU and the
    number of threads.
    """
    found = [(p, p.grad) for p in parameters if p.grad is not None]
    parameters = [p for p, _ in found]
    grads = [grad for _, grad in found]
    kernels = optimizer.find_kernels() if isinstance(optimizer, FusedStep) else None
    plain = any(g.is_sparse or not (g.is_contiguous() and g.is_cpu and g.dtype in KERNEL_TYPES) for g in grads)
    mine = {id(p) for p in _list_parameters(optimizer)}
    others = any(id(p) not in mine for p in parameters)
    if kernels is None or plain or others or not isinstance(optimizer, FusedStep):
        total_norm = torch.nn.utils.get_total_norm(grads)
        if agree := sum_over_ranks or share_plain:
            agree(squares := total_norm.double().square())
            total_norm = squares.sqrt().to(total_norm.dtype)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
        return float(total_norm)
    total, embeddings = torch.zeros((), dtype=torch.float64), optimizer.list_embeddings()
    for weight, embedding in embeddings.items():
        grads = [embedding.nonzero_part(g) if g is weight.grad else g for g in grads]
    for dtype in dict.fromkeys(g.dtype for g in grads):  # in one order, as the sum depends on it
        some = [g for g in grads if g.dtype == dtype]
        sizes = int64_array([g.numel() for g in some])
        kernels.run("square_sum", dtype, address_array(some), sizes, total, len(some))
    if sum_over_ranks:
        sum_over_ranks(total)
    norm = math.sqrt(float(total))
    # The formula of torch.nn.utils.clip_grads_with_norm_.
    factor = max_norm / (norm + 1e-6)
    optimizer.gradient_factor = 1.0 if factor > 1.0 else factor
    return norm


def _can_fuse(optimizer: Optimizer) -> bool:
    """Return whether the kernel computes what this optimizer would: Adam or AdamW itself, without special options."""
    special = ("amsgrad", "maximize", "capturable", "differentiable")
    return (
        type(optimizer) in (Adam, AdamW)
        # A scheduler that was made earlier has wrapped the old class's step on the instance.
        and "step" not in vars(optimizer)
        and not any(group.get(name) for group in optimizer.param_groups for name in special)
        and all(p.is_contiguous() and p.dtype in (torch.float32, torch.bfloat16) for p in _list_parameters(optimizer))
    )


def use_masters(optimizer: Optimizer, masters: MasterWeights) -> None:
    """Make `optimizer` update `masters`, beside those of earlier calls, and round them into its bf16 parameters. It
    stays the same object, for schedulers and trainers that hold it; its class becomes a subclass of `MasterStep`.
    """
    known = vars(optimizer).setdefault("masters", [])
    if any(one is masters for one in known):
        return
    known.append(masters)
    own = type(optimizer)
    if isinstance(optimizer, MasterStep):
        return
    mixin = FusedStep if _can_fuse(optimizer) else MasterStep
    name = f"Fused{own.__name__}" if mixin is FusedStep else own.__name__
    changed: Any = optimizer
    changed.__class__ = type(name, (mixin, own), {"__module__": __name__})
    # torch puts hooks around `step` of a class when its first instance is made, and this class had none.
    changed._patch_step_function()
    if mixin is MasterStep:
        changed.swapped = ExitStack()
        changed.register_step_pre_hook(changed.enter_step)
        changed.register_step_post_hook(changed.leave_step)
