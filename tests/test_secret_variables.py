"""Which of the user's variables are secret, and that messages do not show them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.secret_variables import SECRETS_PREFIX, mask_secrets, may_be_secret, secrets_for_ranks, take_secrets


@pytest.mark.parametrize(
    "name, value, secret",
    [
        *(
            (name, "x", True)
            for name in ("HF_API_KEY", "OPENAI_API_KEY", "hf_token", "AWS_SECRET_ACCESS_KEY", "DB_PASS")
        ),
        *((name, "x", True) for name in ("PGPASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "FI_AUTH_KEY", "MYSQL_PWD")),
        ("https_proxy", "http://me:word@proxy:3128", True),
        ("https_proxy", "http://token@proxy:3128", True),
        ("https_proxy", "http://proxy:3128/a@b", False),
        *(("HF_ENDPOINT", f"https://{place}", False) for place in ("hub.example", "10.0.0.1:8080/", "hub-2.example/")),
        *(("HF_ENDPOINT", f"https://{place}", True) for place in ("t@hub", "hub/api/t", "hub?token=t", "u:p@hub:8080")),
        *((name, "x", False) for name in ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "UCX_IB_PKEY", "PWD", "OLDPWD")),
        *((name, "x", False) for name in ("SSH_AUTH_SOCK", "CPUFT_RUN_KEY", "PATH", "HF_HOME", "I_MPI_PIN_DOMAIN")),
    ],
)
def test_what_may_be_secret(name: str, value: str, secret: bool) -> None:
    assert may_be_secret(name, value) == secret


def test_ranks_on_other_hosts_get_only_the_secrets_that_training_needs() -> None:
    needed = {"HF_TOKEN": "a", "https_proxy": "http://me:word@proxy", "HF_ENDPOINT": "https://token@hub"}
    assert secrets_for_ranks(needed | {"OPENAI_API_KEY": "b", "HTTP_PROXY": "http://proxy", "HOME": "/"}) == needed


@pytest.mark.parametrize(
    "text, shown",
    [
        ("no answer of https://me:pass@hub.example:80/x", "no answer of https://***@hub.example:80/x"),
        ("https://me:p@ss@hub and 'http://token@proxy'", "https://***@hub and 'http://***@proxy'"),
        ("http://hub/a@b, sqlite:////home/me, me@hub", "http://hub/a@b, sqlite:////home/me, me@hub"),
        ("hf_abc was refused: log-in, hf_abcdef", "*** was refused: log-in, ***"),
        ("https://mirror/api/word is down", "*** is down"),
    ],
)
def test_a_message_shows_no_secrets(text: str, shown: str) -> None:
    environ = {"HF_TOKEN": "hf_abc", "WANDB_API_KEY": "", "HF_ENDPOINT": "https://mirror/api/word", "EDITOR": "log-in"}
    assert mask_secrets(text, environ, "hf_abcdef", "") == shown


@pytest.mark.parametrize("text", ["", "{", "[]", '{"A": 1}', "[" * 100_000, "\xff"])
def test_damaged_variables_are_refused_without_their_content(text: str, tmp_path: Path) -> None:
    (tmp_path / "sent-0").write_text(text, encoding="latin-1")
    said = (
        r"sent-0, which passes secret variables to this process, is not a JSON object of texts \(\w+\): start the run"
    )
    with pytest.raises(CpuftError, match=said):
        take_secrets({SECRETS_PREFIX: str(tmp_path / "sent")}, "0")
    assert not (tmp_path / "sent-0").exists()


def test_variables_are_not_waited_for_at_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "sent-0")
    assert take_secrets({SECRETS_PREFIX: str(tmp_path / "sent")}, "0") == {}
    (tmp_path / "sent-1").write_text('{"A": "b"}')
    assert take_secrets({SECRETS_PREFIX: str(tmp_path / "sent")}, "1") == {"A": "b"}
