"""Fast pre-norm layers against transformers' own ones, for each family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cpuft.kernels import plain_torch
from cpuft.train.fast.acceleration import accelerate, describe_layers
from cpuft.train.fast.layout import make_shifted_layout
from cpuft.train.lora import add_adapters
from tests.train.fast.encoders import make_optimizer, relative_error
from tests.train.fast.families import CONFIGS, FAMILIES, LONGEST, WINDOW, compute_loss, make_batch, make_model

pytestmark = pytest.mark.usefixtures("one_thread")  # kernels on several have tests of their own

# Gemma norms what it adds to the hidden states, too, which makes errors of rounding larger: those of transformers' own
# layers are 6e-6 of the gradient then.
LIMITS = {family: 5e-5 if "gemma" in family else 1e-5 for family in FAMILIES}
LENGTHS = (WINDOW + 1, 1, LONGEST, WINDOW - 1, 2, WINDOW)
UPDATES = 5


def make_pair(family: str, precision: str, **settings: Any) -> tuple[Any, Any, Any, Any]:
    """A plain model and an accelerated copy of it, and the optimizers of both."""
    plain = make_model(family, **settings)
    fast = copy.deepcopy(plain)
    # The epsilon is large, so that the optimizer divides no difference of rounding by a small number: with 1e-3, one
    # gradient near 0 makes the difference of a later update ten times as large on some CPUs.
    optimizer = make_optimizer(fast, eps=1e-2)
    accelerate(fast, optimizer, precision=precision)
    layers = plain.config.num_hidden_layers
    assert describe_layers(fast) == f"{layers} of {layers} layers replaced"
    return plain, fast, make_optimizer(plain, eps=1e-2), optimizer


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None}


def check_gradients(fast: Any, plain: Any, limit: float) -> None:
    found, wanted = gradients(fast), gradients(plain)
    assert found.keys() == wanted.keys()
    both = [torch.cat([some[name].flatten() for name in sorted(wanted)]) for some in (found, wanted)]
    assert relative_error(*both) < limit


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [LENGTHS, (17, 17)], ids=["packed", "full"])
def test_losses_and_gradients_are_those_of_the_plain_layers(family: str, lengths: tuple[int, ...]) -> None:
    plain, fast, optimizer, fast_optimizer = make_pair(family, "fp32")
    batch = make_batch(lengths)
    seen = set()
    for _ in range(UPDATES):
        wanted, found = compute_loss(plain, batch), compute_loss(fast, batch)
        assert relative_error(found, wanted) < LIMITS[family]
        seen.add(float(wanted.detach()))
        torch.autograd.backward(wanted)
        torch.autograd.backward(found)
        check_gradients(fast, plain, LIMITS[family])
        for one in (optimizer, fast_optimizer):
            one.step()
            one.zero_grad()
    assert len(seen) == UPDATES


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_compiler_the_results_are_the_same(family: str) -> None:
    plain, fast, _, _ = make_pair(family, "fp32")
    batch = make_batch(LENGTHS)
    with plain_torch():
        found = compute_loss(fast, batch)
        torch.autograd.backward(found)
    wanted = compute_loss(plain, batch)
    torch.autograd.backward(wanted)
    assert relative_error(found, wanted) < 1e-5
    check_gradients(fast, plain, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_within_its_noise(family: str) -> None:
    plain, fast, _, _ = make_pair(family, "bf16")
    rounded = copy.deepcopy(plain)
    batch = make_batch(LENGTHS)
    wanted, found = compute_loss(plain, batch), compute_loss(fast, batch)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = compute_loss(rounded, batch)
    for loss in (wanted, found, theirs):
        torch.autograd.backward(loss)
    both = {
        name: torch.cat([g.flatten() for _, g in sorted(gradients(m).items())])
        for name, m in (("plain", plain), ("fast", fast), ("rounded", rounded))
    }
    noise = relative_error(both["rounded"], both["plain"])
    assert relative_error(both["fast"], both["plain"]) < max(2.0 * noise, 0.02)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_accelerated_model_may_be_converted_to_bf16(family: str, precision: str) -> None:
    plain, fast, _, _ = make_pair(family, precision)
    rounded = copy.deepcopy(plain).to(torch.bfloat16)
    fast.to(torch.bfloat16)
    batch = make_batch(LENGTHS)
    seen = batch["attention_mask"].bool()
    found, theirs, wanted = (model(**batch).last_hidden_state[seen] for model in (fast, rounded, plain))
    assert found.dtype == torch.bfloat16
    assert relative_error(found, wanted) < 1.5 * relative_error(theirs, wanted)
    found.float().square().mean().backward()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(fast).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_see_each_other_only_where_transformers_lets_them(family: str) -> None:
    _, fast, _, _ = make_pair(family, "fp32")
    plain = make_model(family)
    lengths = (7, 3, 12, 1)
    apart = make_batch(lengths)
    rows = [row[: int(count)] for row, count in zip(apart["input_ids"], lengths, strict=True)]
    packed = {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(count) for count in lengths])[None],
    }
    seen = torch.ones(packed["input_ids"].shape, dtype=torch.bool)
    found, theirs, wanted = (
        compute_loss(fast, packed, seen),
        compute_loss(plain, packed, seen),
        compute_loss(plain, apart),
    )
    assert relative_error(found, theirs) < 1e-5
    assert (relative_error(found, wanted) < 1e-5) == (family not in ("modernbert", "eurobert"))


def test_places_of_packed_sequences() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    layout = make_shifted_layout(2, 5, None, positions)
    assert layout is not None
    assert layout.grid.places is not None
    assert (layout.grid.batch, layout.grid.length) == (4, 4)
    assert layout.grid.places.tolist() == [0, 1, 2, 4, 5, 8, 12, 13, 14, 15]
    alone = make_shifted_layout(2, 5, None, torch.arange(5)[None])
    assert alone is not None
    assert alone.grid.places is None


@pytest.mark.parametrize("mask", [[[0, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]], ids=["between", "after"])
def test_rows_that_are_packed_and_unpacked_have_their_gradients(mask: list[list[int]]) -> None:
    seen = torch.tensor(mask)
    layout = make_shifted_layout(2, 4, seen, None)
    assert layout is not None
    hidden = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert layout.pack(hidden).equal(hidden[seen.bool()])
    assert layout.unpack(layout.pack(hidden)).equal(hidden * seen[..., None])
    assert torch.autograd.gradcheck(lambda x: layout.unpack(layout.pack(x).sin()), hidden)
    assert torch.autograd.gradgradcheck(lambda x: layout.unpack(layout.pack(x).sin()), hidden)


@pytest.mark.parametrize("family", ["modernbert", "llama", "gemma3"])
@pytest.mark.parametrize("shift", [8, 4, 1])
def test_padding_may_be_anywhere(family: str, shift: int) -> None:
    """Also between the tokens of an example, where the model's own layers run."""
    plain, fast, _, _ = make_pair(family, "fp32")
    batch = make_batch((17, 9, 13))
    for name, value in batch.items():
        batch[name] = torch.stack([value[0], *(torch.roll(row, shift) for row in value[1:])])
    assert relative_error(compute_loss(fast, batch), compute_loss(plain, batch)) < 1e-5


@pytest.mark.parametrize("family", ["modernbert", "qwen3", "gemma3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_caller_who_wants_hidden_states_gets_all_of_them(family: str, precision: str) -> None:
    plain, fast, _, _ = make_pair(family, precision)
    batch = make_batch((17, 9))
    found, wanted = (model(**batch, output_hidden_states=True).hidden_states for model in (fast, plain))
    seen = batch["attention_mask"].bool()
    for mine, theirs in zip(found, wanted, strict=True):
        assert relative_error(mine[seen], theirs[seen]) < (1e-5 if precision == "fp32" else 0.05)
    # And afterwards the fast layers run again.
    assert relative_error(compute_loss(fast, batch), compute_loss(plain, batch)) < (
        1e-5 if precision == "fp32" else 0.1
    )


def test_a_hook_on_a_layer_sees_every_position() -> None:
    _, fast, _, _ = make_pair("qwen3", "fp32")
    seen: list[torch.Size] = []
    fast.layers[0].register_forward_hook(lambda layer, given, output: seen.append(output.shape))
    compute_loss(fast, make_batch((17, 9)))
    assert seen == [(2, 17, 32)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "smollm3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_accelerated_decoder_generates(family: str, precision: str) -> None:
    config = CONFIGS[family]()
    config.use_cache = True
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    fast = copy.deepcopy(plain)
    accelerate(fast, make_optimizer(fast), precision=precision)
    prompt = make_batch((6,))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found, wanted = (model.generate(**prompt, **options) for model in (fast, plain))
    assert found.shape == wanted.shape == (1, 14)
    if precision == "fp32":
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("family", ["llama", "eurobert"])
def test_a_mask_of_the_caller_s_own_is_obeyed(family: str) -> None:
    plain, fast, _, _ = make_pair(family, "fp32")
    batch = make_batch((9, 9))
    mask = torch.ones(9, 9).tril(-1).bool().expand(2, 1, 9, 9) | torch.eye(9).bool()
    batch = {"input_ids": batch["input_ids"], "attention_mask": mask}
    seen = torch.ones(2, 9, dtype=torch.bool)
    assert relative_error(compute_loss(fast, batch, seen), compute_loss(plain, batch, seen)) < 1e-5


def measure_kept_bytes(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The loss, and how many bytes autograd keeps for its backward pass."""
    sizes: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = compute_loss(model, batch)
    return loss, sum(sizes.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_no_gradient(family: str) -> None:
    plain, fast = make_model(family), make_model(family)
    for layer in fast.layers[:-1]:
        layer.gradient_checkpointing = True
    for model in (plain, fast):
        accelerate(model, make_optimizer(model), precision="fp32")
    batch = make_batch(LENGTHS)
    losses, kept = zip(*(measure_kept_bytes(model, batch) for model in (plain, fast)))
    for loss in losses:
        torch.autograd.backward(loss)
    assert torch.equal(*losses)
    check_gradients(fast, plain, 1e-6)
    assert kept[1] < kept[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_may_be_switched_on_later(family: str, reentrant: bool) -> None:
    """As the Trainer does with --gradient_checkpointing. The batches of two losses have layouts of their own."""
    plain, fast, _, _ = make_pair(family, "fp32")
    fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fast.enable_input_require_grads()
    batches = [make_batch(LENGTHS), make_batch((17, 3))]
    for model in (plain, fast):
        torch.autograd.backward([compute_loss(model, batch) for batch in batches])
    check_gradients(fast, plain, LIMITS[family])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "modernbert"])
def test_adapters_are_trained_as_by_peft_s_own_layers(family: str) -> None:
    plain = add_adapters(make_model(family), rank=4, source="", new=())
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(3))
    fast = copy.deepcopy(plain)
    trained = [one for one in fast.parameters() if one.requires_grad]
    accelerate(fast, torch.optim.AdamW(trained, 1e-3), precision="fp32", adapters=True)
    assert "layers replaced" in describe_layers(fast)
    assert describe_layers(fast)[0] != "0"
    batch = make_batch(LENGTHS)
    wanted, found = compute_loss(plain, batch), compute_loss(fast, batch)
    torch.autograd.backward(wanted)
    torch.autograd.backward(found)
    assert relative_error(found, wanted) < 1e-5
    check_gradients(fast, plain, 1e-5)
    assert all("lora" in name for name in gradients(fast))


def test_dropout_changes_each_pass_and_repeats_with_the_seed() -> None:
    settings = {"attention_dropout": 0.2, "mlp_dropout": 0.2, "embedding_dropout": 0.0}
    _, fast, _, _ = make_pair("modernbert", "fp32", **settings)
    batch = make_batch((17, 9))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(compute_loss(fast, batch))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    fast.eval()
    plain = make_model("modernbert", **settings).eval()
    assert relative_error(compute_loss(fast, batch), compute_loss(plain, batch)) < 1e-5


def test_names_and_values_of_the_state_stay() -> None:
    plain, fast, _, _ = make_pair("qwen3", "bf16")
    found, wanted = fast.state_dict(), plain.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)
