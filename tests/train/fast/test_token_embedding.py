"""Word embeddings by rows: the same updates, whatever somebody does with the gradient on the way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cpuft.train.fast import token_embedding
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.fast.adamw import clip_gradients
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE, set_gradient_rows
from cpuft.train.fast.token_embedding import EmbeddingGradient, FusedEmbeddings
from tests.train.fast.conftest import need_kernels
from tests.train.fast.encoders import KINDS, make_model

pytestmark = pytest.mark.usefixtures("one_thread")  # kernels on several have tests of their own

Step = Callable[[Any, Any, int], None]


def backward(model: Any, seed: int) -> None:
    """The gradient of a batch of words 0 to 7 and some others, padding among them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(8, (3, 6), generator=generator) + torch.tensor([[0], [8 * (seed % 6)], [0]])
    model(input_ids=tokens, labels=torch.tensor([0, 1, 0])).loss.backward()


def update(model: Any, optimizer: Any) -> None:
    clip_gradients(optimizer, model.parameters(), 0.5)
    optimizer.step()


def plainly(model: Any, optimizer: Any, seed: int) -> None:
    backward(model, seed)
    update(model, optimizer)
    optimizer.zero_grad()


def in_micro_batches(model: Any, optimizer: Any, seed: int) -> None:
    for part in range(3):
        backward(model, 3 * seed + part)
    update(model, optimizer)
    optimizer.zero_grad()


def zeroing(model: Any, optimizer: Any, seed: int) -> None:
    backward(model, seed)
    update(model, optimizer)
    optimizer.zero_grad(set_to_none=False)


def adding_noise(model: Any, optimizer: Any, seed: int) -> None:
    backward(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=1e-3)
    update(model, optimizer)
    optimizer.zero_grad()


def looking_up_twice(model: Any, optimizer: Any, seed: int) -> None:
    """As who compares two views of a row does."""
    words = torch.arange(4) + 8 * (seed % 6)
    one, other = (model(input_ids=some.expand(2, 4)).logits.square().mean() for some in (words, words + 1))
    (one + other).backward()
    update(model, optimizer)
    optimizer.zero_grad()


def adding_two_look_ups(model: Any, optimizer: Any, seed: int) -> None:
    """A backward pass of one look-up, and then one of two."""
    backward(model, seed)
    looking_up_twice(model, optimizer, seed + 1)


def asking_between(model: Any, optimizer: Any, seed: int) -> None:
    """torch.autograd.grad reaches the embedding between two backward passes, and adds nothing to its gradient."""
    backward(model, seed)
    model_output = model(input_ids=torch.tensor([[60, 61, 62]])).logits
    torch.autograd.grad(model_output.sum(), model.get_input_embeddings().weight)
    backward(model, seed + 1)
    update(model, optimizer)
    optimizer.zero_grad()


def asking_for_it(model: Any, optimizer: Any, seed: int) -> None:
    """torch.autograd.grad gives a gradient away; who has it still has it after the next one."""
    weight = model.get_input_embeddings().weight
    (given,) = torch.autograd.grad(model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum(), weight)
    before = given.clone()
    plainly(model, optimizer, seed)
    assert torch.equal(given, before)


def loading(model: Any, optimizer: Any, seed: int) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plainly(model, optimizer, seed)


STEPS = (
    plainly,
    in_micro_batches,
    zeroing,
    adding_noise,
    looking_up_twice,
    adding_two_look_ups,
    asking_between,
    asking_for_it,
    loading,
)


FUSED_KINDS = ("bert", "roberta", "electra", "distilbert", "mpnet")
BOTH_WAYS = ("bert", "deberta-v2")
"""One whose embeddings are a module of cpuft, and one whose embeddings are torch's: the others are like these."""
RATE, MOST_STEPS = 1e-2, 5


def make_whole_gradient(model: Any, sums: Any) -> torch.Tensor:
    """What stands in for EmbeddingGradient.accumulate: a new tensor with all rows."""
    return torch.zeros_like(model.get_input_embeddings().weight).index_copy_(0, sums.rows, sums.values)


def make(kind: str, by_rows: bool, decay: float = 0.0, precision: str = "auto") -> tuple[Any, Any]:
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=decay)
    accelerate(model, optimizer, precision=precision)
    if not by_rows:
        masters = getattr(model, MASTERS_ATTRIBUTE)
        masters.embedding.accumulate = functools.partial(make_whole_gradient, model)
        masters.embedding = None
    return model, optimizer


def check_alike(one: Any, other: Any) -> None:
    for (name, value), wanted in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        # Softmax does not depend on the bias of the keys: its gradient is rounding noise, of which AdamW makes steps of
        # up to the learning rate, in any direction.
        is_noise = name.endswith(("key.bias", "k_lin.bias", "attn.k.bias"))
        # The norm adds up in another order.
        atol = 2 * RATE * MOST_STEPS if is_noise else 1e-6
        torch.testing.assert_close(value, wanted, rtol=0 if is_noise else 1e-5, atol=atol, msg=name)


@pytest.mark.parametrize(
    "kind, step",
    [
        pytest.param(kind, step, marks=[pytest.mark.proof] * (kind not in BOTH_WAYS and step not in STEPS[:2]))
        for kind in KINDS
        for step in STEPS
    ],
)
def test_updates_are_the_same(kind: str, step: Step, each_way: None) -> None:
    # In bf16, the other order in which the norm is added up can round a weight up instead of down, and so change all.
    (model, optimizer), (plain, theirs) = (make(kind, by_rows, precision="fp32") for by_rows in (True, False))
    for seed in (1, 2, 3, 4, 5):
        step(model, optimizer, seed)
        step(plain, theirs, seed)
    check_alike(model, plain)


def list_embedding_calls() -> dict[str, dict[str, torch.Tensor]]:
    """Arguments of a module that adds embeddings, by what is special about them."""
    words = torch.tensor([[5, 9, 1, 1], [7, 5, 63, 2]])
    places = torch.tensor([[3, 2, 1, 0]])
    types = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])
    return {
        "words": {"input_ids": words},
        "a part of a batch": {"input_ids": words[:, 1:3]},
        "positions": {"input_ids": words, "position_ids": places},
        "types": {"input_ids": words, "token_type_ids": types},
    }


@pytest.mark.parametrize("kind", FUSED_KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("what", list_embedding_calls())
def test_sums_of_embeddings_are_those_of_their_own_module(kind: str, dropout: float, what: str, each_way: None) -> None:
    given = list_embedding_calls()[what]
    model = make_model(kind, dropout)
    accelerate(model, torch.optim.AdamW(model.parameters()))
    module: Any = next(one for one in model.modules() if hasattr(one, "word_embeddings"))
    assert isinstance(module.forward.__self__, FusedEmbeddings)
    if what == "types" and kind in ("distilbert", "mpnet"):
        return  # they have no types
    results = []
    for forward in (module.forward, functools.partial(type(module).forward, module)):
        torch.manual_seed(3)
        found = forward(**given)
        (found * torch.arange(found.numel()).view(found.shape).sin()).sum().backward()
        results.append((found, {name: one.grad.clone() for name, one in module.named_parameters()}))
        module.zero_grad(set_to_none=True)
        vars(module.word_embeddings).pop("forward", None)  # from now on, torch's own
    (found, gradients), (wanted, theirs) = results
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-4, msg=name)


def test_what_is_unusual_is_left_to_the_module_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    need_kernels()
    model, _ = make("bert", True)
    module, sums, own = model.bert.embeddings, list[int](), token_embedding._sum_of_rows

    def add(*given: Any) -> torch.Tensor:
        sums.append(1)
        return own(*given)

    monkeypatch.setattr(token_embedding, "_sum_of_rows", add)
    words = torch.tensor([[5, 9, 1]])
    module(words)
    assert len(sums) == 1
    with torch.no_grad():
        module(words)
    module(inputs_embeds=torch.zeros(1, 3, 32))
    module(words, past_key_values_length=2)
    looked_up: list[torch.Tensor] = []
    hook = module.word_embeddings.register_forward_hook(lambda one, args, output: looked_up.append(output))
    module(words)
    hook.remove()
    assert len(looked_up) == 1
    for wrong in ({"input_ids": words + 60}, {"input_ids": words, "token_type_ids": words}, {"input_ids": -words}):
        with pytest.raises(IndexError):
            module(**wrong)
    assert len(sums) == 1


def test_with_decay_all_rows_move(each_way: None) -> None:
    (model, optimizer), (plain, theirs) = make("bert", True, 0.1), make("bert", False, 0.1)
    for seed in (1, 2):
        plainly(model, optimizer, seed)
        plainly(plain, theirs, seed)
    check_alike(model, plain)


def embedding_gradient(model: Any) -> EmbeddingGradient:
    need_kernels()
    found: EmbeddingGradient = getattr(model, MASTERS_ATTRIBUTE).embedding
    return found


def check_rows(model: Any, grad: torch.Tensor) -> None:
    rows = embedding_gradient(model).rows
    assert rows is not None
    assert torch.equal(rows, grad.any(1).nonzero()[:, 0])


def test_a_gradient_is_known_by_its_rows_and_stays_where_it_is() -> None:
    model, optimizer = make("bert", True)
    weight, places = model.get_input_embeddings().weight, set()
    for seed in (1, 2):
        backward(model, seed)
        places.add(weight.grad.data_ptr())
        check_rows(model, weight.grad)
        backward(model, seed + 10)
        check_rows(model, weight.grad)
        assert 0 < len(embedding_gradient(model).nonzero_part(weight.grad)) < len(weight)
        optimizer.zero_grad()
    assert len(places) == 1


def test_rows_of_two_look_ups_are_added_to_those_before() -> None:
    model, optimizer = make("bert", True)
    for seed in (1, 2):
        backward(model, seed)
        batches = (torch.tensor([[8, 9], [8, 9]]), torch.tensor([[10, 11], [10, 11]]))
        one, other = (model(input_ids=words).logits.square().mean() for words in batches)
        (one + other).backward()
        check_rows(model, model.get_input_embeddings().weight.grad)
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_token_ids_may_be_int32(kind: str, each_way: None) -> None:
    (model, optimizer), (plain, theirs) = make(kind, True), make(kind, True)
    for dtype, one, its in ((torch.int32, model, optimizer), (torch.int64, plain, theirs)):
        for _ in range(2):
            tokens = torch.tensor([[5, 9, 1], [7, 5, 63]], dtype=dtype)
            one(input_ids=tokens, labels=torch.tensor([0, 1])).loss.backward()
        update(one, its)
    check_alike(model, plain)


def test_only_rows_that_ever_had_a_gradient_are_awake() -> None:
    model, optimizer = make("bert", True)
    backward(model, 1)
    optimizer.step()
    state = optimizer.state[model.get_input_embeddings().weight]
    awake = embedding_gradient(model).touched_rows(state)
    assert awake is not None
    assert torch.equal(awake.bool(), state["exp_avg"].any(1))
    assert not awake.all()


def test_rows_that_others_wrote_to_are_told() -> None:
    model, optimizer = make("bert", True)
    weight = model.get_input_embeddings().weight
    backward(model, 1)
    weight.grad[60] = 1.0
    assert embedding_gradient(model).rows is None
    set_gradient_rows(model, weight.grad.any(1).nonzero()[:, 0])
    rows = embedding_gradient(model).rows
    assert rows is not None
    assert rows[-1] == 60
    optimizer.zero_grad()
    backward(model, 2)
    assert not weight.grad[60].any()


def test_a_copy_has_a_gradient_of_its_own() -> None:
    model, optimizer = make("bert", True)
    backward(model, 1)
    other = copy.deepcopy(model)
    backward(other, 2)
    assert embedding_gradient(other).weight is other.get_input_embeddings().weight
    optimizer.zero_grad()
    plain, theirs = make("bert", False)
    backward(model, 3)
    backward(plain, 3)
    update(model, optimizer)
    update(plain, theirs)
    check_alike(model, plain)


def test_a_weight_that_something_else_reads_stays_as_it_is() -> None:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    accelerate(model, torch.optim.AdamW(model.parameters()))
    assert getattr(model, MASTERS_ATTRIBUTE).embedding is None
