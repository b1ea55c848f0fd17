"""Optimizers on fp32 masters: AdamW as one pass with the rounding to bf16, any other through a swap around its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from cpuft.train.fast.kernels import Kernels, addresses, kernels_for, numbers
from cpuft.train.fast.masters import Masters


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
