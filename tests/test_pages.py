"""What a page shows below a command is what the command prints, on any CPU and with any numbers."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cpuft.files import cache_path
from cpuft.record import format_baseline, read_record
from cpuft.train.model import find_model
from tests.conftest import ASLEEP
from tests.provision.aws.bottle.bottle import Bottle, open_bottle, write_machine_wheels
from tests.provision.aws.bottle.machines import GATEWAY
from tests.provision.aws.region import REGION
from tests.provision.simulated import needs_root
from tests.test_readme import TEXTS

ENCODER = " --model ./encoder"
ADDED = {
    "--task pairs": f" --max-steps 4{ENCODER}",
    "--task demo": f" --max-steps 6{ENCODER}",
    "cpuft launch --np 2 --task files": " --backend gloo",
    "cpuft launch --np 2 --task pairs": " --backend gloo",
    "cpuft launch --task": ENCODER,
    "cpuft compare": f" --backend gloo{ENCODER}",
    "cpuft sweep --task": f" --search random --trials 2 --max-steps 4{ENCODER}",
    "provision aws": f" --nodes 2 --ssh-from {GATEWAY} --wheels wheels",
}
"""What is added to a command with these words, so that it ends sooner or without what a page takes from the internet;
the lines stay the same. On cores that other programs use as well, ranks over gloo, which sleep, are faster than those
over MPI, which spin."""


def find_shown(text: str) -> list[tuple[str, str]]:
    """Return each command of a page's console blocks with the lines below it.

    Commands of several hosts are left out: tests/launch/test_detached.py and scripts/check-clusters run such commands.
    """
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.M)
    found = [one for block in blocks for one in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)]
    return [(command, lines) for command, lines in found if "--cluster" not in command]


SHOWN = {path: found for path, text in TEXTS.items() if (found := find_shown(text))}


def write_reviews(folder: Path) -> None:
    """Write what pages call reviews.csv and new.csv: short texts that are good or bad."""
    words = (
        ("awful", "boring", "terrible", "dreadful", "poor"),
        ("great", "wonderful", "excellent", "fine", "brilliant"),
    )
    forms = ("The {} was {}.", "What a {}: {}!", "I found the {} {}.", "{} of the week, and {}.")
    things = ("film", "book", "meal", "hotel", "concert", "play", "trip", "room")
    with (folder / "reviews.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "label"))
        for thing, number, label, form in itertools.product(things, range(5), (0, 1), forms):
            rows.writerow((form.format(thing, words[label][number]), ("bad", "good")[label]))
    (folder / "new.csv").write_text("text\nThe museum was wonderful.\nA boring evening.\n", encoding="utf-8")


def write_encoder(folder: Path) -> None:
    """Write MiniLM without its last four layers, for runs whose predictions no page shows."""
    shutil.copytree(find_model("minilm"), folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not re.match(r"encoder\.layer\.[2-5]\.", name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


class World:
    """A folder in which the commands of the pages run, each once, in the order of their first page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: dict[tuple[str, int], str] = {}
        (folder / "cache/cpuft").mkdir(parents=True, mode=0o700)
        for kernels in cache_path(os.environ).glob("kernels-*.so"):
            (folder / "cache/cpuft" / kernels.name).symlink_to(kernels)
        write_reviews(folder)
        for text in TEXTS.values():
            for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.M):
                if name := re.match(r"# (\w+\.py)\b", block):
                    (folder / name[1]).write_text(block, encoding="utf-8")

    def run(self, command: str, time: int = 1) -> str:
        """Return what a command prints when a page shows it for this time; other pages share the same run of it."""
        if (command, time) not in self.said:
            more = "".join(words for part, words in ADDED.items() if part in command)
            folders = {"XDG_CACHE_HOME": f"{self.folder}/cache", "CPUFT_STATE": f"{self.folder}/state"}
            path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            self.said[command, time] = self.execute(f"exec 2>&1; {command}{more}", folders | path | ASLEEP)
        return self.said[command, time]

    def execute(self, line: str, settings: dict[str, str]) -> str:
        """Return what a shell line prints."""
        environ = {
            name: text for name, text in os.environ.items() if name != "TEST_OF"
        } | settings  # hosts outlive a test
        words, pipe = ["bash", "-c", line], subprocess.PIPE
        done = subprocess.run(words, cwd=self.folder, env=environ, stdout=pipe, text=True, timeout=300, check=False)
        return done.stdout


class RentedWorld(World):
    """A folder of a laptop in a region with real instances."""

    def __init__(self, bottle: Bottle) -> None:
        super().__init__(bottle.folder)
        write_machine_wheels(self.folder / "wheels")
        self.bottle = bottle

    def execute(self, line: str, settings: dict[str, str]) -> str:
        return self.bottle.laptop("bash", "-c", line, seconds=280, AWS_DEFAULT_REGION=REGION, **settings).stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("you"))
    write_encoder(made.folder / "encoder")
    yield made
    if any("provision local" in command for command, _ in made.said):
        made.run("cpuft provision down lab", 0)


@pytest.fixture(scope="module")
def rented_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RentedWorld]:
    with open_bottle(tmp_path_factory.mktemp("laptop")) as bottle:
        yield RentedWorld(bottle)


def simplify(text: str, folder: str = "/home/you") -> list[str]:
    """Return lines that are the same for all numbers, machines and choices that depend on the CPU and its load."""
    text = text.replace(folder, "/home/you").replace("./encoder", "minilm").replace(socket.gethostname(), "vm")
    of_load = r"^(CPUFT-\d+ on|\W*other programs, or other guests|waiting for the baseline,) .*\n"
    text = re.sub(of_load, "", text, flags=re.M)
    text = re.sub(r"\b(fp32|bf16)\b(: .*)?", "bf16", text)
    text = re.sub(r"^gradients over .*", "gradients over a backend", text, flags=re.M)
    text = re.sub(r"\b(mpi|ccl)\b", "gloo", text)
    text = re.sub(r"\b(none|int8|powersgd)\b(?= +\d)", "bf16", text)
    text = re.sub(r"\bi-[0-9a-f]{17}\b", "i-0", text)
    text = re.sub(r"-?\d[\d.,]*(e-?\d+)?%?|\binf\b", "0", text)
    lines = [" ".join(re.sub(r"[#─]+", "#", line).split()) for line in text.splitlines()]
    lines = [line for line, _ in itertools.groupby(lines) if line]  # mpirun prints an empty line now and then
    # Lines that were left out between two that are alike, such as those of updates, are one line with them.
    places = [
        place for place in range(1, len(lines) - 1) if lines[place] == "..." and lines[place - 1] == lines[place + 1]
    ]
    return [line for place, line in enumerate(lines) if place not in places and place - 1 not in places]


RENTED = "docs/aws.md"
HOSTS = ("docs/clusters-simulated.md", RENTED)


@pytest.mark.real
@pytest.mark.parametrize("path", [pytest.param(one, marks=needs_root) if one in HOSTS else one for one in SHOWN])
def test_commands_print_what_pages_show(path: str, request: pytest.FixtureRequest) -> None:
    world = request.getfixturevalue("rented_world" if path == RENTED else "world")
    commands = [command for command, _ in SHOWN[path]]
    for place, (command, shown) in enumerate(SHOWN[path], 1):
        said = world.run(command, commands[:place].count(command))
        printed = "".join(f"{line}\n" for line in simplify(said, str(world.folder)))
        lines = (r"(?:.*\n)*" if line == "..." else re.escape(line) + "\n" for line in simplify(shown))
        # Lines of the two streams of a process may change places.
        is_same = re.fullmatch("".join(lines), printed) or sorted(simplify(shown)) == sorted(printed.splitlines())
        assert is_same, f"{path}: {command}\n{said}"


@pytest.mark.real
def test_the_trained_model_is_loaded_with_transformers(world: World) -> None:
    """Each page's lines run by themselves, but in one process, which imports transformers once."""
    blocks = []
    for path in ("README.md", "docs/training.md"):
        (launch,) = (command for command, _ in SHOWN[path] if "cpuft launch" in command)
        world.run(launch)
        found = re.findall(r"^```python\n(.*?)^```", TEXTS[path], re.DOTALL | re.M)
        blocks += [f"exec({one!r}, {{}})" for one in found if "pipeline" in one]
    said = world.run(f"python -c {shlex.quote('; '.join(blocks))}")
    assert re.findall(r"'label': '(\w+)'", said) == ["good", "good", "bad"], said


@pytest.mark.real
def test_two_ranks_of_a_page_share_the_cores_and_tell_of_the_baseline(world: World) -> None:
    ((command, _),) = SHOWN["README.md"]
    world.run(command)
    folder = world.folder / "runs/reviews"
    record = read_record(str(folder))
    assert [len(place.cpus) for place in record.header.ranks] == [1, 1]
    assert record.header.ranks[0].cpus != record.header.ranks[1].cpus
    assert record.header.kernels == "compiled"
    assert record.header.fast_path == "6 of 6 layers replaced"
    assert [line.step for line in record.steps] == list(range(1, 16))
    assert record.footer is not None
    assert record.footer.samples == 3 * 288
    assert set(record.metrics) == {"accuracy", "f1"}
    assert record.baseline
    assert (record.baseline.examples, set(record.baseline.metrics)) == (288, {"accuracy", "f1"})
    assert format_baseline(record.baseline) in (folder / "logs/rank-0.out").read_text()
    assert format_baseline(record.baseline) in (folder / "model/README.md").read_text()
    told = (folder / "logs/rank-0.err").read_text()
    assert (told.count("step "), told.count("fast path: 6 of 6 layers replaced\n")) == (15, 1)
    silent = folder / "logs/rank-1.err"
    assert not silent.exists() or "step " not in silent.read_text()


@pytest.mark.real
def test_a_comparison_is_reported_again(world: World) -> None:
    (command,) = (command for command, _ in SHOWN["docs/comparing.md"] if "cpuft compare" in command)
    told = world.run(command)
    report = json.loads(world.run("cpuft report runs/compared --json"))
    found = [(run["np"], run["global_batch"], run["speedup"] > 0) for run in report["runs"]]
    assert found == [(1, 32, True), (2, 64, True)]
    assert report["scaling"] == "weak"
    assert report["baseline"]["metrics"].keys() == report["runs"][0]["metrics"].keys()
    runs = world.folder / "runs/compared"
    speed, _, quality = world.run(f"cpuft report {runs}/np-1 {runs}/np-2").partition("\nQuality of A")
    assert speed in told
    assert "on the same validation rows: 32 rows" in quality


def test_every_page_of_a_task_begins_with_it_and_shows_what_one_sees() -> None:
    tasks = {path for path, text in TEXTS.items() if "\n**Task:** " in text}
    assert {path for path in tasks if "```console" not in TEXTS[path] and "```text" not in TEXTS[path]} == set()
