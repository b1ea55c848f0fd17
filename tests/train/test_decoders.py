"""Decoders, from texts and conversations to a trained model: on two ranks as on one, and bad input."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from cpuft.config.conflicts import refuse_conflicts
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.describe import describe_data
from cpuft.train.data.prepare import prepare
from cpuft.train.data.show import format_summary, summarize
from cpuft.train.evaluate import evaluate
from cpuft.train.fast import stack
from cpuft.train.fast.layers import run_layer
from tests.comm.ranks import fork_ranks
from tests.train.decoder_ranks import learn, make_setup
from tests.train.decoders import (
    CHATML,
    ENCODERS,
    FAMILIES,
    MARKED,
    SPECIAL,
    check_resumed_run,
    save_decoder,
    save_encoder,
    save_tokenizer,
    write_conversations,
    write_text,
)
from tests.train.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("own_cache")
USUAL: dict[str, Any] = {"max_length": 32, "batch_size": 4, "max_steps": 4, "learning_rate": 1e-2}


def make_text_config(folder: Path, family: str = "llama", **options: Any) -> TrainConfig:
    model = save_decoder(folder / family, family)
    text = write_text(folder / "a.txt", 200)
    return replace(TrainConfig(task="text", causal=True, model=model, train_file=text, **USUAL), **options)


def test_blocks_hold_the_text_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "b.txt"
    other.write_text("if x:\n\n    y\n")
    config = make_text_config(tmp_path, validation_file=str(other))
    config = replace(config, train_file=f"{config.train_file},{other}")
    prepared = read_prepared(str(prepare(config)))
    assert (prepared.kind, prepared.metrics) == ("causal", ("perplexity", "token_accuracy"))
    assert set(prepared.train.lengths[:-1]) == {32}
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    whole = Path(tmp_path / "a.txt").read_text() + SPECIAL[0] + other.read_text() + SPECIAL[0]
    assert tokenizer.decode(prepared.train.ids) == whole
    assert tokenizer.decode(prepared.validation[""].ids) == other.read_text() + SPECIAL[0]
    # A line end and the indentation that follows it are tokenised together, as where the model is used.
    text = tokenizer(other.read_text())["input_ids"]
    assert prepared.validation[""].ids.tolist() == [*text, 0]
    assert prepare(config) != prepare(replace(config, max_length=16))
    assert "each example is a piece of text of up to 32 tokens" in describe_data(prepared, config)
    assert "each next token of texts" in "\n".join(format_summary(summarize(config)))


def test_what_the_tokenizer_puts_before_a_text_begins_each_document(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    config = make_text_config(tmp_path, train_file="a.txt,b.txt", validation_file="a.txt")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    tokenizer.save_pretrained(config.model)
    ids = read_prepared(str(prepare(config))).train.ids.tolist()
    a, b = tokenizer("a")["input_ids"][1], tokenizer("b")["input_ids"][1]
    assert ids == [1, a, 0, 1, b, 0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"task": "mrpc"}, "--causal has no effect with --task mrpc: leave it out, or give --task text"),
        ({"whole_word_mask": True}, "--causal excludes --whole-word-mask, because no token is masked: leave out one"),
        ({"precision": "int8"}, "--causal excludes --precision int8, which is for encoders: leave it out"),
        (
            {"engine": "deepspeed"},
            "--causal excludes --engine, because decoders are trained with --engine torch only: leave out one of them",
        ),
        ({"causal": False, "pack": True}, "--pack has no effect with --task text: leave it out, or give --task chat"),
        ({"causal": False, "chat_template": "a"}, "--chat-template has no effect with --task text: leave"),
        ({"from_config": "x.json"}, "--causal with --from-config needs --tokenizer: name"),
    ],
)
def test_options_that_decoders_do_not_have_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CpuftError) as error:
        refuse_conflicts(replace(TrainConfig(task="text", causal=True), **change))
    assert str(error.value).startswith(message)


def test_a_tokenizer_that_cannot_end_a_text_is_refused(tmp_path: Path) -> None:
    config = make_text_config(tmp_path)
    save_tokenizer(Path(config.model), eos_token="")
    with pytest.raises(CpuftError, match="has no eos_token: set it in its tokenizer_config"):
        prepare(config)


def test_masked_language_modelling_of_a_decoder_is_told_what_it_can_do(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match="or add --causal to train a decoder"):
        prepare(replace(make_text_config(tmp_path), causal=False))


def test_a_vocabulary_that_is_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    config = make_text_config(tmp_path)
    save_decoder(Path(config.model), vocab_size=300)
    with pytest.raises(CpuftError, match=r"the tokenizer has \d+ tokens, and .* embeds only 300"):
        prepare(config)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = make_text_config(tmp_path)
    path = Path(config.model, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CpuftError, match="was quantised with gptq: give the model that it was made from"):
        prepare(config)


@pytest.mark.usefixtures("alone", "plain")
def test_a_decoder_learns_a_text(tmp_path: Path) -> None:
    found = learn(make_text_config(tmp_path, max_steps=60))
    assert found["losses"][0] > np.log(300) - 1
    assert found["metrics"]["token_accuracy"] > 0.6
    assert found["metrics"]["perplexity"] < 4


@pytest.mark.usefixtures("alone", "plain")
def test_an_encoder_that_is_a_decoder_too_is_trained_or_refused_with_a_message(tmp_path: Path) -> None:
    config = make_text_config(tmp_path)
    config = replace(config, model=save_tiny(tmp_path / "bert"), max_steps=1)
    with pytest.raises(CpuftError, match="makes predictions in a way that cpuft cannot train"):
        learn(config)


def make_chat_config(folder: Path, family: str = "llama", template: str = CHATML, **options: Any) -> TrainConfig:
    model = save_decoder(folder / family, family, template)
    chats = write_conversations(folder / "chats.jsonl", 60)
    return replace(TrainConfig(task="chat", model=model, train_file=chats, **USUAL), **{"max_length": 128} | options)


def test_conversations_are_prepared_for_the_options_that_matter(tmp_path: Path) -> None:
    config = make_chat_config(tmp_path)
    path = prepare(config)
    prepared = read_prepared(str(path))
    assert (prepared.kind, prepared.metrics) == ("chat", ("perplexity", "token_accuracy"))
    assert (len(prepared.train) + len(prepared.validation[""]), len(prepared.train.types)) == (60, 0)
    told = describe_data(prepared, config)
    assert f"training on {len(prepared.train)} examples" in told
    assert f"; {len(prepared.train)} conversations; the assistant says " in told
    packed = read_prepared(str(prepare(replace(config, pack=True))))
    assert len(packed.train) < len(prepared.train) / 2
    assert len(packed.train.ids) == len(prepared.train.ids)
    template = tmp_path / "chat.jinja"
    template.write_text(MARKED)
    others: list[dict[str, Any]] = [
        {"chat_template": str(template)},
        {"max_length": 64},
        {"max_train_samples": 9},
        {"validation_split": 0.3},
    ]
    paths = [prepare(replace(config, **change)) for change in others]
    assert len({path, *paths}) == 5
    assert len(read_prepared(str(paths[2])).train) == 9
    assert prepare(replace(config, seed=1)) == path
    assert "the assistant's tokens in conversations" in "\n".join(format_summary(summarize(config)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train_file": ""}, "--task chat needs --train-file: name JSON lines files of conversations"),
        ({"train_file": "nothing"}, "there is no file nothing: check --train-file"),
        ({"validation_file": "nothing"}, "there is no file nothing: check --validation-file"),
        ({"chat_template": "nothing"}, "there is no file nothing: check --chat-template"),
        ({"max_length": 512}, "llama has 256 positions: give --max-length 256 or less"),
        ({"max_length": 8}, "no first answer of a conversation fits into --max-length 8: give a larger"),
    ],
)
def test_conversations_that_cannot_be_trained_on_are_refused(change: dict[str, Any], message: str) -> None:
    config = replace(make_chat_config(Path()), **change)
    with pytest.raises(CpuftError) as error:
        prepare(config)
    assert str(error.value).startswith(message)


def test_a_tokenizer_without_a_template_needs_one(tmp_path: Path) -> None:
    config = make_chat_config(tmp_path, template="")
    with pytest.raises(CpuftError, match="has no chat template: give one with --chat-template"):
        prepare(config)
    Path("chat.jinja").write_text(CHATML)
    assert len(read_prepared(str(prepare(replace(config, chat_template="chat.jinja")))).train) == 54


@pytest.mark.usefixtures("alone", "plain")
def test_a_decoder_learns_to_answer(tmp_path: Path) -> None:
    found = learn(make_chat_config(tmp_path, max_steps=40, pack=True, batch_size=4))
    assert found["metrics"]["token_accuracy"] > 0.9
    assert found["losses"][-1] < 0.2


@pytest.mark.usefixtures("alone", "plain")
def test_adapters_learn_to_answer(tmp_path: Path) -> None:
    config = make_chat_config(tmp_path, max_steps=60, pack=True, lora_rank=8, learning_rate=3e-2)
    found = learn(config)
    assert found["losses"][-1] < found["losses"][0] / 3


def make_class_config(folder: Path, family: str = "llama", **options: Any) -> TrainConfig:
    """Texts of different lengths, whose class is told by their first word."""
    if family in ENCODERS:
        model = save_encoder(folder / family, family)
    else:
        model = save_decoder(folder / family, family, pad_token_id=None)
        save_tokenizer(Path(model), pad_token="")
    generator = random.Random(0)
    for name, count in (("train.jsonl", 60), ("validation.jsonl", 21)):
        firsts = [generator.choice(("What", "Who")) for _ in range(count)]
        texts = [f"{first}{' is' * generator.randint(1, 9)}?" for first in firsts]
        rows = [{"text": text, "label": first} for text, first in zip(texts, firsts, strict=True)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train_file": str(folder / "train.jsonl"), "validation_file": str(folder / "validation.jsonl")}
    return replace(TrainConfig(model=model, **USUAL), **{"task": "files"} | files | options)


@pytest.mark.usefixtures("alone", "plain")
@pytest.mark.parametrize("family", FAMILIES)
def test_classes_are_told_by_the_last_real_token_without_a_padding_token(family: str, tmp_path: Path) -> None:
    setup = make_setup(make_class_config(tmp_path, family))
    tokens, objective = setup.prepared.train, setup.objective
    model: Any = setup.model
    assert (objective.pad_id, model.config.pad_token_id) == (0, 0)  # of the token that ends a text
    assert model.get_input_embeddings().padding_idx is None
    model.eval()
    examples = np.asarray([int(tokens.lengths.argmin()), int(tokens.lengths.argmax())])
    with torch.inference_mode():
        together = objective.outputs(model, objective.make_batch(tokens, examples))
        for number, outputs in zip(examples, together, strict=True):
            ids = torch.from_numpy(tokens.ids[tokens.offsets[number] : tokens.offsets[number + 1]].astype(np.int64))
            wanted = model.score(model.model(input_ids=ids[None]).last_hidden_state[0, -1]).numpy()
            assert outputs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.usefixtures("alone", "plain")
def test_a_decoder_learns_classes(tmp_path: Path) -> None:
    found = learn(make_class_config(tmp_path, max_steps=30, batch_size=8, learning_rate=5e-3))
    assert found["metrics"]["accuracy"] > 0.9


@pytest.mark.usefixtures("alone", "plain")
@pytest.mark.parametrize("family", FAMILIES)
def test_classes_are_evaluated_by_the_fast_layers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup(make_class_config(tmp_path, family, eval_batch_size=7))
    own: Any = setup.model
    assert own.config.use_cache  # it stays, for those who generate with the saved layers
    calls = []

    def count_and_run(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return run_layer(*arguments)

    monkeypatch.setattr(stack, "run_layer", count_and_run)
    found = evaluate(setup, 0).metrics
    assert len(calls) == 2 * 3  # layers and batches
    objective, tokens = setup.objective, setup.prepared.validation[""]
    batch = objective.make_batch(tokens, np.arange(21))
    plain = objective.load_model(replace(setup.config, fast_path=False)).eval()
    plain.load_state_dict(own.state_dict())
    wanted = plain(**batch.inputs).logits.detach().numpy()
    with torch.inference_mode():
        np.testing.assert_allclose(objective.outputs(own.eval(), batch), wanted, rtol=1e-4, atol=1e-5)
    assert found == objective.compute_metrics(wanted, tokens)


@pytest.mark.usefixtures("alone", "plain")
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_losses_to_the_bit(family: str, tmp_path: Path) -> None:
    config = make_chat_config(tmp_path, family, pack=True, lora_rank=4 if family == "qwen3" else 0)
    assert learn(replace(config, gradient_checkpointing=True)) == learn(config)


@pytest.mark.usefixtures("alone", "plain")
@pytest.mark.parametrize("task", ["causal", "chat", "adapters"])
def test_a_resumed_run_goes_on_to_the_bit(task: str, tmp_path: Path) -> None:
    config = make_text_config(tmp_path) if task == "causal" else make_chat_config(tmp_path, "gemma3_text", pack=True)
    config = replace(config, max_steps=6, lora_rank=4 if task == "adapters" else 0)
    check_resumed_run(config, tmp_path / "kept")


def train_on_two_ranks(folder: Path, configs: dict[str, TrainConfig]) -> dict[str, Any]:
    """What became of each training."""
    (folder / "wanted.json").write_text(json.dumps({name: asdict(one) for name, one in configs.items()}))
    done = fork_ranks(2, "tests.train.decoder_ranks", str(folder), seconds=280)
    assert done.returncode == 0, done.stdout[-3000:]
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.mark.usefixtures("alone", "plain")
def test_two_ranks_learn_what_one_learns_with_twice_the_batch(tmp_path: Path) -> None:
    (tmp_path / "classes").mkdir()
    configs = {family: make_text_config(tmp_path, family) for family in FAMILIES}
    configs["shards"] = replace(configs["qwen3"], shard="optimizer")
    configs |= {
        f"chat {family} {pack}": make_chat_config(tmp_path, family, pack=pack)
        for family, pack in (("llama", False), ("qwen3", True), ("gemma3_text", True))
    }
    configs["adapters"] = replace(configs["chat llama False"], lora_rank=4)
    every = (*FAMILIES, *ENCODERS)
    configs |= {f"classes {family}": make_class_config(tmp_path / "classes", family) for family in every}
    found = train_on_two_ranks(tmp_path, configs)
    for name, config in configs.items():
        alone = learn(replace(config, batch_size=8, shard="none"))
        assert found[name]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert found[name]["metrics"] == pytest.approx(alone["metrics"], rel=1e-3)
        assert found[name]["weights"] == pytest.approx(alone["weights"], rel=1e-4)
