"""Command lines of our own modules, and those that pass through mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpuft.argv import make_shell_line, module_command, pack_argv, unpack_argv
from tests.test_plans import AWKWARD
from tests.train.tiny import save_tiny

ODD = [*AWKWARD, ":", "-genv", "-m", "%r", "json:1", "--", "-", "--x y", "\udcff", "--lr=1e-4", "a:b", "100%"]


@given(st.lists(st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\0")), min_size=1))
def test_a_packed_command_line_is_unpacked_unchanged(words: list[str]) -> None:
    packed = pack_argv(["train.py", *words])
    assert unpack_argv(packed) == ["train.py", *words]
    assert not [word for word in packed if word in ("", ":", "--") or (word.startswith("-") and word[:2] != "--")]
    assert all(word.isascii() and word.isprintable() for word in packed)


def test_harmless_arguments_stay_readable_and_own_modules_are_run() -> None:
    plain = ("/env/bin/python", "train.py", "--lr", "1e-4", "--data=a/b.csv", "k=v,w")
    assert pack_argv(plain) == plain
    assert pack_argv(("-m", "cpuft.train", "--task=a b")) == ("-m", "cpuft.train", 'json:"--task=a b"')
    assert unpack_argv(["-m", "cpuft.train", "x"]) == [*module_command(sys.executable, "cpuft.train"), "x"]
    assert unpack_argv(pack_argv(["echo", "-m", "x"])) == ["echo", "-m", "x"]


PLANTED = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nraise SystemExit('planted')\n"


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A working folder in which others have put modules."""
    for name in ("numpy", "json", "typing", "click", "runpy", "glob", "socket", "dataclasses", "pip", "cpuft"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    return tmp_path


@pytest.mark.parametrize("environ", [{}, {"PYTHONSAFEPATH": "1"}])
def test_a_module_of_ours_imports_nothing_of_the_working_folder(environ: dict[str, str], planted: Path) -> None:
    show = "import sys, json; print(json.dumps([sys.argv[1:], sys.path]))"
    (planted / "elsewhere").mkdir()
    script = planted / "elsewhere" / "show.py"
    script.write_text(show)
    command = [*module_command(sys.executable, "cpuft.rank.script"), str(script), "a", ""]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ) | environ)
    words, path = json.loads(done.stdout)
    assert (words, path[0]) == (["a", ""], str(script.parent))
    assert not {"", str(planted)} & set(path)
    assert not (planted / "ran").exists()


def test_python_m_cpuft_imports_nothing_of_the_working_folder(planted: Path) -> None:
    # What Python itself imports before ours, it takes from there: runpy before 3.11, and a package of our name.
    (planted / "cpuft.py").unlink()
    (planted / "runpy.py").unlink()
    done = subprocess.run([sys.executable, "-m", "cpuft", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("cpuft, version"), done.stderr
    assert not (planted / "ran").exists()


def test_a_module_of_others_that_imports_ours_keeps_its_folder(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import cpuft\n")
    (tmp_path / "theirs" / "__main__.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("print('beside')\n")
    done = subprocess.run([sys.executable, "-m", "theirs"], capture_output=True, text=True)
    assert done.stdout == "beside\n", done.stderr


def test_a_whole_run_and_the_doctor_import_nothing_of_the_working_folder(planted: Path) -> None:
    cpuft = Path(sys.executable).with_name("cpuft")
    demo = ("--max-steps", "1", "--max-length", "32", "--model", save_tiny(planted / "tiny"))
    run = subprocess.run([cpuft, "launch", "--run-dir", "run", *demo], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    look = subprocess.run([cpuft, "doctor"], capture_output=True, text=True, timeout=60)
    assert "localhost" in look.stdout, look.stderr
    assert not (planted / "ran").exists()


WORDS = st.text(st.sampled_from("ab '\"\\!$`\n\t=%~{}*?[]^#;&|<>()@-é"), max_size=9)


@pytest.mark.parametrize(
    "shell", ["sh", "bash", *(pytest.param(name, marks=pytest.mark.real) for name in ("tcsh", "fish"))]
)
@settings(deadline=None, max_examples=10)
@given(st.lists(WORDS, max_size=6))
@example(["it's", "!!", "\\", "\\\\", "\\'", "\\!", "", "=1", "%self", "~root", "a\nb\n", "\\\n", "$(x)", "{a,b}"])
def test_every_login_shell_passes_arguments_on(shell: str, words: list[str]) -> None:
    """A command reads its standard input, too."""
    argv = ["sh", "-c", "printf '%s|' \"$@\" # what is not\ncat", "sh", *words]
    done = subprocess.run([shell, "-c", make_shell_line(argv)], input="given", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("".join(f"{word}|" for word in words or [""]) + "given", "")
