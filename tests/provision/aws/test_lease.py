"""Leases, and the user data of instances."""

from __future__ import annotations

import base64
import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import yaml

from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import UNREACHABLE, HostError
from cpuft.provision.aws.lease import (
    ARM_SCRIPT,
    format_span,
    format_user_data,
    make_schedule_command,
    parse_lease,
    parse_limit,
    parse_timer,
)
from cpuft.provision.aws.nodes import LeaseError, Nodes

NOW = 1_800_000_000


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("90m", 5400), ("4h", 14400), ("2d", 172800)])
def test_a_lease(text: str, seconds: int) -> None:
    assert parse_lease(text) == seconds


@pytest.mark.parametrize("text", ["", "4", "h", "0h", "9m", "31d", "-4h", "4 h", "4h30m", "4H", "9999999h", "٤h"])
def test_texts_that_are_not_a_lease_are_refused(text: str) -> None:
    with pytest.raises(CpuftError, match="is not a valid time: give 10m to 30d"):
        parse_lease(text)


@pytest.mark.parametrize(
    ("text", "lease", "seconds"),
    [("", 14400, 28800), ("", 20 * 86400, 30 * 86400), ("4h", 14400, 14400), ("2d", 14400, 172800)],
)
def test_the_limit_of_a_lease(text: str, lease: int, seconds: int) -> None:
    assert parse_limit(text, lease) == seconds


@pytest.mark.parametrize(
    ("text", "said"), [("3h", "--lease-limit 3h is less than --lease"), ("x", "--lease-limit 'x' is not a valid time")]
)
def test_wrong_limits_are_refused(text: str, said: str) -> None:
    with pytest.raises(CpuftError, match=said):
        parse_limit(text, 14400)


@pytest.mark.parametrize(("seconds", "said"), [(0, "0 min"), (-5, "0 min"), (3599, "59 min"), (7260, "2 h 01 min")])
def test_a_duration_is_written_in_hours_and_minutes(seconds: float, said: str) -> None:
    assert format_span(seconds) == said


def test_user_data_is_read_back() -> None:
    text = format_user_data(NOW, NOW + 9, "ssh-ed25519 AAAA cpuft")
    assert text.startswith("#cloud-config\n")
    assert len(base64.b64encode(text.encode())) < 16384
    told = yaml.safe_load(text)
    assert told["ssh_authorized_keys"] == ["ssh-ed25519 AAAA cpuft"]
    assert told["disable_root"] is False
    # Whatever the image is configured to, the host key that is looked for is on the console.
    assert told["ssh_genkeytypes"] == ["ed25519"]
    assert told["ssh"] == {"emit_keys_to_console": True}
    assert told["runcmd"] == [list(make_schedule_command(NOW, NOW + 9))]


@pytest.mark.parametrize(
    ("left", "said"),
    [(3600, "-c|-P +59|"), (3660, "-c|-P +60|"), (3661, "-c|-P +61|"), (59, "-c|-P now|"), (-100, "-c|-P now|")],
)
def test_the_shutdown_is_scheduled_at_every_boot(left: int, said: str, tmp_path: Path) -> None:
    """The shutdown is in as many whole minutes as are left, never in more. The clock is at most a few seconds ahead."""
    bin_folder, until = tmp_path / "bin", tmp_path / "until"
    bin_folder.mkdir()
    (bin_folder / "shutdown").write_text(f'#!/bin/sh\nprintf "%s|" "$*" >>{tmp_path}/said\n')
    (bin_folder / "date").write_text(f"#!/bin/sh\necho {NOW + 1}\n")
    for name in ("shutdown", "date"):
        (bin_folder / name).chmod(0o755)
    until.write_text(f"{NOW + left}\n")
    script = ARM_SCRIPT.replace("/var/lib/cpuft/until", str(until))
    subprocess.run(["sh", "-c", script], env={"PATH": f"{bin_folder}:/usr/bin:/bin"}, check=True)
    assert (tmp_path / "said").read_text() == said


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("until 1799990000\nusec 1799990000000000\nmode poweroff\nenabled yes\n", ""),
        ("until 1799990000\nusec 1799990000000000\nmode poweroff\n", "a reboot would cancel its shutdown"),
        ("until 1799990000\nusec 1800000060000000\nmode poweroff\nenabled yes\n", "its shutdown is scheduled for"),
        ("until 1799990000\nusec 1799990000000000\nmode reboot\nenabled yes\n", "no shutdown is scheduled"),
        ("until 1799990000\nenabled yes\n", "no shutdown is scheduled"),
        ("until \n", "no shutdown is scheduled"),
        ("", "no shutdown is scheduled"),
        ("usec x\nmode poweroff\nenabled yes\n", "no shutdown is scheduled"),
    ],
)
def test_whether_the_shutdown_is_scheduled_is_read_from_an_instance(said: str, fault: str) -> None:
    found = parse_timer(said).find_fault(NOW)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)


def test_the_shutdown_is_scheduled_on_an_instance_without_user_data(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("systemctl", "shutdown"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nprintf "{name} %s|" "$*" >>{tmp_path}/said\n')
        (tmp_path / "bin" / name).chmod(0o755)
    words = [
        word.replace("/var/lib/cpuft", f"{tmp_path}/lib").replace("/usr/local/sbin", f"{tmp_path}/sbin")
        for word in make_schedule_command(2 * NOW, 2 * NOW + 9)
    ]
    words = [word.replace("/etc/systemd", f"{tmp_path}/systemd") for word in words]
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    subprocess.run(words, env=environ, check=True)
    assert (tmp_path / "lib/until").read_text() == f"{2 * NOW}\n"
    assert (tmp_path / "lib/limit").read_text() == f"{2 * NOW + 9}\n"
    assert "ExecStart=" in (tmp_path / "systemd/system/cpuft-lease.service").read_text()
    said = (tmp_path / "said").read_text()
    assert said.startswith("systemctl daemon-reload|systemctl enable cpuft-lease.service|shutdown -c|shutdown -P +")


@pytest.mark.parametrize(
    ("until", "limit", "moved", "armed"),
    [
        (600, 7200, 900, "-c|-P +15|"),
        (600, 700, 700, "-c|-P +11|"),
        (600, 600, 600, ""),
        (3600, 7200, 3600, ""),
        (600, None, 600, ""),
        (-5, 7200, 900, "-c|-P +15|"),
    ],
    ids=("moved", "to the limit", "at the limit", "long enough", "no limit is known", "just past"),
)
def test_a_job_extends_the_lease_up_to_its_limit(
    until: int, limit: int | None, moved: int, armed: str, tmp_path: Path
) -> None:
    for name, text in (("shutdown", f'printf "%s|" "$*" >>{tmp_path}/said'), ("date", f"echo {NOW}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "said").write_text("")
    (tmp_path / "until").write_text(f"{NOW + until}\n")
    times = {"limit": limit} if limit is not None else {}
    for name, seconds in times.items():
        (tmp_path / name).write_text(f"{NOW + seconds}\n")
    script = ARM_SCRIPT.replace("/var/lib/cpuft", str(tmp_path))
    words, environ = ["sh", "-c", script, "lease", "renew"], {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(words, env=environ, check=True, capture_output=True, text=True)
    assert (tmp_path / "until").read_text() == f"{NOW + moved}\n"
    assert done.stdout == f"{NOW + moved} {NOW + times.get('limit', until)}\n"
    assert (tmp_path / "said").read_text() == armed


def test_an_instance_that_cannot_be_asked_about_its_lease_is_an_error_of_the_lease() -> None:
    class Unreachable:
        def run(self, host: Host, argv: Sequence[str]) -> NoReturn:
            raise HostError(host.name, UNREACHABLE, "Connection refused")

    nodes = object.__new__(Nodes)
    vars(nodes).update(
        members=(SimpleNamespace(address="10.0.0.9"),),
        _until=1,
        _limit=1,
        _temporary_transport=lambda kept: contextlib.nullcontext(Unreachable()),
    )
    with pytest.raises(LeaseError, match=r"it is not certain that all instances terminate .*10\.0\.0\.9"):
        nodes.secure_lease(print)
