"""Steps of Adam and AdamW by a C++ kernel, which also updates fp32 masters and clips; other optimizers stay torch's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from cpuft.kernels import KERNEL_TYPES, Kernels, address_array, int64_array, kernels_for
from cpuft.train.fast.master_weights import MasterStep, MasterWeights
from cpuft.train.fast.token_embedding import EmbeddingGradient


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class FusedStep(MasterStep):
    """Mixed in before Adam or AdamW: `step` runs the C++ kernel. The state has torch's names, as in checkpoints."""

    gradient_factor: float = 1.0
    """The next step multiplies gradients by this, and sets it to 1 again; `clip_gradients` sets it."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters with a gradient; return the closure's loss, or None without one."""
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
