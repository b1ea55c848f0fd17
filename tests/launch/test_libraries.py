"""Scripts for the usual libraries, none of which says anything of CPUs: two ranks train one model, or the run ends.

Lightning's script is the example of its README, taken from the installed package and not changed; that of Sentence
Transformers is the example of a loss, with its two examples repeated so that two ranks have a batch each. Accelerate's
is its own test program, not changed either.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from cpuft.train.model import find_model
from tests.conftest import run_cpuft

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
NOT_CONNECTED = "because its 2 ranks are not connected"


def launch(
    script: str, *words: str, options: tuple[str, ...] = (), **settings: str
) -> subprocess.CompletedProcess[str]:
    quiet = {"PL_TRAINER_LOGGER": "False", "PL_TRAINER_ENABLE_PROGRESS_BAR": "False"}
    options = ("--np", "2", "--max-restarts", "0", "--run-dir", "run", *options)
    return run_cpuft("launch", *options, "--", script, *words, seconds=200, settings=quiet | settings)


BARE = """
import os, sys, torch
# The rank that is stopped first ends the others, and what they have printed by then may be lost.
said = open(f"said-{os.environ['RANK']}", "w", buffering=1)
if "state" in sys.argv:
    from accelerate import PartialState
    print("world", PartialState().num_processes, file=said)
if "nccl" in sys.argv:
    torch.distributed.init_process_group("nccl")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    print("step", step, file=said)
"""


@pytest.mark.parametrize(
    ("words", "options", "code", "steps", "said"),
    [
        (("2",), (), 2, 0, f"the script was stopped before its first optimizer step {NOT_CONNECTED}"),
        # The group is there, as after PartialState of a script that does not prepare its model.
        (("120", "state"), (), 2, 99, f"the script was stopped before optimizer step 100 {NOT_CONNECTED}"),
        pytest.param(
            *(("2", "state"), (), 2, 2, f"the script ended with an error {NOT_CONNECTED}"), marks=pytest.mark.proof
        ),
        (("2", "nccl"), (), 2, 0, 'the backend "nccl", which needs GPUs: use "gloo"'),
        (("2",), ("--independent",), 0, 2, ""),
    ],
    ids=["no group", "unused group", "unused group, few steps", "nccl", "independent"],
)
def test_ranks_that_are_not_connected_end_the_run(
    words: tuple[str, ...], options: tuple[str, ...], code: int, steps: int, said: str
) -> None:
    Path("bare.py").write_text(BARE)
    done = launch("bare.py", *words, options=options)
    assert done.returncode == code, done.stderr
    texts = [path.read_text() for path in Path().glob("said-*")]
    assert max((text.count("step") for text in texts), default=0) == steps
    assert said in done.stderr
    assert any("world 2\n" in text for text in texts) == ("state" in words)


TRAINER = """
import sys, torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
torch.manual_seed(0)
size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=100, **size))
rows = [{"input_ids": torch.randint(100, (8,)), "labels": row % 2} for row in range(64)]
trainer = Trainer(model, TrainingArguments("out", max_steps=3, bf16=True, report_to=[]), train_dataset=rows)
trainer.train()
print(trainer.args.world_size, f"{model.classifier.weight.sum().item():.9f}")
"""


@pytest.mark.parametrize("options", [(), pytest.param(("--wrap",), marks=pytest.mark.proof)], ids=["plain", "wrap"])
def test_a_trainer_trains_one_model(options: tuple[str, ...]) -> None:
    Path("trainer.py").write_text(TRAINER)
    done = launch("trainer.py", options=options)
    assert done.returncode == 0, done.stderr
    told = [Path(f"run/logs/rank-{rank}.out").read_text().splitlines()[-1] for rank in (0, 1)]
    assert told[0].startswith("2 ")
    assert told[0] == told[1]


LIGHTNING = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = Trainer()
model = BoringModel()
trainer.fit(model)
print(trainer.world_size, f"{model.layer.weight.sum().item():.9f}")
"""


@pytest.mark.proof
def test_lightnings_plain_trainer_trains_one_model() -> None:
    Path("boring.py").write_text(LIGHTNING)
    done = launch("boring.py", PL_TRAINER_MAX_STEPS="4", PL_TRAINER_LIMIT_VAL_BATCHES="1")
    assert done.returncode == 0, done.stderr
    told = [Path(f"run/logs/rank-{rank}.out").read_text().splitlines()[-1] for rank in (0, 1)]
    assert told[0].startswith("2 ")
    assert told[0] == told[1]


# The example loads pictures with torchvision. Lightning must not find the stand-in when it looks for the real one.
TORCHVISION = """
import sys, types, torch
folder, own = sys.path.pop(0), sys.modules.pop(__name__)
import lightning
sys.path.insert(0, folder)
sys.modules[__name__] = own
rows = torch.utils.data.TensorDataset(torch.rand(1000, 1, 28, 28).repeat(60, 1, 1, 1), torch.zeros(60000))
datasets = types.SimpleNamespace(MNIST=lambda *folder, **options: rows)
transforms = types.SimpleNamespace(ToTensor=lambda: None)
"""


@pytest.mark.proof
def test_the_example_of_lightnings_readme() -> None:
    text = str(importlib.metadata.metadata("lightning").json["description"])
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    Path("main.py").write_text(next(block for block in blocks if "trainer.fit" in block))
    Path("torchvision.py").write_text(TORCHVISION)
    done = launch("main.py", PL_TRAINER_MAX_STEPS="4", PL_TRAINER_LIMIT_VAL_BATCHES="1")
    assert done.returncode == 0, done.stderr
    assert "Starting with 2 processes" in done.stderr


@pytest.mark.proof
def test_the_example_of_a_loss_of_sentence_transformers() -> None:
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    text = str(CosineSimilarityLoss.__init__.__doc__).partition("Example:\n            ::\n")[2]
    assert "trainer.train()" in text
    enough = "trainer = SentenceTransformerTrainer(", "train_dataset = train_dataset.select([0, 1] * 16)\n"
    Path("example.py").write_text(textwrap.dedent(text).replace(enough[0], enough[1] + enough[0]))
    Path("microsoft").mkdir()
    Path("microsoft/mpnet-base").symlink_to(find_model("minilm"))
    # Three epochs of 32 examples are 12 steps of one rank with its 8 examples a batch, and 6 of two ranks.
    done = launch("example.py")
    assert done.returncode == 0, done.stderr
    assert "6/6" in done.stderr


@pytest.mark.proof
def test_accelerates_own_program() -> None:
    spec = importlib.util.find_spec("accelerate.test_utils.scripts.test_script")
    assert spec is not None
    done = launch(str(spec.origin))
    assert done.returncode == 0, done.stderr
