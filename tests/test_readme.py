"""What the READMEs say is true: their commands parse and plan, their tables are what the code has, their links lead."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from cpuft.cli import cli
from cpuft.cli.aliases import TOOLS, read_aliases
from cpuft.config.launch import LaunchConfig
from cpuft.doctor.checks import CHECKS
from cpuft.files import write_text
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry
from cpuft.launch.rank_variables import plan_settings
from cpuft.launch.run_folder import choose_run_dir
from cpuft.launch.run_state import PHASES
from scripts.benchmarks import bench_alternatives
from scripts.benchmarks.figures import format_contestants, format_figures, format_shares, read_figures
from scripts.reference import format_reference
from tests.conftest import call_cpuft
from tests.launch.test_plan import make_cluster
from tests.records import make_record, make_steps
from tests.report.test_comparison import write_record

ROOT = Path(__file__).parents[1]
LINES = 120
"""Most lines of README.md."""
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
TEXTS = {
    path: (ROOT / path).read_text(encoding="utf-8")
    for path in ("README.md", "ami/README.md", "hostfiles/README.md", *PAGES)
}
EVERYTHING = "".join(text for path, text in TEXTS.items() if path != "docs/reference.md")


def find_commands() -> list[str]:
    """Lines of code blocks that call cpuft."""
    # What begins a block with a language must not pass for the end of another one.
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", EVERYTHING, re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    found = {line.partition("    #")[0] for line in lines}
    return sorted({line for line in found if line.startswith(("cpuft ", 'eval "$(cpuft '))})


COMMANDS = find_commands()
RUNS = {name for command in COMMANDS for name in re.findall(r"runs/[\w-]+", command)}
SERVERS = {command for command in COMMANDS if "--hosts" in command}
"""They need servers called so: scripts/check-clusters does the same to real ones."""
DRY = {"quickstart", "launch", "compare", "bench", "predict", "data", "export", "mine", "sweep"}
"""Verbs that are not to do it."""


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - SERVERS))
def test_every_command_works(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for folder in ("hostfiles", "ami"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "train.py").write_text("")
    for run in RUNS:
        places = {1: f"{run}/np-1", 2: f"{run}/np-2"} if "compare" in run else {1 if "-np1-" in run else 2: run}
        for ranks, place in places.items():
            made = replace(make_record(ranks), steps=make_steps(8, [0.3] * ranks))
            write_record(made, tmp_path / place)
    for run in tmp_path.glob("runs/*-np*"):
        (run / "model").mkdir()
        (run / "model/config.json").write_text("{}")
        (run / "model/model.safetensors").write_text("")
    lab = Entry("lab", "local", str(tmp_path / "hostfiles" / "lab"), options={"name": "lab"})
    write_text(tmp_path / "state" / "lab" / FILE_NAME, format_entry(lab))
    write_text(tmp_path / "hostfiles" / "lab", "# made by cpuft provision\nlocalhost slots=4\n")
    words = shlex.split(command.removeprefix('eval "$(').removesuffix(')"').partition(" > ")[0], comments=True)[1:]
    place = words.index("--") if "--" in words else len(words)
    is_dry = words[0] in DRY and "status" not in words
    words[place:place] = ["--dry-run"] if is_dry or "down" in words else []
    # That lab is this machine alone; hosts of the same name take the place of none.
    is_made = words[:2] == ["provision", "local"]
    monkeypatch.setenv("CPUFT_STATE", str(tmp_path / ("none" if is_made else "state")))
    code, _, warned = call_cpuft(capfd, *words, *["--dry-run"] * is_made)
    assert code == 0, warned


SENTENCES = {
    *re.findall(r"(?<!`)`cpuft ([a-z][^`]*)`", EVERYTHING),
    *re.findall(r"^\$ cpuft (.*)$", EVERYTHING, re.M),
    *(one.removeprefix("cpuft ") for one in SERVERS),
}


@pytest.mark.parametrize("command", sorted(SENTENCES))
def test_every_command_in_a_sentence_can_be_typed(command: str) -> None:
    verb: click.Command = cli
    words = shlex.split(command)
    while isinstance(verb, click.Group) and words:
        name = words.pop(0)
        found = verb.get_command(click.Context(verb), name)
        assert found is not None, name
        verb = found
    # --help ends with Exit; a sentence may name a command without its arguments.
    with contextlib.suppress(click.exceptions.Exit, click.exceptions.NoArgsIsHelpError, click.MissingParameter):
        verb.make_context(name, words)


def test_runs_have_the_names_that_runs_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names = set(re.findall(r"runs/([a-z]+-(?:np\d+|compare))-\d{8}-\d{6}\b", TEXTS["README.md"]))
    assert names == {"mrpc-np2"}
    for run in RUNS:
        name, _, _ = run.removeprefix("runs/").rpartition("-2")
        made = Path(choose_run_dir("", name)).relative_to(tmp_path).as_posix()
        assert re.sub(r"\d{8}-\d{6}$", "", made) == re.sub(r"\d{8}-\d{6}$", "", run)


def test_the_changed_lines_of_a_script_make_the_script_below_them() -> None:
    page = TEXTS["docs/scripts.md"]
    (changes,), (script, *_) = (
        re.findall(rf"^```{one}\n(.*?)^```", page, re.DOTALL | re.M) for one in ("diff", "python")
    )
    after = [line[1:] for line in changes.splitlines() if not line.startswith("-")]
    assert script.splitlines()[1 : len(after) + 1] == after


def test_the_lines_around_a_loop_of_ones_own_and_a_trainer(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", EVERYTHING, re.DOTALL | re.M)
    loop, trainer = (block for block in blocks if "cpuft.accelerate" in block)
    for text in (loop, trainer):
        found: dict[str, Any] = {}
        exec(text, found)
        assert type(found["optimizer"]).__name__ == "FusedAdamW"
    assert (tmp_path / "out/model/modules.json").exists()


def test_the_line_for_the_shell_makes_it_complete() -> None:
    (line,) = re.findall(r"^eval .*_CPUFT_COMPLETE.*$", EVERYTHING, re.M)
    script = f"PATH={Path(sys.executable).parent}:$PATH\n{line}\ncomplete -p cpuft"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "cpuft"


SHELL = "".join(re.findall(r"^```sh\n(.*?)^```", EVERYTHING, re.DOTALL | re.M))
"""Commands of other tools, which no test can run."""


def test_commands_of_other_tools_are_shell() -> None:
    assert subprocess.run(["bash", "-n"], input=SHELL, capture_output=True, text=True, check=True).stderr == ""


@pytest.mark.proof
def test_azures_client_knows_its_commands(tmp_path: Path) -> None:
    """Without an account, it gets as far as that."""
    lines = re.findall(r"^az .*$", SHELL.replace("\\\n", ""), re.M)
    assert len(lines) >= 4
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "own"], check=True)
    subprocess.run([tmp_path / "own/bin/pip", "install", "--quiet", "azure-cli==2.91.0"], check=True)
    settings = {"AZURE_CONFIG_DIR": str(tmp_path), "PATH": f"{tmp_path}/own/bin:/usr/bin:/bin"}
    for line in (*lines, "az vm create --siz a"):
        given = line.replace("~/.ssh/id_ed25519.pub", "/dev/null")
        done = subprocess.run(["sh", "-c", given], env=settings, capture_output=True, text=True, check=False)
        assert ("Please run 'az login'" in done.stderr) == (line in lines), done.stderr


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^pip install .*$", EVERYTHING, re.M))))
def test_pip_takes_every_line_for_it(line: str) -> None:
    more = ("--dry-run", "--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    line = line.replace("git+URL", f"git+file://{ROOT}")
    subprocess.run([sys.executable, "-m", *shlex.split(line), *more], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("script", sorted(set(re.findall(r"scripts/[a-z-]+", EVERYTHING))))
def test_every_script_is_there_and_can_be_run(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111


def test_every_script_is_told_of() -> None:
    scripts = {f"`scripts/{path.name}" for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix}
    assert {script for script in scripts if script not in TEXTS["docs/contributing/index.md"]} == set()


def slug(heading: str) -> str:
    """How a heading is linked to."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", TEXTS)
def test_every_link_leads_somewhere(path: str) -> None:
    links = [link.partition("#") for link in re.findall(r"\]\(([^)]*)\)", TEXTS[path])]
    targets = {(str((ROOT / path).parent / name) if name else str(ROOT / path), anchor) for name, _, anchor in links}
    assert {name for name, _ in targets if not Path(name).exists()} == set()
    headings = {
        name: {slug(text) for text in re.findall(r"^#+ (.*)$", Path(name).read_text("utf-8"), re.M)}
        for name, anchor in targets
        if anchor
    }
    assert {(name, anchor) for name, anchor in targets if anchor and anchor not in headings[name]} == set()


def test_it_is_short_and_its_contents_are_at_its_head() -> None:
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) <= LINES
    headings = re.findall(r"^## (.*)$", TEXTS["README.md"], re.M)
    assert re.findall(r"\[([^]]*)\]\(#", "\n".join(lines[:15])) == headings


def test_the_layout_names_every_folder_and_module_of_the_package() -> None:
    table = TEXTS["docs/architecture.md"].partition("<!-- layout -->")[2].partition("<!-- /layout -->")[0]
    there = {f"cpuft/{path.name}/" for path in (ROOT / "cpuft").iterdir() if (path / "__init__.py").exists()}
    there |= {f"cpuft/{path.name}" for path in (ROOT / "cpuft").glob("*.py") if not path.name.startswith("_")}
    assert set(re.findall(r"`(cpuft/[^`]*)`", table)) == there


def test_the_life_of_a_run_names_functions_and_phases_that_exist() -> None:
    table = TEXTS["docs/architecture.md"].partition("<!-- life -->")[2].partition("<!-- /life -->")[0]
    rows = re.findall(r"^\| [1-8]\. .* \| `(.*)` \| `(.*)` \| (.*)\|$", table, re.M)
    assert len(rows) == 8
    for file, name, _ in rows:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.M), file
    assert {phase.strip() for *_, text in rows for phase in text.split(",") if phase.strip()} == set(PHASES)


def test_the_reference_is_generated_from_the_code(request: pytest.FixtureRequest) -> None:
    path = ROOT / "docs/reference.md"
    if request.config.getoption("--rewrite-golden"):
        path.write_text(format_reference(), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == format_reference()


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", ".mkdocs.yml"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "index.html").exists()


def format_settings() -> str:
    shared, per_host = plan_settings(make_cluster((1, 1)), LaunchConfig(np=2, comm_cores=4), "gloo", {})
    rows = [f"| `{s.name}` | `{s.value}` | {s.reason} |" for s in shared + per_host[0] if "CPUFT" not in s.name]
    return "\n".join(["", "| variable | value | why |", "| --- | --- | --- |", *rows, "", ""])


def format_others() -> str:
    """Two rows of the table of others' options in each; then what is left out."""
    ours: dict[str, dict[str, None]] = {}
    for row in read_aliases():
        names = [name for name in row.names(*TOOLS[:-1]) if name.replace("_", "-") != row.ours]  # not earlier names
        ours.setdefault(row.ours, {}).update(dict.fromkeys(f"`{name}`" for name in names))
    left = ", ".join(ours.pop(""))
    cells = [f" {', '.join(theirs)} | `{name}` |" for name, theirs in ours.items() if theirs]
    half = (len(cells) + 1) // 2
    rows = [f"|{first}{second}" for first, second in zip(cells[:half], [*cells[half:], " | |"])]
    text = textwrap.fill(f"Leave out, because cpuft does it anyway, or cannot: {left}.", 120, break_on_hyphens=False)
    return "\n".join(["", "| theirs | ours | theirs | ours |", "| --- | --- | --- | --- |", *rows, "", text, "", ""])


def format_speeds() -> str:
    return f"\n{format_figures(read_figures(ROOT / 'scripts/figures'))}\n\n"


def format_rows() -> str:
    return f"\n{format_contestants(read_figures(ROOT / 'scripts/figures'))}\n\n"


def format_parts() -> str:
    return f"\n{format_shares(read_figures(ROOT / 'scripts/figures'))}\n\n"


def format_ways() -> str:
    kept = bench_alternatives.read_figures(ROOT / "scripts/figures")
    return f"\n{bench_alternatives.format_alternatives(kept)}\n\n{bench_alternatives.format_machine(kept)}\n\n"


def format_prices() -> str:
    kept = bench_alternatives.read_figures(ROOT / "scripts/figures")
    return f"\n{bench_alternatives.format_gpu_hours(kept)}\n\n"


def format_codes() -> str:
    rows = [f"| {one.code} | {one.title} |" for one in CHECKS]
    return "\n".join(["", "| code | what the doctor has found |", "| --- | --- |", *rows, "", ""])


@pytest.mark.parametrize(
    "path, mark, made",
    [
        ("hostfiles/README.md", "settings", format_settings),
        ("docs/other-tools.md", "others", format_others),
        ("README.md", "speeds", format_speeds),
        ("docs/contributing/measurements.md", "contestants", format_rows),
        ("docs/contributing/measurements.md", "shares", format_parts),
        ("docs/troubleshooting.md", "codes", format_codes),
        ("docs/when-not-to-fine-tune.md", "alternatives", format_ways),
        ("docs/when-not-to-fine-tune.md", "gpu-hours", format_prices),
    ],
)
def test_tables_are_made_from_the_code(path: str, mark: str, made: Any, request: pytest.FixtureRequest) -> None:
    between = re.compile(rf"(?<=<!-- {mark} -->\n).*(?=<!-- /{mark} -->)", re.DOTALL)
    if request.config.getoption("--rewrite-golden"):
        text = (ROOT / path).read_text(encoding="utf-8")
        (ROOT / path).write_text(between.sub(lambda _: made(), text), encoding="utf-8")
    found = between.search((ROOT / path).read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == made()
