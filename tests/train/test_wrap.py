"""A script for the Hugging Face Trainer, run as it is and with --wrap's module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAINS = """
import sys, torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
import beside
config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
rows = [{"input_ids": torch.arange(9) % 64, "labels": torch.tensor(i % 2)} for i in range(8)]
arguments = TrainingArguments(sys.argv[1], use_cpu=True, max_steps=2, report_to=[], save_strategy="no")
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
trainer.train()
trainer.train()
made = trainer.model.bert.encoder.layer[0], trainer.optimizer.optimizer
print(__name__, beside.NAME, *(type(thing).__name__ for thing in made))
"""
REFUSED = TRAINS.replace("(config)", "(config).to(torch.bfloat16)")


RESUMES = """
import sys, torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
rows = [{"input_ids": torch.arange(i, i + 9) % 64, "labels": torch.tensor(i % 2)} for i in range(32)]

def train(folder, last=None):
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=6, report_to=[], save_steps=3, logging_steps=1, learning_rate=1e-2,
        per_device_train_batch_size=4, disable_tqdm=True,
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=last)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, trainer.model.state_dict()

losses, weights = train(sys.argv[1])
again, others = train(sys.argv[1] + "-again", sys.argv[1] + "/checkpoint-3")
print(len(set(losses)), losses == again, all(torch.equal(weights[name], others[name]) for name in weights))
"""


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-m", "cpuft.train.wrap", str(folder / "script.py"), str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_trainer_s_model_and_optimizer_are_fast(tmp_path: Path) -> None:
    done = run(tmp_path, TRAINS)
    assert done.stdout.splitlines()[-1:] == ["__main__ beside FastBertLayer FusedAdamW"], done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("cpuft:")]
    assert said == ["cpuft: --wrap: BertForSequenceClassification trains on the fast path"]


def test_the_trainer_resumes_from_its_own_checkpoint_to_the_bit(tmp_path: Path) -> None:
    done = run(tmp_path, RESUMES)
    assert done.stdout.splitlines()[-1:] == ["6 True True"], done.stderr


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("print('no trainer')", 0, "--wrap changed nothing"),
        (REFUSED, 2, "load the model with dtype="),
        ("raise SystemExit(7)", 7, ""),
    ],
    ids=["no trainer", "refused", "exit code"],
)
def test_what_is_said(tmp_path: Path, text: str, code: int, said: str) -> None:
    done = run(tmp_path, text)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
