"""The lease of rented instances: they terminate themselves when it ends, even if nobody is connected. Pure.

Each instance keeps the end of its lease in a file, schedules its own shutdown for that time, and was started in such a
way that shutting down terminates it. A running job extends the lease as far as a second file allows.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

from cpuft.errors import CpuftError
from cpuft.serialization import is_count

UNTIL_FILE = "/var/lib/cpuft/until"
"""On every instance: the end of its lease, in seconds since the epoch."""
_LIMIT_FILE = "/var/lib/cpuft/limit"
"""On every instance: the time to which a running job may extend the lease."""
_ARM = "/usr/local/sbin/cpuft-lease"
RENEW_COMMAND = f"{_ARM} renew"
"""A running job extends the lease by this command, which prints the new end of the lease and its limit."""
_RENEWED_SECONDS = 900
"""How far from now a renewal moves the end of the lease. Jobs renew every five minutes."""
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_SHORTEST, _LONGEST = 600, 30 * 86400

ARM_SCRIPT = f"""#!/bin/sh
# cpuft-lease [renew]: schedules the shutdown at the end of the lease. With `renew` it first extends the lease, as far
# as the limit allows, and prints the end of the lease and the limit.
until=$(cat {UNTIL_FILE}) now=$(date +%s)
if [ "${{1:-}}" = renew ]; then
    limit=$(cat {_LIMIT_FILE} 2>/dev/null || echo "$until")
    wanted=$(( now + {_RENEWED_SECONDS} < limit ? now + {_RENEWED_SECONDS} : limit ))
    [ "$wanted" -gt "$until" ] || {{ echo "$until $limit"; exit 0; }}
    echo "$wanted" >{UNTIL_FILE}.new && mv {UNTIL_FILE}.new {UNTIL_FILE} || exit 1
    until=$wanted
    echo "$until $limit"
fi
# `shutdown` takes whole minutes: rounding down makes the instance terminate before its lease ends, never after it.
left=$(( (until - now) / 60 ))
shutdown -c 2>/dev/null
[ "$left" -gt 0 ] || exec shutdown -P now
exec shutdown -P "+$left"
"""
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
"""Prints what `parse_timer` reads. systemd's file `scheduled` exists only while a shutdown is scheduled."""
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
    """What one instance says about the end of its lease."""

    until: int = 0
    """In seconds since the epoch; 0 if the instance does not know the end."""
    scheduled: int = 0
    """When it will shut down, in seconds since the epoch; 0 if no shutdown is scheduled."""
    enabled: bool = False
    """Whether the shutdown is scheduled again after a reboot."""

    def find_fault(self, limit: int) -> str:
        """Return the first reason why the instance would not terminate itself by `limit`; "" if it will."""
        if not self.scheduled:
            return "no shutdown is scheduled"
        if self.scheduled > limit:
            return f"its shutdown is scheduled for {format_time(self.scheduled)}"
        return "" if self.enabled else "a reboot would cancel its shutdown"


def parse_timer(text: str) -> Timer:
    """Parse what `CHECK_TIMER` printed; without a valid line, a value is 0. A scheduled reboot does not count."""
    values = dict(line.partition(" ")[::2] for line in text.split("\n"))
    until, usec = values.get("until", "").strip(), values.get("usec", "").strip()
    is_scheduled = values.get("mode", "").strip() == "poweroff" and is_count(usec, most=10**18)
    return Timer(int(until) if is_count(until) else 0, int(usec) // 10**6 if is_scheduled else 0, "enabled" in values)


def make_schedule_command(until: int, limit: int) -> tuple[str, ...]:
    """Return a command that installs both times (seconds since the epoch) on an instance and plans its shutdown."""
    files = (UNTIL_FILE, str(until), _LIMIT_FILE, str(limit), _ARM, ARM_SCRIPT, _UNIT_FILE, _UNIT)
    return ("sh", "-c", _INSTALL, "arm", *files)


def parse_lease(text: str, flag: str = "--lease") -> int:
    """Return the seconds of "90m", "4h" or "2d". Raises CpuftError, which names `flag`: not a time of 10m to 30d."""
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not _SHORTEST <= seconds <= _LONGEST:
        raise CpuftError(f"{flag} {text!r:.60} is not a valid time: give 10m to 30d, such as 90m, 4h or 2d")
    return seconds


def parse_limit(text: str, lease: int) -> int:
    """Return the seconds of --lease-limit; for "" twice the `lease`, at most 30 days. CpuftError: less than `lease`."""
    limit = parse_lease(text, "--lease-limit") if text else min(2 * lease, _LONGEST)
    if limit < lease:
        raise CpuftError(f"--lease-limit {text} is less than --lease: give at least the time of the lease")
    return limit


def format_time(seconds: float) -> str:
    """Return a time, in seconds since the epoch, in UTC: `2027-01-15 10:00 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def format_span(seconds: float) -> str:
    """Return a duration in hours and minutes: `3 h 59 min`; below an hour `59 min`, and `0 min` for a negative one."""
    minutes = max(0, int(seconds)) // 60
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def format_user_data(until: int, limit: int, public_key: str) -> str:
    """Return the user data of an instance for cloud-init: its lease, its kind of host key, and the key that logs in."""
    # JSON is valid YAML, and no value that is written as JSON can end its line.
    return (
        "#cloud-config\n"
        "disable_root: false\n"
        "ssh_deletekeys: true\n"
        "ssh_genkeytypes: [ed25519]\n"
        "ssh: {emit_keys_to_console: true}\n"
        f"ssh_authorized_keys: {json.dumps([public_key])}\n"
        f"runcmd: {json.dumps([make_schedule_command(until, limit)])}\n"
    )
