"""Does what cloud-init does on an instance with our user data: `first_boot.py init|final`.

Debian's images contain cloud-init, but the machines that run these tests may not, and instances have no network to
download it. This program does the same with the parts of a cloud-config that we use: `ssh_deletekeys`,
`ssh_genkeytypes`, `ssh`, `ssh_authorized_keys`, `disable_root`, `bootcmd` and `runcmd`, in cloud-init's order.
`bootcmd` runs at every boot, the others at the first boot, recognized by the instance-id of the metadata service.
Anything else is an error. The final stage ends with the public host keys on the console, as the module keys-to-console
writes them, if user data asks for that: images may be configured not to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

_SERVICE = "http://169.254.169.254/latest"
_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
_KNOWN = {"ssh_deletekeys", "ssh_genkeytypes", "ssh", "ssh_authorized_keys", "disable_root", "bootcmd", "runcmd"}
_NO_ROOT = (
    'no-port-forwarding,no-agent-forwarding,no-X11-forwarding,command="echo \'Please login as the user \\"debian\\" '
    'rather than the user \\"root\\".\';echo;sleep 10;exit 142" '
)
"""Prefix that cloud-init writes before root's authorized key, unless user data forbids it."""


def ask(path: str) -> str:
    """Return a response of the metadata service; empty without one."""
    token = urllib.request.Request(f"{_SERVICE}/api/token", headers={_TTL: "60"}, method="PUT")
    with urllib.request.urlopen(token, timeout=10) as answer:
        headers = {"X-aws-ec2-metadata-token": answer.read().decode()}
    request = urllib.request.Request(f"{_SERVICE}/{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError:
        return ""


def read_config() -> dict[str, Any]:
    """Return the cloud-config of the user data."""
    text = ask("user-data")
    if not text.startswith("#cloud-config\n"):
        return {}
    config = dict(yaml.safe_load(text) or {})
    if config.keys() - _KNOWN:
        sys.exit(f"user data has what instances of a bottle do not know: {sorted(config.keys() - _KNOWN)}")
    return config


def write(path: str, text: str, mode: int) -> None:
    """Write a file and make its folders."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)


def make_host_keys(config: dict[str, Any]) -> None:
    """Make the host keys that are missing."""
    if config.get("ssh_deletekeys", True):
        for path in Path("/etc/ssh").glob("ssh_host_*key*"):
            path.unlink()
    for kind in config.get("ssh_genkeytypes", ["rsa"]):
        if not (path := Path(f"/etc/ssh/ssh_host_{kind}_key")).exists():
            subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)], check=True)


def show_host_keys() -> None:
    """Write the public host keys to the console. An impostor answers at the address of an instance with other keys."""
    if os.environ["IMPOSTOR"]:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/run/another"], check=True)
    paths = [Path("/run/another.pub")] if os.environ["IMPOSTOR"] else sorted(Path("/etc/ssh").glob("ssh_host_*key.pub"))
    keys = "".join(path.read_text(encoding="utf-8") for path in paths)
    print(f"-----BEGIN SSH HOST KEY KEYS-----\n{keys}-----END SSH HOST KEY KEYS-----", file=sys.stderr)


def let_in(config: dict[str, Any]) -> None:
    """Authorize the keys of the user data."""
    file, prefix = Path("/root/.ssh/authorized_keys"), _NO_ROOT if config.get("disable_root", True) else ""
    had = file.read_text(encoding="utf-8") if file.exists() else ""
    lines = [f"{prefix}{key}\n" for key in config.get("ssh_authorized_keys", [])]
    file.parent.mkdir(mode=0o700, exist_ok=True)
    write(str(file), had + "".join(lines), 0o600)


def name_host() -> None:
    """Map the host's own name to a loopback address, as Debian's images do."""
    whole = ask("meta-data/local-hostname")
    name = whole.partition(".")[0]
    write("/etc/hostname", f"{name}\n", 0o644)
    write("/etc/hosts", f"127.0.1.1 {whole} {name}\n127.0.0.1 localhost\n::1 localhost\n", 0o644)


def run(commands: list[Any]) -> None:
    """Run each command of the user data, even after one has failed."""
    for one in commands:
        done = subprocess.run(one if isinstance(one, list) else ["sh", "-c", one], check=False)
        print(f"user data: {json.dumps(one)} -> {done.returncode}", file=sys.stderr)


def main(stage: str) -> None:
    """Run one stage of a boot."""
    config, instance = read_config(), Path("/var/lib/cloud/instances", ask("meta-data/instance-id"))
    instance.mkdir(parents=True, exist_ok=True)
    is_first = not (instance / stage).exists()
    if stage == "init":
        run(config.get("bootcmd", []))
    if stage == "init" and is_first:
        name_host()
        make_host_keys(config)
        let_in(config)
    if stage == "final" and is_first:
        if os.environ["BROKEN"] != "final":
            run(config.get("runcmd", []))
        if config.get("ssh", {}).get("emit_keys_to_console"):
            show_host_keys()
    (instance / stage).touch()


if __name__ == "__main__":
    main(sys.argv[1])
