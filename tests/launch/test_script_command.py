"""The command of a user's own script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.launch.script_command import name_script, plan_script, refuse_other_launchers, wrap_script


def test_scripts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert plan_script(("train.py", "--lr", "1")) == (sys.executable, str(tmp_path / "train.py"), "--lr", "1")
    command, python = plan_script(("train.py", "--lr", "1")), sys.executable
    for start in (("python",), ("python3", "-u"), (sys.executable,)):
        assert plan_script((*start, "train.py", "--lr", "1")) == command
    assert plan_script(("python", "-m", "a.train", "-x")) == (sys.executable, "-m", "a.train", "-x")
    assert wrap_script((python, "-m", "a.train"), python, wrap=False) == ("-m", "cpuft.rank.script", "-m", "a.train")
    names = [("train.py",), ("python", "-m", "a.train"), ("bash", "-c", "true")]
    assert [name_script(plan_script(words)) for words in names] == ["train", "train", "bash"]
    assert name_script((sys.executable,)) == Path(sys.executable).stem
    words = (str(tmp_path / "train.py"), "--lr", "1")
    assert wrap_script(command, python, wrap=True) == ("-m", "cpuft.train.wrap", *words)
    assert wrap_script(command, python, wrap=False) == ("-m", "cpuft.rank.script", *words)
    assert wrap_script(("bash", "some.py"), python, wrap=False) == ("bash", "some.py")
    with pytest.raises(CpuftError, match="--wrap takes a Python script"):
        wrap_script(("bash", "-c", "true"), python, wrap=True)
    assert plan_script(("bash", "-c", "true")) == ("bash", "-c", "true")
    with pytest.raises(CpuftError, match=r"there is no script other\.py"):
        plan_script(("other.py",))
    with pytest.raises(CpuftError, match="there is no script or program no-such-program"):
        plan_script(("no-such-program",))


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (("torchrun", "train.py"), "torchrun"),
        (("/usr/bin/accelerate", "launch", "train.py"), "accelerate"),
        (("python", "-m", "torch.distributed.run", "train.py"), "torchrun"),
        (("python", "-u", "-X", "dev", "-m", "torch.distributed.run", "train.py"), "torchrun"),
    ],
)
def test_another_launcher_is_refused(script: tuple[str, ...], name: str) -> None:
    with pytest.raises(CpuftError, match=f"starts the ranks itself, and {name} would start .* leave {name} and its"):
        refuse_other_launchers(script)
    refuse_other_launchers(("python", "-m", "train"))
    refuse_other_launchers(("python", "-u", "train.py", "-m", "torch.distributed.run"))
    refuse_other_launchers(("train.py", "torchrun"))
