"""Environment variables that hold passwords and tokens: which ones ranks get and how, messages without their values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import open_regular
from cpuft.serialization import load, parse_json

OWN_PREFIX = "CPUFT_"
"""Prefix of the variables that cpuft itself sets."""
SECRETS_PREFIX = "CPUFT_SENT"
"""Environment variable with the path prefix of the files that pass secret variables to this host's processes."""
_FOR_RANKS = {
    *("ALL_PROXY", "HF_ENDPOINT", "HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY"),
    *("HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
}
"""Secret variables that training may need, so that other hosts get them. The URL of a proxy may hold a password."""
# UCX_IB_PKEY and similar names are not secret: they number a partition of the network.
_SECRET_NAME = re.compile(
    r"(?<!_P)KEY|TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|(^|_)(PASS|PAT|PWD)(_|$)|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.I
)
# In a URL, a token may replace the user name, without a password.
_SECRET_VALUE = re.compile(r"://[^/\s]*@")
_PLAIN_ENDPOINT = re.compile(r"(https?://)?[\w.-]+(:[0-9]+)?/?", re.ASCII)
_PLACES = {"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY"}


def may_be_secret(name: str, value: str) -> bool:
    """Return whether a variable may be secret: by its name, such as API_KEY or DB_PASSWORD, or a URL with a password or
    token as value. PWD, OLDPWD, SSH_AUTH_SOCK, XAUTHORITY and CPUFT_* never are; HF_ENDPOINT is if it has a path.
    """
    if name in _PLACES or name.startswith(OWN_PREFIX):
        return False
    if name == "HF_ENDPOINT" and not _PLAIN_ENDPOINT.fullmatch(value):
        return True  # some mirrors take a token as a part of the path
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def secrets_for_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on other hosts get as secrets: those of HF_TOKEN, HUGGING_FACE_HUB_TOKEN,
    HF_ENDPOINT, WANDB_API_KEY, three of MLflow and the proxies', also in small letters, that `may_be_secret`.
    """
    return {name: value for name, value in environ.items() if name.upper() in _FOR_RANKS and may_be_secret(name, value)}


def mask_secrets(text: str, environ: Mapping[str, str], *others: str) -> str:
    """Return a text with *** for what is before the @ of URLs, the values of `secrets_for_ranks`, and `others`."""
    text = _SECRET_VALUE.sub("://***@", text)
    # Longer values first, because a shorter one may be a part of them.
    for value in sorted({*secrets_for_ranks(environ).values(), *others} - {""}, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def take_secrets(environ: Mapping[str, str], process: str) -> dict[str, str]:
    """Return the secret variables that the launcher has sent to one process of this host, and remove their file. {} if
    the file `$CPUFT_SENT-PROCESS` cannot be opened, as for a printed plan that is run by hand, or if another user owns
    it. Raises CpuftError: the file is damaged.
    """
    path = f"{environ.get(SECRETS_PREFIX) or '/nowhere'}-{process}"
    try:
        with os.fdopen(open_regular(Path(path), os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                os.unlink(path)
                return load(dict[str, str], parse_json(file.read()), "it")
    except OSError:
        pass
    except ValueError as error:
        # The message does not quote the file, which holds secrets.
        problem = f"is not a JSON object of texts ({type(error).__name__})"
        raise CpuftError(
            f"{path}, which passes secret variables to this process, {problem}: start the run again"
        ) from None
    return {}
