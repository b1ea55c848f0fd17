"""How long instances live: they end themselves at a time that they are told at birth. Pure."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

from cpuft.config import is_count
from cpuft.errors import CpuftError

UNTIL_FILE = "/var/lib/cpuft/until"
"""On every instance: when it ends itself, in seconds of the epoch."""
_LIMIT_FILE = "/var/lib/cpuft/limit"
"""And until when a running job may move that."""
_ARM = "/usr/local/sbin/cpuft-lease"
RENEWAL = f"{_ARM} renew"
"""A command of every instance: by it a job that runs moves the end."""
_RENEWED_SECONDS = 900
"""How long an instance lives on after a renewal: jobs renew every five minutes."""
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_LEAST, _MOST = 600, 30 * 86400

ARM_SCRIPT = f"""#!/bin/sh
# cpuft-lease [renew]: arms the end of the lease; with a word, moves it before, as far as it may, and says both times.
until=$(cat {UNTIL_FILE}) now=$(date +%s)
if [ "${{1:-}}" = renew ]; then
    limit=$(cat {_LIMIT_FILE} 2>/dev/null || echo "$until")
    wanted=$(( now + {_RENEWED_SECONDS} < limit ? now + {_RENEWED_SECONDS} : limit ))
    [ "$wanted" -gt "$until" ] || {{ echo "$until $limit"; exit 0; }}
    echo "$wanted" >{UNTIL_FILE}.new && mv {UNTIL_FILE}.new {UNTIL_FILE} || exit 1
    until=$wanted
    echo "$until $limit"
fi
# Whole minutes, rounded down: the instance is gone by the end of its lease, never after it.
left=$(( (until - now) / 60 ))
shutdown -c 2>/dev/null
[ "$left" -gt 0 ] || exec shutdown -P now
exec shutdown -P "+$left"
"""
"""Arms the end of the lease on an instance. Instances are made so that powering off terminates them."""
_UNIT_FILE = "/etc/systemd/system/cpuft-lease.service"
_UNIT = f"""[Unit]
Description=End of the lease of this instance
After=systemd-logind.service dbus.service

[Service]
Type=oneshot
ExecStart={_ARM}

[Install]
WantedBy=multi-user.target
"""


CHECK_TIMER = f"""
echo "until $(cat {UNTIL_FILE} 2>/dev/null)"
sed -n 's/^USEC=/usec /p; s/^MODE=/mode /p' /run/systemd/shutdown/scheduled 2>/dev/null
[ ! -e /etc/systemd/system/multi-user.target.wants/cpuft-lease.service ] || echo "enabled yes"
"""
"""Shell script that prints what `parse_timer` reads: the end of the lease as an instance knows it, and as it is armed.

systemd writes `scheduled` for a shutdown that is to come, and removes it when that is cancelled.
"""
_INSTALL = """set -eu
put() {
    mkdir -p "${1%/*}"
    printf '%s\\n' "$2" >"$1.new"
    chmod "$3" "$1.new"
    mv -f "$1.new" "$1"
}
put "$1" "$2" 644
put "$3" "$4" 644
put "$5" "$6" 755
put "$7" "$8" 644
systemctl daemon-reload
systemctl enable "${7##*/}"
exec "$5"
"""


@dataclass(frozen=True)
class Timer:
    """The end of the lease of one instance, as it said itself."""

    until: int = 0
    """The end that it knows, in seconds of the epoch; 0 for none."""
    scheduled: int = 0
    """When it will power off; 0 when no power-off is scheduled."""
    enabled: bool = False
    """Whether the end is armed again after a reboot."""

    def find_fault(self, limit: int) -> str:
        """Why the instance would not end itself by `limit`; empty when it will."""
        if not self.scheduled:
            return "no shutdown is scheduled"
        if self.scheduled > limit:
            return f"its shutdown is scheduled for {format_time(self.scheduled)}"
        return "" if self.enabled else "a reboot would cancel its shutdown"


def parse_timer(text: str) -> Timer:
    """What `CHECK_TIMER` printed; what is missing there, or is no number, counts as not armed."""
    said = dict(line.partition(" ")[::2] for line in text.split("\n"))
    until, usec = said.get("until", "").strip(), said.get("usec", "").strip()
    armed = said.get("mode", "").strip() == "poweroff" and is_count(usec, most=10**18)
    return Timer(int(until) if is_count(until) else 0, int(usec) // 10**6 if armed else 0, "enabled" in said)


def make_arming(until: int, limit: int) -> tuple[str, ...]:
    """A command of an instance that installs and arms the end of its lease, whatever user data has done before."""
    files = (UNTIL_FILE, str(until), _LIMIT_FILE, str(limit), _ARM, ARM_SCRIPT, _UNIT_FILE, _UNIT)
    return ("sh", "-c", _INSTALL, "arm", *files)


def parse_lease(text: str, flag: str = "--lease") -> int:
    """Seconds of "90m", "4h" or "2d". Raises CpuftError."""
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not _LEAST <= seconds <= _MOST:
        raise CpuftError(f"{flag} {text!r:.60} is no lease: give 10m to 30d, such as 90m, 4h or 2d")
    return seconds


def parse_limit(text: str, lease: int) -> int:
    """Seconds to the limit of a lease of so many; empty for twice as many. Raises CpuftError."""
    limit = parse_lease(text, "--lease-limit") if text else min(2 * lease, _MOST)
    if limit < lease:
        raise CpuftError(f"--lease-limit {text} is less than the lease itself: give as much, or more")
    return limit


def format_time(seconds: float) -> str:
    """A time for people: in UTC, as this machine's clock may be anywhere."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def format_span(seconds: float) -> str:
    """`3 h 59 min`."""
    minutes = max(0, int(seconds)) // 60
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def format_user_data(until: int, limit: int) -> str:
    """What an instance is told at birth, but for its host key, which belongs right behind it.

    JSON is YAML: what is quoted so cannot end its line.
    """
    files = [
        {"path": UNTIL_FILE, "content": f"{until}\n"},
        {"path": _LIMIT_FILE, "content": f"{limit}\n"},
        {"path": _ARM, "content": ARM_SCRIPT, "permissions": "0755"},
        {"path": _UNIT_FILE, "content": _UNIT},
    ]
    arm = [["systemctl", "daemon-reload"], ["systemctl", "enable", "--now", "cpuft-lease.service"]]
    return (
        "#cloud-config\n"
        "disable_root: false\n"
        "ssh_deletekeys: true\n"
        f"write_files: {json.dumps(files)}\n"
        f"runcmd: {json.dumps(arm)}\n"
    )


def make_extension(until: int, limit: int) -> tuple[str, ...]:
    """A command of an instance that moves its end, and until when jobs may move that."""
    script = (
        'set -e; put() { echo "$2" >"$1.new"; mv "$1.new" "$1"; }; put "${3%/*}/limit" "$2"; put "$3" "$1"; exec "$4"'
    )
    return ("sh", "-c", script, "extend", str(until), str(limit), UNTIL_FILE, _ARM)
