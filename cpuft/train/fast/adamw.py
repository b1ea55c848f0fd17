"""fp32 master weights beside bf16 compute weights, and optimizers that update the masters.

bf16 keeps 8 bits: an update of less than 1/256 of a weight rounds away, and with a learning rate of 2e-5 most updates
are that small. So fp32 masters are what is trained, saved and loaded. AdamW updates them by one C++ kernel that also
rounds them into the compute weights; any other optimizer gets the masters in place of the compute weights for the time
of its step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from cpuft.kernels import Kernels, address_array, int64_array, kernels_for
from cpuft.train.fast.token_embedding import EmbeddingGradient

MASTERS_ATTRIBUTE = "_cpuft_masters"
"""Attribute of an accelerated model that holds its `MasterWeights`."""


class MasterWeights:
    """The fp32 masters of a model's bf16 parameters.

    `state_dict` of the model, of any module in it and of any module around it (and so `save_pretrained`) returns
    masters under the parameters' own names. `load_state_dict` of these modules copies fp32 values into them. If
    something else writes to a parameter (a copy, an initialiser), the next step or save notices and takes the new value
    for the master.
    """

    def __init__(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Make masters of the fp32 `parameters` of `model`, which become bf16, and install the hooks.

        Gradients of these parameters are dropped. `parameters` may be empty, and those that are not of `model` are
        ignored. The object is stored in the model's attribute `MASTERS_ATTRIBUTE`.
        """
        wanted = {id(p) for p in parameters}
        self.parameters = {name: p for name, p in model.named_parameters() if id(p) in wanted}
        """The bf16 parameters by their names in the model, also those whose masters are handed over."""
        self._masters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        """The version that torch counts for a parameter, when it was its master's rounded value."""
        self.embedding: EmbeddingGradient | None = None
        """The gradient of the model's token embedding; None if the embedding is not patched."""
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
        """Return whether there is a master of this parameter here."""
        return parameter in self._masters

    def get(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's fp32 master itself, not a copy.

        If something has written to the parameter since it was rounded, elements that differ from the rounded master are
        first copied into the master. Returns None for a parameter without a master here: one that was never rounded to
        bf16, or whose master was handed over.
        """
        master = self._masters.get(parameter)
        if master is not None and parameter._version != self._versions[parameter]:
            self._follow(parameter)
        return master

    def hand_over(self, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Remove and return the masters of these parameters by parameter: the caller updates both from now on.

        Parameters without a master are left out of the result. Until `take_back`, the model's `state_dict` and `save`
        raise KeyError, and values that `load_state_dict` loads into these parameters are rounded to bf16.
        """
        return {parameter: self._masters.pop(parameter) for parameter in parameters if parameter in self._masters}

    def take_back(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Hold these masters again, given by parameter.

        The parameters must be their rounded values: nothing checks it.
        """
        self._masters.update(masters)
        self.mark_rounded(masters)

    def mark_rounded(self, parameters: Iterable[Tensor]) -> None:
        """Record that the present values of these parameters are their masters, rounded to bf16; no value changes."""
        self._versions.update((parameter, parameter._version) for parameter in parameters)

    @torch.no_grad()
    def _follow(self, parameter: Tensor) -> None:
        master = self._masters[parameter]
        value = parameter.detach()
        rounded = master.to(value.dtype)
        if not torch.equal(value, rounded):
            master.copy_(torch.where(value == rounded, master, value.float()))
        self.mark_rounded([parameter])

    def save(self, parameters: Mapping[str, nn.Parameter], state: dict[str, Any]) -> None:
        """Replace bf16 parameters in a state dict by their masters, which are not copied.

        `parameters`: bf16 parameters by their names in the state dict. Names that the state dict lacks are not added.
        Masters first take values that something else has written to the parameters.

        Raises KeyError if the state dict has a parameter whose master was handed over.
        """
        for name, parameter in parameters.items():
            if name in state:
                self._follow(parameter)
                state[name] = self._masters[parameter]

    @torch.no_grad()
    def load(self, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]) -> None:
        """Copy values from a state dict into the masters of bf16 parameters.

        `parameters`: by their names in the state dict. Names that it lacks, values of other shapes, and parameters
        whose masters were handed over are left out.
        """
        for name, parameter in parameters.items():
            value = state.get(name)
            if isinstance(value, Tensor) and value.shape == parameter.shape and parameter in self._masters:
                self._masters[parameter].copy_(value)

    @contextmanager
    def in_parameters(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Inside, the `parameters` that have a master hold its data, and fp32 copies of their gradients.

        Any optimizer can step them so. Other parameters are left as they are. On leaving, also by an exception, the
        masters are rounded into the bf16 compute weights, and the bf16 gradients from before are back.
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
                # A loader may have given the parameter new storage: that is its master from now on.
                self._masters[parameter] = parameter.data
                parameter.data = data
                with torch.no_grad():
                    parameter.copy_(self._masters[parameter])
                parameter.grad = grad
            self.mark_rounded(mine)

    @contextmanager
    def in_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the groups and the state of `optimizer` have masters in place of bf16 parameters.

        The masters have fp32 copies of the gradients. Parameters without a master stay in the groups. On leaving, also
        by an exception, the parameters are back in the groups, and the masters are rounded into them.

        The parameters keep their dtype: a parameter that gets data of another dtype loses the hook by which
        DistributedDataParallel learns of its gradient, because torch then makes it a new gradient accumulator.
        """
        mine = [p for group in optimizer.param_groups for p in group["params"] if p in self._masters]
        masters = {p: nn.Parameter(master) for p in mine if (master := self.get(p)) is not None}
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
        _replace_parameters(optimizer, masters)
        try:
            yield
        finally:
            _replace_parameters(optimizer, {master: parameter for parameter, master in masters.items()})
            for parameter, master in masters.items():
                with torch.no_grad():
                    parameter.copy_(master)
            self.mark_rounded(masters)


class _StateHooks:
    """Hooks on one module's own entries in state dicts.

    The object is the hook of saving because torch sets an attribute on that, which a method refuses. deepcopy copies
    the object.
    """

    def __init__(self, masters: MasterWeights, parameters: Mapping[str, nn.Parameter]) -> None:
        self.masters = masters
        self.parameters = parameters
        """The module's own bf16 parameters by name."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self.masters.save({prefix + name: p for name, p in self.parameters.items()}, state)

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.masters.load({prefix + name: p for name, p in self.parameters.items()}, state)


def _replace_parameters(optimizer: Optimizer, replacements: Mapping[Any, nn.Parameter]) -> None:
    """Put other parameters into an optimizer's groups, together with the state of those that they replace."""
    for group in optimizer.param_groups:
        group["params"][:] = [replacements.get(p, p) for p in group["params"]]
    state = list(optimizer.state.items())
    optimizer.state.clear()
    for parameter, values in state:
        optimizer.state[replacements.get(parameter, parameter)] = values


@contextmanager
def fp32_weights(model: nn.Module) -> Iterator[None]:
    """Inside, the bf16 parameters of an accelerated model are its fp32 masters; on leaving they are rounded to bf16.

    For code that reads or writes weights between steps in full precision, such as averages over ranks or moving
    averages. What is written to the parameters inside goes into the masters; gradients inside are fp32 copies. No
    forward pass may run inside. A model that is not accelerated is left alone, and so are parameters whose masters were
    handed over.
    """
    masters: MasterWeights | None = getattr(model, MASTERS_ATTRIBUTE, None)
    if masters is None:
        yield
        return
    with masters.in_parameters(list(masters.parameters.values())):
        yield


def set_gradient_rows(model: nn.Module, rows: Tensor) -> None:
    """State that an accelerated model's token embedding has a zero gradient outside of `rows`.

    Call this after writing to the gradient, else all its rows count as unknown, and clipping and AdamW process them
    all. Does nothing if the model is not accelerated or its embedding is not patched.

    `rows`: int64, ascending, each once; rows that the last backward pass has written must be among them.
    """
    masters: MasterWeights | None = getattr(model, MASTERS_ATTRIBUTE, None)
    if masters and masters.embedding:
        masters.embedding.set_rows(rows)


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _SwapHooks:
    """Hooks that put masters in the place of compute weights while an optimizer steps."""

    def __init__(self, masters: MasterWeights) -> None:
        self.masters = masters
        self.open: Any = None

    def enter(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Swap the weights before `step`, and return its arguments, with another closure if there is one."""
        self._swap(optimizer)
        own, *others = args
        others = [self._wrap_closure(optimizer, one) if callable(one) else one for one in others]
        kwargs = {name: self._wrap_closure(optimizer, one) if callable(one) else one for name, one in kwargs.items()}
        return (own, *others), kwargs

    def leave(self, *call: Any) -> None:
        """Put the compute weights back after `step`."""
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None

    def _swap(self, optimizer: Optimizer) -> None:
        self.leave()  # a step that has raised an error has left the masters in the groups
        self.open = self.masters.in_optimizer(optimizer)
        self.open.__enter__()

    def _wrap_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that runs with the compute weights: layers compute in bf16, and gradients go to these."""

        def run() -> Any:
            self.leave()
            loss = closure()
            self._swap(optimizer)
            return loss

        return run


class MasterStep(Optimizer):
    """Mixed in before the class of an optimizer that updates masters, whatever optimizer it is."""

    masters: list[MasterWeights]
    """The masters of the bf16 parameters, of one model each; other parameters are updated as they are."""

    @contextmanager
    def with_masters(self) -> Iterator[None]:
        """Inside, the optimizer's groups and state have masters in place of bf16 parameters, see `in_optimizer`."""
        with ExitStack() as stack:
            for one in self.masters:
                stack.enter_context(one.in_optimizer(self))
            yield

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state as torch does, with fp32 moments for the masters.

        If torch refuses the state, its exception is passed on, and the optimizer has its parameters again.
        """
        with self.with_masters():
            super().load_state_dict(state_dict)


@dataclass(frozen=True)
class ParameterUpdate:
    """The tensors that one parameter's update reads and writes, all contiguous."""

    weights: Tensor
    """fp32: the master, or the parameter itself. The update writes to it."""
    compute: Tensor | None
    """bf16: the update writes the rounded weights to it; None where the parameter is fp32."""
    grad: Tensor
    """fp32 or bf16, in the shape of the weights."""
    state: dict[str, Any]
    """The parameter's state in torch's optimizer: "step", and the fp32 moments "exp_avg" and "exp_avg_sq", to which the
    update writes."""
    touched: Tensor | None = None
    """(rows,) uint8, zero for rows of the weights whose gradient and moments are zero; None if that is unknown."""


class FusedStep(MasterStep):
    """Mixed in before Adam or AdamW: `step` runs the C++ kernel. The state has torch's names, as in checkpoints."""

    gradient_factor: float = 1.0
    """The next step multiplies gradients by this, and sets it to 1 again; `clip_gradients` sets it."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters that have a gradient; return what `closure` returned, None without one.

        `closure`: called first, with gradients enabled; it computes the loss and the gradients. Where the kernel cannot
        update all parameters, torch's own step runs on the masters; it raises RuntimeError for sparse gradients.
        """
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
            alike: dict[tuple[float, torch.dtype], list[ParameterUpdate]] = {}
            updates = self._make_updates(group["params"])
            # All at once: Python between the calls of torch would take longer than the kernel for a small model.
            counts = torch.stack([update.state["step"] for update in updates]).tolist() if updates else []
            for count, update in zip(counts, updates, strict=True):
                alike.setdefault((count, update.grad.dtype), []).append(update)
            for (count, _), some in alike.items():
                _run_adamw(kernels, some, count, group, self.gradient_factor)
        self.gradient_factor = 1.0
        return loss

    def find_kernels(self) -> Kernels | None:
        """Return the kernels if they can update all parameters that have a gradient; else None.

        They cannot if a gradient is sparse, or if a parameter without a master is not fp32.
        """
        for parameter in _list_parameters(self):
            if (grad := parameter.grad) is not None:
                is_fp32 = parameter.dtype == torch.float32 or any(parameter in one for one in self.masters)
                if grad.is_sparse or not is_fp32:
                    return None
        return kernels_for(torch.empty(0))

    def list_embeddings(self) -> dict[Tensor, EmbeddingGradient]:
        """Return the gradients of token embeddings by their weights."""
        return {one.embedding.weight: one.embedding for one in self.masters if one.embedding is not None}

    def _make_updates(self, parameters: list[nn.Parameter]) -> list[ParameterUpdate]:
        """Return the updates of the parameters that have a gradient, and count this step in their states.

        A state is made if there is none yet.
        """
        embeddings, updates = self.list_embeddings(), list[ParameterUpdate]()
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            found = (master for one in self.masters if (master := one.get(parameter)) is not None)
            master, state = next(found, None), self.state[parameter]
            weights, compute = (parameter, None) if master is None else (master, parameter)
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
            embedding = embeddings.get(parameter)
            touched = None if embedding is None else embedding.touched_rows(state)
            assert parameter.grad is not None
            updates.append(ParameterUpdate(weights, compute, parameter.grad.contiguous(), state, touched))
        if updates:
            torch._foreach_add_([update.state["step"] for update in updates], 1)
            torch.autograd.graph.increment_version(parameters)
        for one in self.masters:
            one.mark_rounded(parameter for parameter in parameters if parameter in one)
        return updates


def _run_adamw(
    kernels: Kernels, updates: list[ParameterUpdate], count: float, group: dict[str, Any], factor: float = 1.0
) -> None:
    """Make one step of AdamW, or of Adam, by the kernel, in place; the formulas are those of torch.optim.

    The kernel writes to the weights, the compute weights and the moments, but not to the gradients or to "step" in the
    state.

    Parameters
    ----------
    updates: at least one parameter, all of one group and with gradients of one dtype.
    count: number of this step, from 1, for the bias correction of the moments.
    group: the parameter group with torch's options lr, betas, eps and weight_decay. Weight decay is that of AdamW if
        `decoupled_weight_decay` is there and true, else it is added to the gradient, as in Adam.
    factor: gradients are multiplied by this.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    shrink, pull = (1.0 - rate * decay, 0.0) if group.get("decoupled_weight_decay") else (1.0, decay)
    columns = [address_array([u.weights for u in updates]), address_array([u.compute for u in updates])]
    columns.append(address_array([u.grad for u in updates]))
    columns += [address_array([u.state[name] for u in updates]) for name in ("exp_avg", "exp_avg_sq")]
    columns.append(address_array([u.touched for u in updates]))
    sizes = int64_array([u.weights.numel() for u in updates])
    widths = int64_array([1 if u.touched is None else u.weights.shape[1] for u in updates])
    step, root = rate / (1.0 - beta1**count), (1.0 - beta2**count) ** -0.5
    scalars = (1.0 - beta1, 1.0 - beta2, float(group["eps"]), shrink, pull, step, root, factor)
    kernels.run("adamw", updates[0].grad.dtype, *columns, sizes, widths, len(updates), *scalars)


def clip_gradients(
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    sum_over_ranks: Callable[[Tensor], object] | None = None,
    share_plain: Callable[[Tensor], object] | None = None,
) -> float:
    """Clip the gradients of `parameters` to the norm `max_norm` for the optimizer's next step.

    Returns the L2 norm of all these gradients together before clipping, 0.0 if there are none. As in
    torch.nn.utils.clip_grad_norm_, gradients with a norm of at most `max_norm` are not scaled up; a norm that is NaN or
    infinite is returned, without an error, and can make weights NaN in the next step.

    If the optimizer is a `FusedStep` that holds all these parameters, the kernels can update its parameters, and all
    gradients are contiguous fp32 or bf16, the gradients themselves stay as they are and the next step scales them,
    which saves a pass over memory. Otherwise they are scaled in place.

    Parameters
    ----------
    parameters: those without a gradient are skipped.
    sum_over_ranks: where this rank holds only a shard of the gradients, sums the squared norm, an fp64 scalar, over the
        ranks in place.
    share_plain: where all ranks have the same gradients, gives them one rank's squared norm, in place, if torch
        computes it: torch's sums depend on the CPU and the number of threads. Those of the kernels do not.
    """
    found = [(p, p.grad) for p in parameters if p.grad is not None]
    parameters = [p for p, _ in found]
    grads = [grad for _, grad in found]
    kernels = optimizer.find_kernels() if isinstance(optimizer, FusedStep) else None
    plain = any(g.is_sparse or not g.is_contiguous() or kernels_for(g) is None for g in grads)
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
    for dtype in dict.fromkeys(g.dtype for g in grads):  # in one order, as the sum depends on it
        some = [embeddings[p].nonzero_part(g) if p in embeddings else g for p, g in found if g.dtype == dtype]
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
    """Make `optimizer` update the masters of its bf16 parameters and round them into these parameters.

    It stays the same object with the same state, groups and hooks, so that a learning rate scheduler or a trainer that
    holds it goes on as before. Moments are fp32. An Adam or AdamW without amsgrad, maximize, capturable or
    differentiable gets a subclass with `FusedStep` for its class, unless a scheduler that was made earlier has wrapped
    its `step`; any other optimizer gets a subclass with `MasterStep`, and hooks around its `step`. A call with the
    masters of another model adds these; a second call with the same masters does nothing.
    """
    known = vars(optimizer).setdefault("masters", [])
    if any(one is masters for one in known):
        return
    known.append(masters)
    own = type(optimizer)
    if not isinstance(optimizer, MasterStep):
        mixin = FusedStep if _can_fuse(optimizer) else MasterStep
        name = f"Fused{own.__name__}" if mixin is FusedStep else own.__name__
        optimizer.__class__ = type(name, (mixin, own), {"__module__": __name__})
        # torch puts hooks around `step` of a class when its first instance is made, and this class had none.
        optimizer._patch_step_function()
    if isinstance(optimizer, FusedStep):
        return
    swap = _SwapHooks(masters)
    optimizer.register_step_pre_hook(swap.enter)
    optimizer.register_step_post_hook(swap.leave)
