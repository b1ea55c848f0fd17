"""Make, move and remove files of this machine, as steps of plans that every system can run.

Each role at the end of this file is a step: `python -IS local_files.py ROLE ARGUMENT...`, which needs the standard
library alone and starts in some milliseconds. Hosts have sh for this.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile


def write(path: str) -> None:
    """Replace a file, with mode 644, by standard input, so that readers see the old content or all of the new one."""
    # A new folder is writable by its owner only, because cpuft trusts no record in a folder that others can write to.
    os.umask(os.umask(0o022) | 0o022)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}.new")
    with open(f"{path}.new", "xb") as file:  # never through a link
        shutil.copyfileobj(sys.stdin.buffer, file)
    os.chmod(f"{path}.new", 0o644)
    os.replace(f"{path}.new", path)


def claim(folder: str, path: str, is_resumed: str) -> None:
    """Make a run's folder, which must be new unless it is resumed ("1"), and write standard input to `path` in it."""
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with contextlib.suppress(FileExistsError) if is_resumed == "1" else contextlib.nullcontext():
        os.mkdir(folder)
    with open(f"{path}.new", "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    os.replace(f"{path}.new", path)


def move(source: str, path: str) -> None:
    """Move a file, perhaps from another disk, so that its new name never stands for a part of it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=os.path.basename(path), dir=os.path.dirname(path)) as beside:
        shutil.move(source, f"{beside}/file")
        try:
            os.replace(f"{beside}/file", path)
        except OSError:
            shutil.move(f"{beside}/file", source)
            raise


def make_key(path: str, comment: str) -> None:
    """Make or replace an ed25519 key, `path` and `path`.pub."""
    os.umask(0o077)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for half in (path, f"{path}.pub"):  # ssh-keygen asks before it replaces a half-written key
        with contextlib.suppress(FileNotFoundError):
            os.unlink(half)
    sys.exit(subprocess.call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path]))


def remove_cluster(directory: str, *files: str) -> None:
    """Remove a cluster's files, and its directory last: the record in it is how a second attempt finds the rest.

    Folders around these that are empty then are removed, too. A link, a folder with the user's home in it and what is
    on another disk stay.
    """
    home, real = os.path.realpath(os.path.expanduser("~")), os.path.realpath(directory)
    if os.path.islink(directory) or f"{home}{os.sep}".startswith(os.path.join(real, "")):
        sys.exit(f"{directory} is a link or holds a home: it stays")
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(file))
    if os.path.lexists(directory):
        disk = os.lstat(os.path.dirname(directory)).st_dev
        for folder, _, _ in os.walk(directory):
            if os.lstat(folder).st_dev != disk:
                sys.exit(f"{folder} is on another disk: unmount it, and try again")
        shutil.rmtree(directory)
    above = os.path.dirname(directory)
    if above.replace(os.sep, "/").endswith("/cpuft/clusters"):  # go with the last cluster
        with contextlib.suppress(OSError):
            os.rmdir(above)
            os.rmdir(os.path.dirname(above))


ROLES = {one.__name__: one for one in (write, claim, move, make_key, remove_cluster)}

if __name__ == "__main__":
    try:
        ROLES[sys.argv[1]](*sys.argv[2:])
    except OSError as error:
        sys.exit(str(error))
