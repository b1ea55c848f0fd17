"""A script for the Hugging Face Trainer, run as it is and with --wrap's module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import run_cpuft

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
Trainer(BertForSequenceClassification(config).to(torch.bfloat16), arguments, train_dataset=rows).train()
"""


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


TWO_RANKS = """
import json, os, sys, torch, torch.distributed as dist
from cpuft.train.ranks import checksum_parameters
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
dist.init_process_group("gloo")
torch.manual_seed(0)
resumed, run = bool(os.environ.get("CPUFT_RESUMED")), os.environ["CPUFT_RUN_DIR"]
config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
rows = [{"input_ids": torch.arange(i, i + 9) % 64, "labels": torch.tensor(i % 2)} for i in range(32)]

class Breaks(TrainerCallback):
    def on_step_end(self, arguments, state, control, **more):
        if state.global_step == 4 and sys.argv[1:] == ["breaks"] and not resumed:
            os._exit(75)

arguments = TrainingArguments(
    run + "/trainer", use_cpu=True, max_steps=6, report_to=[], save_steps=3, logging_steps=1, learning_rate=1e-2,
    per_device_train_batch_size=4, disable_tqdm=True,
)
model = BertForSequenceClassification(config)
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Breaks()])
trainer.train(resume_from_checkpoint=resumed)
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
found = {"ranks": dist.get_world_size(), "losses": losses, "weights": checksum_parameters(model)}
if dist.get_rank() == 0:
    with open(run + "/found.json", "w") as file:
        json.dump(found | {"resumed": resumed}, file)
"""


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-m", "cpuft.train.wrap", str(folder / "script.py"), str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_trainer_s_model_and_optimizer_are_fast_and_bf16_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, TRAINS)
    assert done.stdout.splitlines()[-1:] == ["__main__ beside FastBertLayer FusedAdamW"], done.stderr
    fast, *_, refused = (line for line in done.stderr.splitlines() if line.startswith("cpuft:"))
    assert fast == "cpuft: --wrap: fast path of BertForSequenceClassification: 1 of 1 layer replaced"
    assert "load the model with dtype=" in refused
    assert done.returncode == 2


@pytest.mark.proof
def test_the_trainer_resumes_from_its_own_checkpoint_to_the_bit(tmp_path: Path) -> None:
    done = run(tmp_path, RESUMES)
    assert done.stdout.splitlines()[-1:] == ["6 True True"], done.stderr


@pytest.mark.proof
@pytest.mark.parametrize(
    ("text", "code", "said"),
    [("print('no trainer')", 0, "--wrap changed nothing"), ("raise SystemExit(7)", 7, "")],
    ids=["no trainer", "exit code"],
)
def test_what_is_said(tmp_path: Path, text: str, code: int, said: str) -> None:
    done = run(tmp_path, text)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


@pytest.mark.proof
def test_two_ranks_of_a_launch_resume_from_the_trainers_own_checkpoint_to_the_bit(tmp_path: Path) -> None:
    """They break off after four updates, and go on from the third."""
    (tmp_path / "script.py").write_text(TWO_RANKS)
    launch = ("launch", "--wrap", "--np", "2")
    broken = run_cpuft(*launch, "--run-dir", "run", "--", "script.py", "breaks", seconds=200)
    assert broken.returncode == 75, broken.stderr
    for words in (("--resume", "run", "--", "script.py", "breaks"), ("--run-dir", "whole", "--", "script.py")):
        done = run_cpuft(*launch, *words, seconds=200)
        assert done.returncode == 0, done.stderr
    found, whole = (json.loads((tmp_path / name / "found.json").read_text()) for name in ("run", "whole"))
    assert found == whole | {"resumed": True}
    assert (found["ranks"], len(set(found["losses"]))) == (2, 6)
