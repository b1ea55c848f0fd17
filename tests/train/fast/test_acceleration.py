from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertForSequenceClassification,
    AlbertForTokenClassification,
    BertForMaskedLM,
    BertForTokenClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2ForTokenClassification,
    GPT2Config,
    GPT2Model,
    ModernBertConfig,
    ModernBertModel,
)
from transformers.models.bert import BertConfig

from cpuft.errors import CpuftError
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.fast.layers import run_layer
from tests.train.fast.encoders import (
    DEBERTA,
    KINDS,
    SIZES,
    make_batch,
    make_model,
    make_optimizer,
    make_pair,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("one_thread")  # kernels on several have tests of their own

# Of the gradient of one parameter: sums of fp32 taken in another order; bf16 through two layers and back.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
LOOSE_BATCH, FULL_BATCH = (17, 9, 5, 3), (17, 17, 17, 17)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("lengths", [LOOSE_BATCH, FULL_BATCH], ids=["packed", "full"])
def test_loss_and_gradients_are_the_plain_model_s(kind: str, precision: str, lengths: tuple[int, ...]) -> None:
    plain, fast = make_pair(kind)
    accelerate(fast, make_optimizer(fast), precision=precision)
    batch = make_batch(lengths)
    wanted, found = plain(**batch), fast(**batch)
    assert relative_error(found.logits, wanted.logits) < TOLERANCE[precision]
    wanted.loss.backward()
    found.loss.backward()
    theirs = dict(plain.named_parameters())
    whole = torch.cat([p.grad.flatten().float() for p in fast.parameters() if p.grad is not None])
    expected = torch.cat([theirs[n].grad.flatten() for n, p in fast.named_parameters() if p.grad is not None])
    assert relative_error(whole, expected) < TOLERANCE[precision]
    # In fp32 each parameter's own gradient holds too, where it is not rounding: a key's bias has none.
    floor = 1e-5 * expected.norm()
    for name, parameter in fast.named_parameters():
        if precision == "fp32" and parameter.grad is not None and theirs[name].grad.norm() > floor:
            assert relative_error(parameter.grad, theirs[name].grad) < TOLERANCE[precision], name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", TOLERANCE)
def test_an_accelerated_model_may_be_converted_to_bf16(kind: str, precision: str, each_way: None) -> None:
    """As the Trainer does with --bf16_full_eval: norms, embeddings and the head are bf16 then, too."""
    plain, fast = make_pair(kind)
    accelerate(fast, make_optimizer(fast), precision=precision)
    batch = make_batch()
    fast(**batch).loss.backward()  # the embedding's gradient is fp32 before
    fast.zero_grad()
    fast.to(torch.bfloat16)
    with torch.no_grad():
        assert relative_error(fast(**batch).logits, plain(**batch).logits) < TOLERANCE["bf16"]
    plain(**batch).loss.backward()
    fast(**batch).loss.backward()
    found, wanted = (
        torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
        for model in (fast, plain)
    )
    assert relative_error(found, wanted) < 2 * TOLERANCE["bf16"]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("lengths", [(170, 9, 131), (170, 170)], ids=["packed", "full"])
def test_a_position_bias_is_added_and_trained(precision: str, lengths: tuple[int, ...], each_way: None) -> None:
    """All distances above 128 share a bucket. The first layer's gradient comes through both layers' scores."""
    plain = make_model("mpnet", max_position_embeddings=172)
    fast = copy.deepcopy(plain)
    accelerate(fast, make_optimizer(fast), precision=precision)
    batch = make_batch(lengths)
    wanted, found = plain(**batch), fast(**batch)
    wanted.loss.backward()
    found.loss.backward()
    limit = 1e-5 if precision == "fp32" else TOLERANCE[precision]
    assert relative_error(found.loss, wanted.loss) < limit
    ours, theirs = (model.mpnet.encoder.relative_attention_bias.weight.grad for model in (fast, plain))
    assert theirs.norm() > 1e-3
    assert relative_error(ours, theirs) < limit
    gradients = [(mine.grad, own.grad) for mine, own in zip(fast.parameters(), plain.parameters(), strict=True)]
    whole, expected = (torch.cat([g.flatten().float() for g in some if g is not None]) for some in zip(*gradients))
    assert relative_error(whole, expected) < limit


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_mask_formats(attention: str) -> None:
    plain, fast = make_pair("bert")
    for model in (plain, fast):
        model.set_attn_implementation(attention)
    accelerate(fast, make_optimizer(fast), precision="fp32")
    batch = make_batch()
    torch.testing.assert_close(fast(**batch).logits, plain(**batch).logits, atol=1e-5, rtol=1e-4)


def test_a_mask_of_queries_and_keys() -> None:
    plain, fast = make_pair("bert")
    accelerate(fast, make_optimizer(fast), precision="fp32")
    batch = make_batch(FULL_BATCH)
    batch["attention_mask"] = torch.ones(17, 17).tril().bool().expand(4, 1, 17, 17)
    torch.testing.assert_close(fast(**batch).logits, plain(**batch).logits, atol=1e-5, rtol=1e-4)


def test_padding_on_the_left() -> None:
    plain, fast = make_pair("bert")
    accelerate(fast, make_optimizer(fast), precision="fp32")
    batch = {name: value.flip(1) if value.dim() == 2 else value for name, value in make_batch().items()}
    torch.testing.assert_close(fast(**batch).logits, plain(**batch).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "mpnet", "albert", "deberta-v2"])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_hidden_states_and_attentions_keep_their_shapes(kind: str, precision: str) -> None:
    plain, fast = make_pair(kind)
    for model in (plain, fast):
        model.config._attn_implementation = "eager"
    accelerate(fast, make_optimizer(fast), precision=precision)
    batch = make_batch()
    wanted = plain(**batch, output_hidden_states=True, output_attentions=True)
    found = fast(**batch, output_hidden_states=True, output_attentions=True)
    seen = batch["attention_mask"].bool()
    for mine, theirs in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert relative_error(mine[seen], theirs[seen]) < TOLERANCE[precision]
    for mine, theirs in zip(found.attentions, wanted.attentions, strict=True):
        assert relative_error(mine, theirs) < TOLERANCE[precision]
    found.loss.backward()
    wanted.loss.backward()
    names = dict(plain.named_parameters())
    for name, parameter in fast.named_parameters():
        if "embeddings" in name or "relative" in name:
            assert relative_error(parameter.grad, names[name].grad) < TOLERANCE[precision], name


def test_the_encoder_alone_gives_every_token() -> None:
    plain, fast = make_pair("bert")
    accelerate(fast, make_optimizer(fast), precision="fp32")
    batch = make_batch()
    del batch["labels"]
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(
        fast.bert(**batch).last_hidden_state[seen], plain.bert(**batch).last_hidden_state[seen], atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("head", [BertForTokenClassification, BertForMaskedLM, BertModel], ids=lambda c: c.__name__)
def test_other_heads_read_every_token(head: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = head(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES))
    fast = copy.deepcopy(plain)
    accelerate(fast, make_optimizer(fast), precision="fp32")
    batch = make_batch()
    del batch["labels"]
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(fast(**batch)[0][seen], plain(**batch)[0][seen], atol=1e-5, rtol=1e-4)


ALBERT_GROUPS = {"num_hidden_layers": 6, "num_hidden_groups": 2, "inner_group_num": 2}
"""Twelve runs of four layers: each group three times, then the next one."""


@pytest.mark.parametrize("head", [AlbertForSequenceClassification, AlbertForTokenClassification, AlbertForMaskedLM])
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("lengths", [(17, 9, 1, 2), (1, 1), (40, 40, 3)], ids=["packed", "one", "longest"])
def test_layers_that_run_several_times(head: type[nn.Module], precision: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    settings = {"embedding_size": 16, "classifier_dropout_prob": 0.0, **SIZES, **ALBERT_GROUPS}
    check_updates(head(AlbertConfig(**settings)), make_batch(lengths), precision, has_shared_layers=True)


DEBERTA_HEADS = {
    "classes": (DebertaV2ForSequenceClassification, {}),
    "tags": (DebertaV2ForTokenClassification, {}),
    "words": (DebertaV2ForMaskedLM, {}),
    "words-new": (DebertaV2ForMaskedLM, {"legacy": False}),
    "no-buckets": (DebertaV2ForSequenceClassification, {"position_buckets": -1, "max_relative_positions": 6}),
    "two-projections": (DebertaV2ForTokenClassification, {"share_att_key": False}),
    "absolute": (DebertaV2ForTokenClassification, {"position_biased_input": True, "norm_rel_ebd": "none"}),
}


@pytest.mark.parametrize(("head", "options"), DEBERTA_HEADS.values(), ids=DEBERTA_HEADS)
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("lengths", [(17, 9, 1, 2), (1, 1), (40, 40, 40)], ids=["packed", "one", "longest"])
def test_disentangled_attention(
    head: type[nn.Module], options: dict[str, Any], precision: str, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **SIZES, **DEBERTA, **options}
    check_updates(head(DebertaV2Config(**settings)), make_batch(lengths), precision)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("form", ["none", "queries", "tuple", "encoder"])
def test_other_calls_of_disentangled_attention(precision: str, form: str) -> None:
    plain, fast = make_pair("deberta-v2")
    accelerate(fast, make_optimizer(fast), precision=precision)
    batch = make_batch(FULL_BATCH)

    def run(model: Any) -> torch.Tensor:
        if form == "none":
            return torch.as_tensor(model(batch["input_ids"]).logits)
        if form == "tuple":
            return torch.as_tensor(model(**batch, return_dict=False)[1])
        embedded = model.deberta.embeddings(batch["input_ids"])
        if form == "encoder":
            return torch.stack(model.deberta.encoder(embedded, batch["attention_mask"]).hidden_states)
        mask = torch.ones(17, 17).tril().expand(4, 17, 17)
        return torch.as_tensor(model.deberta.encoder(embedded, mask, output_hidden_states=False)[0])

    assert relative_error(run(fast), run(plain)) < TOLERANCE[precision]


def gradient_error(model: nn.Module, plain: nn.Module) -> float:
    """The relative error of all gradients of a model together."""
    pairs = [(one.grad, two.grad) for one, two in zip(model.parameters(), plain.parameters(), strict=True)]
    both = [(one.flatten().float(), two.flatten()) for one, two in pairs if one is not None and two is not None]
    return float(relative_error(*(torch.cat(some) for some in zip(*both))))


def check_updates(
    plain: nn.Module, batch: dict[str, torch.Tensor], precision: str, updates: int = 5, has_shared_layers: bool = False
) -> None:
    """Losses and gradients of five updates against transformers' own layers, from the same weights in each."""
    if not type(plain).__name__.endswith("ForSequenceClassification"):
        batch = {**batch, "labels": torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 2, -100)}
    for parameter in plain.parameters():
        parameter.data.mul_(3.0)  # as make_model does
    fast, limit = copy.deepcopy(plain).train(), 1e-5 if precision == "fp32" else TOLERANCE[precision]
    optimizer, theirs = make_optimizer(fast), make_optimizer(plain.train())
    accelerate(fast, optimizer, precision=precision)
    for _ in range(updates):
        wanted, found = plain(**batch).loss, fast(**batch).loss
        assert relative_error(found, wanted) < limit
        wanted.backward()
        found.backward()
        error = gradient_error(fast, plain)
        if has_shared_layers and precision == "bf16" and error >= limit:  # rounding may matter more, to torch as well
            rounded = copy.deepcopy(plain).bfloat16()
            rounded.zero_grad()
            rounded(**batch).loss.backward()
            assert error < 2 * gradient_error(rounded, plain)
        else:
            assert error < limit
        theirs.step()
        theirs.zero_grad()
        optimizer.zero_grad()
        fast.load_state_dict(plain.state_dict())


def test_only_the_last_run_of_a_shared_layer_computes_first_tokens_alone() -> None:
    model = make_model("albert", **ALBERT_GROUPS)
    accelerate(model, make_optimizer(model), precision="fp32")
    rows: list[int] = []
    own = run_layer
    with pytest.MonkeyPatch.context() as patch:

        def note(*arguments: Any) -> torch.Tensor:
            output = own(*arguments)
            rows.append(len(output))
            return output

        patch.setattr("cpuft.train.fast.stack.run_layer", note)
        for _ in range(2):
            model(**make_batch())
    assert rows == 2 * [*[sum(LOOSE_BATCH)] * 11, len(LOOSE_BATCH)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    model = make_model("bert", dropout=0.1)
    accelerate(model, make_optimizer(model))
    batch = make_batch()

    def gradients() -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        model.zero_grad()
        model(**batch).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_deep_copy_is_independent() -> None:
    model = make_model("bert")
    accelerate(model, make_optimizer(model), precision="fp32")
    batch = make_batch()
    before = model(**batch).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    torch.testing.assert_close(model(**batch).logits, before)
    assert relative_error(twin(**batch).logits, before) > 0.01


def test_evaluation_drops_nothing() -> None:
    model = make_model("bert", dropout=0.5)
    accelerate(model, make_optimizer(model))
    model.eval()
    batch = make_batch()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, model(**batch).logits, atol=0, rtol=0)


def test_training_drops() -> None:
    model = make_model("bert", dropout=0.5)
    accelerate(model, make_optimizer(model))
    batch = make_batch()
    assert not torch.equal(model(**batch).logits, model(**batch).logits)


def test_frozen_weights_get_no_gradient() -> None:
    model = make_model("bert")
    for parameter in model.bert.parameters():
        parameter.requires_grad = False
    for parameter in model.bert.encoder.layer[1].parameters():
        parameter.requires_grad = True
    accelerate(model, make_optimizer(model))
    model(**make_batch()).loss.backward()
    assert {name.split(".")[3] for name, p in model.bert.named_parameters(prefix="bert") if p.grad is not None} == {"1"}


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)),
    "activation": lambda: ModernBertModel(ModernBertConfig(pad_token_id=0, hidden_activation="relu", **SIZES)),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_models_run_unchanged(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    fast = copy.deepcopy(plain)
    accelerate(fast, make_optimizer(fast), precision="bf16")
    ids = make_batch()["input_ids"]
    torch.testing.assert_close(fast(ids)[0], plain(ids)[0], atol=0, rtol=0)


def test_int8_rounds_what_training_multiplies_and_nothing_else() -> None:
    plain, fast = make_pair("bert")
    accelerate(fast, make_optimizer(fast), precision="int8")
    batch = make_batch((17,) * 8)
    plain(**batch).loss.backward()
    fast(**batch).loss.backward()
    theirs = dict(plain.named_parameters())
    found, wanted = (
        torch.cat([model[name].grad.flatten() for name, _ in fast.named_parameters() if theirs[name].grad is not None])
        for model in (dict(fast.named_parameters()), theirs)
    )
    assert 1e-3 < relative_error(found, wanted) < TOLERANCE["bf16"]
    assert {p.dtype for p in fast.parameters()} == {torch.float32}
    fast.eval()
    torch.testing.assert_close(fast(**batch).logits, plain.eval()(**batch).logits, atol=1e-5, rtol=1e-4)


def test_int8_is_refused_where_nothing_would_be_in_8_bits() -> None:
    model = OTHERS["gpt2"]()
    with pytest.raises(CpuftError, match="precision int8 needs fast layers, which GPT2Model lacks: choose another one"):
        accelerate(model, make_optimizer(model), precision="int8")


def test_names_and_classes_stay() -> None:
    plain, fast = make_pair("roberta")
    optimizer = make_optimizer(fast)
    assert accelerate(fast, optimizer)[0] is fast
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert isinstance(fast.roberta.encoder.layer[0], type(plain.roberta.encoder.layer[0]))
    assert isinstance(optimizer, torch.optim.AdamW)


def test_once_more_changes_nothing() -> None:
    once, twice = make_model("bert"), make_model("bert")
    one, two = make_optimizer(once), make_optimizer(twice)
    accelerate(once, one)
    accelerate(*accelerate(twice, two))
    for model, optimizer in ((once, one), (twice, two)):
        model(**make_batch()).loss.backward()
        optimizer.step()
    for key, value in once.state_dict().items():
        torch.testing.assert_close(twice.state_dict()[key], value, atol=0, rtol=0)


def test_an_unknown_precision_is_refused() -> None:
    model = make_model("bert")
    with pytest.raises(CpuftError, match="choose one of auto, bf16, fp32, int8"):
        accelerate(model, make_optimizer(model), precision="int4")


def test_a_model_without_fp32_weights_is_refused() -> None:
    model = make_model("bert").to(torch.bfloat16)
    with pytest.raises(CpuftError, match="load the model with dtype="):
        accelerate(model, make_optimizer(model))


def gradient_moments(model: nn.Module, batch: dict[str, torch.Tensor], draws: int) -> tuple[torch.Tensor, float]:
    """Mean of all gradients over dropout's masks, flat, and the root of the trace of their covariance."""
    total, squares = torch.zeros(()), 0.0
    for _ in range(draws):
        model.zero_grad()
        model(**batch).loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
        total, squares = total + gradient, squares + float(gradient.square().sum())
    mean = total / draws
    return mean, (squares / draws - float(mean.square().sum())) ** 0.5


@pytest.mark.parametrize(
    "kind", ["bert", *(pytest.param(kind, marks=pytest.mark.proof) for kind in ("distilbert", "albert", "deberta-v2"))]
)
def test_dropout_s_noise_in_the_gradients_is_the_plain_model_s(kind: str) -> None:
    """Masks that hang together, between elements, layers or steps, would make it larger; a wrong scale, biased."""
    draws, batch = 150, make_batch()
    plain, fast = make_model(kind, dropout=0.2), make_model(kind, dropout=0.2)
    accelerate(fast, make_optimizer(fast), precision="fp32")
    (mean, noise), (fast_mean, fast_noise) = (gradient_moments(model, batch, draws) for model in (plain, fast))
    assert fast_noise == pytest.approx(noise, rel=0.1)
    # What two means of so many draws differ by on average is noise * sqrt(2 / draws).
    assert float((fast_mean - mean).norm()) < 1.5 * noise * (2 / draws) ** 0.5
