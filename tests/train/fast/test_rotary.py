"""Rotary position embedding with and without norms, as kernels and as plain torch, against transformers' in fp64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Gemma3TextConfig, Qwen3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from cpuft.kernels import plain_torch
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.elementwise import Norm, read_norm
from cpuft.train.fast.rotary import Angles, HeadNorms, rotate
from tests.train.fast.conftest import need_kernels
from tests.train.fast.encoders import relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3 / 256}
NO_NORMS: HeadNorms = (None, None)


def each_way() -> Iterator[contextlib.AbstractContextManager[None]]:
    """First the kernels, then plain torch."""
    need_kernels()
    yield contextlib.nullcontext()
    yield plain_torch()


def draw_angles(tokens: int, half: int) -> Angles:
    angles = 10 * torch.randn(tokens, half)
    return Angles(1.2 * angles.cos(), 1.2 * angles.sin())


def draw_norm(size: int, offset: float) -> Norm:
    return Norm(torch.randn(size, requires_grad=True), None, 0.1, is_centred=False, weight_offset=offset)


def exact_heads(x: Tensor, angles: Angles | None, norm: Norm | None, weight: Tensor | None) -> Tensor:
    """Norm and rotation of (tokens, heads, size)."""
    if norm is not None and weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (weight + norm.weight_offset)
    if angles is None:
        return x
    cos, sin = (torch.cat([half, half], 1).double()[None] for half in (angles.cos, angles.sin))
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned, _ = apply_rotary_pos_emb(turning.transpose(0, 1)[None], turning.transpose(0, 1)[None], cos, sin)
    return torch.cat([turned[0].transpose(0, 1), rest], -1)


@given(
    tokens=st.sampled_from([1, 2, 9, 40]),
    counts=st.sampled_from([(1, 0), (2, 1), (4, 2), (3, 1), (4, 4)]),
    size=st.integers(1, 40) | st.sampled_from([64, 100, 128]),
    share=st.sampled_from([None, 0.0, 0.3, 1.0]),
    normed=st.tuples(st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0])),
    is_leaf=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_rotate(
    tokens: int,
    counts: tuple[int, int],
    size: int,
    share: float | None,
    normed: tuple[bool, bool, float],
    is_leaf: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(tokens * size)
    heads = Heads(counts[0], size, 1.0, counts[1])
    angles = None if share is None else draw_angles(tokens, round(share * (size // 2)))
    query, key = (draw_norm(size, normed[2]) if has_norm else None for has_norm in normed[:2])
    used = [norm.weight for norm in (query, key) if norm is not None and norm.weight is not None]
    packed = torch.randn(tokens, (heads.count + 2 * heads.keys) * size).to(dtype).requires_grad_()
    weights = torch.randn(packed.shape).to(dtype)

    def exact(packed: Tensor, *given: Tensor) -> Tensor:
        q, k, v = torch.split(packed.view(tokens, -1, size), [heads.count, heads.keys, heads.keys], 1)
        rest = list(given)
        q = exact_heads(q, angles, query, rest.pop(0) if query else None)
        k = exact_heads(k, angles, key, rest.pop(0) if key else None)
        return torch.cat([q, k, v], 1).flatten(1)

    doubles = [t.detach().double().requires_grad_() for t in (packed, *used)]
    wanted = exact(*doubles)
    wanted_grads = torch.autograd.grad(wanted, doubles, weights.double())
    for way in each_way():
        # What is no leaf may be overwritten.
        given = packed if is_leaf else packed * 1
        with way:
            found = rotate(given, angles, heads, (query, key))
            grads = torch.autograd.grad(found, [packed, *used], weights)
        assert found.dtype == dtype
        for one, other in zip((found, *grads), (wanted, *wanted_grads), strict=True):
            assert relative_error(one, other) < TOLERANCE[dtype]


def test_the_rotation_is_that_of_a_model() -> None:
    config = Qwen3Config(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    positions = torch.tensor([[0, 1, 2, 5, 100]])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.randn(1, 5, 32), positions)
    packed = torch.randn(5, 4 * 16)
    q, k, v = (x.view(1, 5, -1, 16).transpose(1, 2) for x in torch.split(packed, [32, 16, 16], 1))
    turned = (x.transpose(1, 2).reshape(5, -1) for x in (*apply_rotary_pos_emb(q, k, cos, sin), v))
    wanted = torch.cat(list(turned), 1)
    for way in each_way():
        with way:
            found = rotate(packed.clone(), Angles(cos[0, :, :8], sin[0, :, :8]), Heads(2, 16, 0.25, 1), NO_NORMS)
        torch.testing.assert_close(found, wanted)


def test_norms_of_gemma_follow_their_weights() -> None:
    module = Gemma3RMSNorm(Gemma3TextConfig(head_dim=16).head_dim)
    heads, packed = Heads(2, 16, 0.25, 1), torch.randn(5, 64)
    norm = read_norm(module)
    for way in each_way():
        torch.nn.init.normal_(module.weight)
        with way:
            found = rotate(packed.clone(), None, heads, (norm, None))
        torch.testing.assert_close(found[:, :32].reshape(10, 16), module(packed[:, :32].reshape(10, 16)))
        assert torch.equal(found[:, 32:], packed[:, 32:])


def test_memory_is_reused_only_where_nothing_needs_the_old_values() -> None:
    need_kernels()
    heads, angles, norms = Heads(2, 8, 1.0), draw_angles(5, 4), (draw_norm(8, 0.0), None)
    leaf = torch.randn(5, 48, requires_grad=True)
    before = leaf.detach().clone()

    def overwrites(packed: Tensor, norms: HeadNorms) -> bool:
        return rotate(packed, angles, heads, norms).data_ptr() == packed.data_ptr()

    assert overwrites(leaf * 1, NO_NORMS)
    assert not overwrites(leaf * 1, norms)
    assert not overwrites(leaf, NO_NORMS)
    assert not overwrites((leaf * 1)[:], NO_NORMS)
    with torch.no_grad():
        assert overwrites(leaf * 1, norms)
        assert not overwrites(leaf, norms)
    assert torch.equal(leaf, before)
    # An operation that has saved its result for backward notices.
    saved = leaf.exp()
    turned = rotate(saved, angles, heads, NO_NORMS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(turned.sum(), leaf)


def test_without_angles_and_norms_nothing_happens() -> None:
    packed = torch.randn(5, 24)
    assert rotate(packed, None, Heads(1, 8, 1.0), NO_NORMS) is packed
