"""Tiny untrained decoders with a byte-level tokenizer and chat templates, and conversations for them."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cpuft.config.train import TrainConfig
from cpuft.train.checkpoint.resume import resume
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.checkpoint.writer_thread import CheckpointWriter
from cpuft.train.loop import train
from cpuft.train.ranks import checksum_parameters
from cpuft.train.setup import TrainingSetup
from tests.train.checkpoint.training import HEADER
from tests.train.decoder_ranks import ALONE, make_setup

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "smollm3": {**_SIZES, "tie_word_embeddings": True},
    "gemma3_text": {
        **_SIZES,
        "head_dim": 8,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
    },
}
"""Settings by model type. Qwen3 and SmolLM3 share the weight of embedding and head, Gemma 3 does anyway."""

ENCODERS: dict[str, dict[str, Any]] = {
    "modernbert": {
        **{name: value for name, value in _SIZES.items() if name != "num_key_value_heads"},
        "num_hidden_layers": 4,
        "local_attention": 8,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "eurobert": {**_SIZES, "mask_token_id": 1},
}
"""Settings of encoders whose layers are like those of decoders, by model type."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template as Qwen2's and SmolLM2's."""
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that marks what the assistant says, as SmolLM3's."""
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that drops the thinking of earlier turns, as Qwen3's."""

QUESTIONS = ("What colour is the sky?", "What colour is grass?", "How many legs has a cat?", "Who barks?")
ANSWERS = ("It is blue.", "It is green.", "It has four.", "Dogs bark.")


def save_tokenizer(folder: Path, template: str = CHATML, **special: Any) -> None:
    """A byte-level BPE tokenizer; the token with id 3 pads, and id 0 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator([*QUESTIONS, *ANSWERS, "user assistant system"], trainer)
    names = {"eos_token": SPECIAL[0], "pad_token": SPECIAL[3], **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, **{k: v for k, v in names.items() if v})
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def make_decoder(family: str, seed: int = 0, **settings: Any) -> Any:
    """An untrained decoder with its head, of about the scale that trained ones have."""
    import transformers

    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(family, **{"vocab_size": 324, **FAMILIES[family]} | settings)
    model = transformers.AutoModelForCausalLM.from_config(made)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3 if "embed" in name or "lm_head" in name else 0.15)
    return model


def save_decoder(folder: Path, family: str = "llama", template: str = CHATML, **settings: Any) -> str:
    """A tiny decoder with its tokenizer; the folder."""
    make_decoder(family, **settings).save_pretrained(folder)
    save_tokenizer(folder, template)
    return str(folder)


def save_encoder(folder: Path, family: str) -> str:
    """A tiny encoder with the same tokenizer; the folder."""
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(family, **{"vocab_size": 324, **ENCODERS[family]})
    model = transformers.AutoModel.from_config(made)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.15)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def make_conversation(generator: random.Random, turns: int, system: bool = False) -> list[dict[str, str]]:
    """Questions with the right answers."""
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    for _ in range(turns):
        which = generator.randrange(len(QUESTIONS))
        messages += [
            {"role": "user", "content": QUESTIONS[which]},
            {"role": "assistant", "content": ANSWERS[which]},
        ]
    return messages


def write_conversations(path: Path, count: int, seed: int = 0) -> str:
    """JSON lines of conversations of one to three turns; the path."""
    generator = random.Random(seed)
    rows = [
        {"messages": make_conversation(generator, generator.randint(1, 3), number % 3 == 0)} for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_text(path: Path, lines: int, seed: int = 0) -> str:
    """A text of questions and answers; the path."""
    generator = random.Random(seed)
    pairs = [generator.randrange(len(QUESTIONS)) for _ in range(lines)]
    path.write_text("".join(f"{QUESTIONS[one]}\n  {ANSWERS[one]}\n\n" for one in pairs), encoding="utf-8")
    return str(path)


def check_resumed_run(config: TrainConfig, folder: Path) -> None:
    """Assert that a run which goes on from its checkpoint after update 3 is the undisturbed run, to the bit.

    `folder`: gets the checkpoint.
    """

    def make() -> tuple[TrainingSetup, TrainingState]:
        setup = make_setup(config)
        return setup, TrainingState(setup.model, setup.optimizer)

    setup, state = make()
    header = replace(HEADER, options=asdict(config), data=setup.prepared.checksum)
    writer, losses = CheckpointWriter(state, folder, 0, every=0.0), []
    for line in train(setup):
        losses.append(line.loss)
        if line.step == 3:
            writer.add_line(header)
            writer.write(3, wait=True)
    again, state = make()
    assert resume(state, folder, ALONE, asdict(config), header.data).update == 3
    assert [line.loss for line in train(again, done=3)] == losses[3:]
    assert checksum_parameters(again.model) == checksum_parameters(setup.model)
