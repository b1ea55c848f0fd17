"""Optimizers on fp32 masters: AdamW as one pass with the rounding to bf16, any other through a swap around its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from cpuft.train.fast.kernels import Kernels, kernels_for
from cpuft.train.fast.masters import Masters


def _group_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Swap:
    """Puts masters in the place of compute weights while an optimizer steps or loads its state."""

    def __init__(self, masters: Masters) -> None:
        self.masters = masters
        self.open: Any = None

    def enter(self, optimizer: Optimizer, *rest: Any) -> None:
        self.open = self.masters.in_place(_group_parameters(optimizer))
        self.open.__enter__()

    def leave(self, optimizer: Optimizer, *rest: Any) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None


class FusedStep:
    """Mixed in before Adam or AdamW: `step` runs the kernel. State keeps torch's names, so checkpoints are the same."""

    masters: Masters

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update; like torch's, it returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kernels = kernels_for(torch.empty(0))
        if kernels is None or any(p.grad is not None and p.grad.is_sparse for p in _group_parameters(self)):  # type: ignore[arg-type]
            with self.masters.standing_in(self):  # type: ignore[arg-type]
                super().step()  # type: ignore[misc]
            return loss
        for group in self.param_groups:  # type: ignore[attr-defined]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(kernels, parameter, group)
        return loss

    def _step_one(self, kernels: Kernels, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        master = self.masters.get(parameter)
        state = self.state[parameter]  # type: ignore[attr-defined]
        weights = parameter.detach() if master is None else master
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
        state["step"] += 1
        run_adamw(kernels, parameter, master, state, group)
        torch.autograd.graph.increment_version(parameter)
        if master is not None:
            self.masters.mark(parameter)


def run_adamw(
    kernels: Kernels, parameter: nn.Parameter, master: Tensor | None, state: dict[str, Any], group: dict[str, Any]
) -> None:
    """AdamW's update of one parameter by the kernel; formula and option names as in torch.optim.AdamW."""
    assert parameter.grad is not None
    count = float(state["step"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    shrink, pull = (1.0 - rate * decay, 0.0) if group.get("decoupled_weight_decay") else (1.0, decay)
    weights = parameter.detach() if master is None else master
    compute = None if master is None else parameter.detach()
    arrays = (weights, compute, parameter.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"])
    step, root = rate / (1.0 - beta1**count), (1.0 - beta2**count) ** -0.5
    numbers = (beta1, beta2, float(group["eps"]), shrink, pull, step, root)
    kernels.run("adamw", parameter.grad.dtype, *arrays, weights.numel(), *numbers)


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
    swap = _Swap(masters)
    optimizer.register_load_state_dict_pre_hook(swap.enter)
    optimizer.register_load_state_dict_post_hook(swap.leave)
    if _fuses(optimizer):
        own = type(optimizer)
        optimizer.__class__ = type(f"Fused{own.__name__}", (FusedStep, own), {"__module__": __name__})
        optimizer.masters = masters  # type: ignore[attr-defined]
        # Hooks around `step` are put on a class when its first instance is made, and this class had none.
        optimizer._patch_step_function()
        return
    optimizer.register_step_pre_hook(swap.enter)
    optimizer.register_step_post_hook(swap.leave)
