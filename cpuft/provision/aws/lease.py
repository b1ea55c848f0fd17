"""The lease of rented instances: they terminate themselves when it ends, even if nobody is connected. Pure.

Each instance keeps the end of its lease in a file, schedules its own shutdown for that time, and was started in such a
way that shutting down terminates it. A running job extends the lease as far as a second file allows.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.serialization import is_count

RENEW_COMMAND = "/usr/local/sbin/cpuft-lease renew"
"""A running job extends the lease by this command, which prints the new end of the lease and its limit."""
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_SHORTEST, _LONGEST = 600, 30 * 86400
_HERE = Path(__file__)
ARM_SCRIPT = _HERE.with_name("lease_arm.sh").read_text(encoding="utf-8")
CHECK_TIMER = _HERE.with_name("lease_print.sh").read_text(encoding="utf-8")
"""Prints what `parse_timer` reads."""
_INSTALL = _HERE.with_name("lease_install.sh").read_text(encoding="utf-8")


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
        """Return why the instance would not terminate itself by `limit` (seconds since the epoch); "" if it will."""
        if not self.scheduled:
            return "no shutdown is scheduled"
        if self.scheduled > limit:
            return f"its shutdown is scheduled for {format_time(self.scheduled)}"
        return "" if self.enabled else "a reboot would cancel its shutdown"


def parse_timer(text: str) -> Timer:
    """Parse the lines "until SECONDS", "usec MICROSECONDS", "mode MODE" and "enabled" that `CHECK_TIMER` prints.

    A time is 0 without a valid line, and the shutdown's is 0 unless the mode is poweroff.
    """
    values = dict(line.partition(" ")[::2] for line in text.split("\n"))
    until, usec = values.get("until", "").strip(), values.get("usec", "").strip()
    is_scheduled = values.get("mode", "").strip() == "poweroff" and is_count(usec, most=10**18)
    return Timer(int(until) if is_count(until) else 0, int(usec) // 10**6 if is_scheduled else 0, "enabled" in values)


def make_schedule_command(until: int, limit: int) -> tuple[str, ...]:
    """Return a command for an instance (as root) that notes the end of its lease, `until`, and the `limit` to which
    jobs can extend it (seconds since the epoch), and schedules its shutdown for `until`, at once if that is past.
    """
    return ("sh", "-c", _INSTALL, "arm", str(until), str(limit), ARM_SCRIPT)


def parse_lease(text: str, flag: str = "--lease") -> int:
    """Return the seconds of "90m", "4h" or "2d". Raises CpuftError, which names `flag`: not a time of 10m to 30d."""
    match = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not _SHORTEST <= seconds <= _LONGEST:
        raise CpuftError(f"{flag} {text!r:.60} is not a valid time: give 10m to 30d, such as 90m, 4h or 2d")
    return seconds


def parse_limit(text: str, lease: int) -> int:
    """Return the seconds of a --lease-limit such as "8h" (see `parse_lease`), for "" twice `lease` (in seconds) up to
    30 days. CpuftError: not valid, or below `lease`.
    """
    limit = parse_lease(text, "--lease-limit") if text else min(2 * lease, _LONGEST)
    if limit < lease:
        raise CpuftError(f"--lease-limit {text} is less than --lease: give at least the time of the lease")
    return limit


def format_time(seconds: float) -> str:
    """Return a time, in seconds since the epoch, in UTC: `2027-01-15 10:00 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def format_span(seconds: float) -> str:
    """Return a duration in hours and minutes: `3 h 05 min`; below an hour `5 min`, and `0 min` for a negative one."""
    minutes = max(0, int(seconds)) // 60
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def format_user_data(until: int, limit: int, public_key: str) -> str:
    """Return user data for cloud-init: the end of the lease and its limit (in seconds since the epoch), the kind of
    host key, and the key that logs in.
    """
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
