"""How long instances live: they end themselves at a time that they are told at birth. Pure."""

from __future__ import annotations

import json
import re
import time

from cpuft.errors import CpuftError

UNTIL_FILE = "/var/lib/cpuft/until"
"""On every instance: when it ends itself, in seconds of the epoch."""
_ARM = "/usr/local/sbin/cpuft-lease"
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_LEAST, _MOST = 600, 30 * 86400

ARM_SCRIPT = f"""#!/bin/sh
# Whole minutes, rounded down: the instance is gone by the end of its lease, never after it.
left=$(( ($(cat {UNTIL_FILE}) - $(date +%s)) / 60 ))
shutdown -c 2>/dev/null
[ "$left" -gt 0 ] || exec shutdown -P now
exec shutdown -P "+$left"
"""
"""Arms the end of the lease on an instance. Instances are made so that powering off terminates them."""
_UNIT = f"""[Unit]
Description=End of the lease of this instance
After=systemd-logind.service dbus.service

[Service]
Type=oneshot
ExecStart={_ARM}

[Install]
WantedBy=multi-user.target
"""


def parse_lease(text: str) -> int:
    """Seconds of "90m", "4h" or "2d". Raises CpuftError."""
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not _LEAST <= seconds <= _MOST:
        raise CpuftError(f"--lease {text!r:.60} is no lease: give 10m to 30d, such as 90m, 4h or 2d")
    return seconds


def format_time(seconds: float) -> str:
    """A time for people: in UTC, as this machine's clock may be anywhere."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def format_span(seconds: float) -> str:
    """`3 h 59 min`."""
    minutes = max(0, int(seconds)) // 60
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def format_user_data(until: int) -> str:
    """What an instance is told at birth, but for its host key, which belongs right behind it.

    JSON is YAML: what is quoted so cannot end its line.
    """
    files = [
        {"path": UNTIL_FILE, "content": f"{until}\n"},
        {"path": _ARM, "content": ARM_SCRIPT, "permissions": "0755"},
        {"path": "/etc/systemd/system/cpuft-lease.service", "content": _UNIT},
    ]
    arm = [["systemctl", "daemon-reload"], ["systemctl", "enable", "--now", "cpuft-lease.service"]]
    return (
        "#cloud-config\n"
        "disable_root: false\n"
        "ssh_deletekeys: true\n"
        f"write_files: {json.dumps(files)}\n"
        f"runcmd: {json.dumps(arm)}\n"
    )


def make_extension(until: int) -> tuple[str, ...]:
    """A command of an instance that moves its end."""
    script = 'set -e; echo "$1" >"$2.new"; mv "$2.new" "$2"; exec "$3"'
    return ("sh", "-c", script, "extend", str(until), UNTIL_FILE, _ARM)
