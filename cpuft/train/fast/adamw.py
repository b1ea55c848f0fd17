"""fp32 master weights beside bf16 compute weights: what is trained, saved and loaded is the fp32 one.

Why: bf16 keeps 8 bits. A step of relative size below 1/256 rounds away, and with a learning rate of 2e-5 most do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from cpuft.train.fast.embedding import Words
from cpuft.train.fast.kernels import Kernels, addresses, kernels_for, numbers

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


def _group_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Swap:
    """Puts masters in the place of compute weights while an optimizer steps or loads its state."""

    def __init__(self, masters: Masters) -> None:
        self.masters = masters
        self.open: Any = None

    def enter(self, optimizer: Optimizer, *rest: Any) -> None:
        # A closure computes gradients of the parameters themselves. Else they are left as they are: whoever prepares
        # an optimizer loads its state when DistributedDataParallel has the model already.
        parameters = _group_parameters(optimizer)
        in_place = _has_closure(rest)
        self.open = self.masters.in_place(parameters) if in_place else self.masters.standing_in(optimizer)
        self.open.__enter__()

    def leave(self, optimizer: Optimizer, *rest: Any) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None


def _has_closure(words: tuple[Any, ...]) -> bool:
    """Whether a closure is among what a hook is given: the arguments of `step`, or a state dict."""
    given, named = words if len(words) == 2 else ((), {})
    return any(map(callable, (*given, *named.values())))


@dataclass(frozen=True)
class Update:
    """What one parameter's update reads and writes, all contiguous."""

    weights: Tensor
    """fp32: the master, or the parameter itself."""
    compute: Tensor | None
    """bf16, written from the weights; None where they are the parameter."""
    grad: Tensor
    state: dict[str, Any]
    awake: Tensor | None = None
    """(rows,) uint8, zero for rows of the weights whose gradient and moments are zero. None: nothing is known."""


class FusedStep(Optimizer):
    """Mixed in before Adam or AdamW: `step` runs the kernel. State keeps torch's names, so checkpoints are the same."""

    masters: Masters
    gradient_factor: float = 1.0
    """What the next step multiplies gradients by: see `clip_gradients`."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One update; like torch's, it returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kernels = kernels_for(torch.empty(0))
        if kernels is None or any(p.grad is not None and p.grad.is_sparse for p in _group_parameters(self)):
            with self.masters.standing_in(self):
                super().step()
            return loss
        for group in self.param_groups:
            alike: dict[tuple[float, torch.dtype], list[Update]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._update(parameter)
                    alike.setdefault((float(update.state["step"]), update.grad.dtype), []).append(update)
            for (count, _), updates in alike.items():
                run_adamw(kernels, updates, count, group, self.gradient_factor)
        self.gradient_factor = 1.0
        return loss

    def _update(self, parameter: nn.Parameter) -> Update:
        """A parameter's update with its state, which counts this step already."""
        master = self.masters.get(parameter)
        state = self.state[parameter]
        weights, compute = (parameter.detach(), None) if master is None else (master, parameter.detach())
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
        state["step"] += 1
        torch.autograd.graph.increment_version(parameter)
        if master is not None:
            self.masters.mark(parameter)
        assert parameter.grad is not None
        words = self.masters.words
        awake = words.awake(state) if words and words.weight is parameter else None
        return Update(weights, compute, parameter.grad.contiguous(), state, awake)


def run_adamw(
    kernels: Kernels, updates: list[Update], count: float, group: dict[str, Any], factor: float = 1.0
) -> None:
    """AdamW's step number `count` by the kernel; formula and option names as in torch.optim.AdamW.

    `updates` have gradients of one dtype, which are multiplied by `factor` on the way.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    shrink, pull = (1.0 - rate * decay, 0.0) if group.get("decoupled_weight_decay") else (1.0, decay)
    columns = [addresses([u.weights for u in updates]), addresses([u.compute for u in updates])]
    columns.append(addresses([u.grad for u in updates]))
    columns += [addresses([u.state[name] for u in updates]) for name in ("exp_avg", "exp_avg_sq")]
    columns.append(addresses([u.awake for u in updates]))
    sizes = numbers([u.weights.numel() for u in updates])
    widths = numbers([1 if u.awake is None else u.weights.shape[1] for u in updates])
    step, root = rate / (1.0 - beta1**count), (1.0 - beta2**count) ** -0.5
    scalars = (beta1, beta2, float(group["eps"]), shrink, pull, step, root, factor)
    kernels.run("adamw", updates[0].grad.dtype, *columns, sizes, widths, len(updates), *scalars)


def clip_gradients(
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    most: float,
    add_up: Callable[[Tensor], object] | None = None,
) -> float:
    """Scale gradients down to norm `most` for the optimizer's next step; their norm, over all `parameters`.

    As torch.nn.utils.clip_grad_norm_, of which a fused optimizer saves the second pass: it scales while it steps, so
    that gradients themselves stay as they are. Where the gradients are a part of what the norm is of, `add_up` makes
    the sum of their squares, fp64, that of all parts, in place.
    """
    found = [(p, p.grad) for p in parameters if p.grad is not None]
    parameters = [p for p, _ in found]
    grads = [grad for _, grad in found]
    kernels = kernels_for(torch.empty(0))
    plain = any(g.is_sparse or not g.is_contiguous() or kernels_for(g) is None for g in grads)
    mine = {id(p) for p in _group_parameters(optimizer)}
    others = any(id(p) not in mine for p in parameters)
    if kernels is None or plain or others or not isinstance(optimizer, FusedStep):
        if not add_up:
            return float(torch.nn.utils.clip_grad_norm_(parameters, most))
        whole = torch.nn.utils.get_total_norm(grads)
        add_up(squares := whole.double().square())
        whole = squares.sqrt().to(whole.dtype)
        torch.nn.utils.clip_grads_with_norm_(parameters, most, whole)
        return float(whole)
    total, words = torch.zeros((), dtype=torch.float64), optimizer.masters.words
    for dtype in {g.dtype for g in grads}:
        some = [g if words is None or p is not words.weight else words.part(g) for p, g in found if g.dtype == dtype]
        kernels.run("square_sum", dtype, addresses(some), numbers([g.numel() for g in some]), total, len(some))
    if add_up:
        add_up(total)
    norm: float = float(total) ** 0.5
    # The formula of torch.nn.utils.clip_grads_with_norm_; a norm that is no number is passed on.
    factor = most / (norm + 1e-6)
    optimizer.gradient_factor = 1.0 if factor > 1.0 else factor
    return norm


def _fuses(optimizer: Optimizer) -> bool:
    """Whether the kernel computes what this optimizer would: Adam or AdamW itself, in its plain form."""
    special = ("amsgrad", "maximize", "capturable", "differentiable")
    return (
        type(optimizer) in (Adam, AdamW)
        # A scheduler made earlier has wrapped the old class's step on the instance.
        and "step" not in vars(optimizer)
        and not any(group.get(name) for group in optimizer.param_groups for name in special)
        and all(p.is_contiguous() and p.dtype in (torch.float32, torch.bfloat16) for p in _group_parameters(optimizer))
    )


def put_on_masters(optimizer: Optimizer, masters: Masters) -> None:
    """Make `optimizer` update the masters of the bf16 parameters among its own, and round into those parameters.

    The same object with the same state, groups and hooks, so whoever holds it (a learning rate scheduler, a trainer)
    goes on as before. Moments are fp32.
    """
    if getattr(optimizer, "masters", None) is masters:
        return
    optimizer.masters = masters  # type: ignore[attr-defined]
    swap = _Swap(masters)
    optimizer.register_load_state_dict_pre_hook(swap.enter)
    optimizer.register_load_state_dict_post_hook(swap.leave)
    if _fuses(optimizer):
        own = type(optimizer)
        optimizer.__class__ = type(f"Fused{own.__name__}", (FusedStep, own), {"__module__": __name__})
        # Hooks around `step` are put on a class when its first instance is made, and this class had none.
        optimizer._patch_step_function()
        return
    optimizer.register_step_pre_hook(swap.enter)
    optimizer.register_step_post_hook(swap.leave)
