"""The cross entropy of a language model's next tokens, computed for a chunk of tokens at a time.

The logits of 2048 tokens of a vocabulary of 150,000 take 1.2 GB, and their gradient as much again. So the logits of a
chunk, its losses and its gradients are computed together in the forward pass, and the logits are dropped. torch's own
`linear_cross_entropy` does the same, but only from torch 2.13 on, without softcapping, and with one loss for all
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from cpuft.train.fast.frozen import multiply_columns, multiply_rows
from cpuft.train.memory_estimate import CHUNK_LOGITS


@dataclass(frozen=True)
class HeadForm:
    """What a decoder does with the product of its head to make logits."""

    factor: float = 1.0
    softcap: float = 0.0
    """With c above 0, logits are c * tanh(factor * product / c), as in Gemma 2 (Gemma Team 2024, section 2)."""


def compute_token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, form: HeadForm
) -> torch.Tensor:
    """Return the cross entropy of each token, fp32, shape (tokens,).

    `hidden` has the shape (tokens, hidden size), `weight` (vocabulary, hidden size), `bias` (vocabulary,), `targets`
    (tokens,), int64. Products are computed in the type of autocast if that is switched on, else in the type of
    `hidden`; softmax and losses always in fp32. Gradients flow to `hidden`, `weight` and `bias`, if they require them;
    they are computed in the forward pass, and so a backward pass raises ValueError if the losses have different
    factors.
    """
    function: Any = _ChunkedCrossEntropy  # torch has no types for functions of one's own
    losses: torch.Tensor = function.apply(hidden, weight, bias, targets, form, torch.is_grad_enabled())
    return losses


@torch.no_grad()
def predict_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, form: HeadForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of `compute_token_losses`, and whether each target is the likeliest token, bool, (tokens,)."""
    head = _Head(hidden, weight, bias, form)
    losses, is_right = torch.empty(len(hidden)), torch.empty(len(hidden), dtype=torch.bool)
    for part in head.chunks:
        logits, _ = head.compute_logits(part)
        wanted = targets[part]
        losses[part] = logits.logsumexp(-1) - logits.gather(1, wanted[:, None])[:, 0]
        is_right[part] = logits.argmax(-1) == wanted
    return losses, is_right


class _Head:
    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: HeadForm) -> None:
        self.dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        self.hidden = hidden.to(self.dtype)
        self.is_narrow = weight.dtype == torch.bfloat16 != self.dtype
        """Whether the weight is converted a few rows at a time: as a whole it would take twice its memory."""
        # Otherwise it is converted here, once for all chunks, because autocast would convert it in each.
        self.weight = weight if self.is_narrow else weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.form = form
        size = max(1, CHUNK_LOGITS // len(weight))
        self.chunks = [slice(start, start + size) for start in range(0, len(hidden), size)]

    def compute_logits(self, part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of a chunk in fp32, and with softcapping their derivative by the uncapped ones."""
        with torch.autocast("cpu", enabled=False):
            logits = self._multiply(self.hidden[part]).float()
        if self.form.factor != 1:
            logits *= self.form.factor
        if not self.form.softcap:
            return logits, None
        logits.div_(self.form.softcap).tanh_()
        slope = 1 - logits**2
        return logits.mul_(self.form.softcap), slope

    def _multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.is_narrow:
            return linear(hidden, self.weight, self.bias)
        product = hidden.new_empty(len(hidden), len(self.weight))
        multiply_rows(hidden, self.weight, product)
        return product if self.bias is None else product.add_(self.bias)

    def find_hidden_gradient(self, gradient: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient of a chunk's hidden states to `out`, given that of its logits."""
        if self.is_narrow:
            multiply_columns(gradient, self.weight, out)
        else:
            torch.mm(gradient, self.weight, out=out)


def _run_chunks(
    head: _Head, targets: torch.Tensor, needed: tuple[bool, ...]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the losses, and gradients of their sum for hidden states, weight and bias, as far as they are needed."""
    losses = torch.empty(len(head.hidden))
    for_hidden = torch.empty_like(head.hidden) if needed[0] else None
    for_weight = torch.zeros(head.weight.shape) if needed[1] else None
    for_bias = torch.zeros(len(head.weight)) if needed[2] else None
    for part in head.chunks:
        logits, slope = head.compute_logits(part)
        wanted = targets[part, None]
        norm = logits.logsumexp(-1, keepdim=True)
        losses[part] = (norm - logits.gather(1, wanted))[:, 0]
        if not any(needed):
            continue
        gradient = logits.sub_(norm).exp_()  # softmax, in the memory of the logits
        gradient.scatter_add_(1, wanted, torch.full(wanted.shape, -1.0))
        if slope is not None:
            gradient *= slope
        if head.form.factor != 1:
            gradient *= head.form.factor
        if for_bias is not None:
            for_bias += gradient.sum(0)
        gradient = gradient.to(head.dtype)
        if for_hidden is not None:
            head.find_hidden_gradient(gradient, for_hidden[part])
        if for_weight is not None and head.dtype == torch.float32:
            for_weight.addmm_(gradient.T, head.hidden[part])
        elif for_weight is not None:
            for_weight += gradient.T @ head.hidden[part]
    return losses, [for_hidden, for_weight, for_bias]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Losses whose gradients are computed in the forward pass, for a sum in which all losses have the same factor."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, form: HeadForm, keeps: bool) -> Any:
        """Return the losses. `keeps`: whether gradients are needed at all."""
        needed = tuple(keeps and one for one in ctx.needs_input_grad[:3])
        head = _Head(hidden, weight, bias, form)
        with torch.autocast("cpu", enabled=False):
            losses, ctx.gradients = _run_chunks(head, targets, needed)
        ctx.dtypes = [None if one is None else one.dtype for one in (hidden, weight, bias)]
        return losses

    @staticmethod
    def backward(ctx: Any, *factors: Any) -> Any:
        """Return the gradients, once, times the factor that all losses have; ValueError: their factors differ."""
        if (factors[0] != factors[0][:1]).any():
            raise ValueError("the losses of tokens are added up with different factors")
        gradients, ctx.gradients = ctx.gradients, None
        for one in gradients if len(factors[0]) else ():
            if one is not None:
                one.mul_(factors[0][0])
        found = (None if one is None else one.to(dtype) for one, dtype in zip(gradients, ctx.dtypes))
        return (*found, None, None, None)
