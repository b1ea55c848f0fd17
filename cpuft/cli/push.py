"""`cpuft push RUN NAME`: upload the model of a run to the Hugging Face hub. Imports its client only to upload."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from cpuft.cli.common import find_model_folder, say
from cpuft.cli.options import CONFIG_FILE, Verb, complete_runs
from cpuft.errors import CpuftError, counted, requires
from cpuft.model_files import NORMALIZE_FOLDER, POOLING_FOLDER, SENTENCE_TRANSFORMERS_FILES, TOKENIZER_FILES
from cpuft.secret_variables import mask_secrets
from cpuft.serialization import load, parse_json

_FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "chat_template.jinja",
    *TOKENIZER_FILES,
    *SENTENCE_TRANSFORMERS_FILES,
)
"""Patterns of all files that are ever uploaded."""
_SECONDS = 60.0
"""Time in which the hub must accept a connection, and take or send the next bytes."""
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


@click.command(
    cls=Verb,
    params=[
        click.Option(
            ["--public"],
            is_flag=True,
            help="Let everybody see and download the model. Without it, a new repository is private, and a repository "
            "that is already public is refused",
        ),
        click.Option(["--dry-run"], is_flag=True, help="List the files that would be uploaded, and upload nothing"),
        CONFIG_FILE,
        click.Argument(["run"], metavar="RUN", shell_complete=complete_runs),
        click.Argument(["name"], metavar="NAME"),
    ],
)
def push(run: str, name: str, public: bool, dry_run: bool, config: str) -> None:
    """Upload the model of a finished run to the Hugging Face hub.

    RUN is the folder of the run, and NAME the repository on the hub, such as my-team/my-model, which is made if
    necessary. Only the model, its tokenizer, its configuration and its model card are uploaded: no examples, no
    prepared data and no record. The files are listed first. The token is the one of `hf auth login` or of the variable
    HF_TOKEN. HF_ENDPOINT names another hub.
    """
    folder = find_model_folder(run)
    files, others = _list_upload(folder)
    _check_base_model(folder)
    say(f"{counted(len(files), 'file')} of {folder} for {name} ({'public' if public else 'private'}):")
    width = max(map(len, files))
    for file in files:
        say(f"  {file:<{width}}  {(folder / file).stat().st_size:>14,} bytes")
    if others:
        say(f"not uploaded: {', '.join(others)}")
    if not dry_run:
        click.echo(f"uploaded: {_upload_files(folder, files, name, public)}")


def _list_upload(folder: Path) -> tuple[list[str], list[str]]:
    """Return which files of a model's folder are uploaded, regular ones with the names of _FILES, and the others."""
    paths, here = list[Path](), folder.resolve()
    for path in sorted(folder.iterdir()):
        # is_symlink is False for a junction of Windows, which leads elsewhere as a link does
        is_own = path.is_dir() and path.resolve() == here / path.name
        has_settings = is_own and path.name in (POOLING_FOLDER, NORMALIZE_FOLDER)
        paths += sorted(path.iterdir()) if has_settings else [path]
    regular = {path.relative_to(folder).as_posix(): path.is_file() and not path.is_symlink() for path in paths}
    names = list(regular)
    files = [name for name in names if regular[name] and any(fnmatchcase(name, one) for one in _FILES)]
    if not any(name.endswith(".safetensors") for name in files):
        raise CpuftError(f"{folder} holds no weights (*.safetensors): give the folder of a finished run")
    return files, [name for name in names if name not in files]


def _check_base_model(folder: Path) -> None:
    """Raise CpuftError if the folder holds adapters for a base model in a local folder, which nobody else can load."""
    path = folder / "adapter_config.json"
    if not path.exists():
        return
    try:
        base = str(load(dict[str, Any], parse_json(path.read_text(encoding="utf-8")))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError):
        raise CpuftError(f"{path} does not name the base model of the adapters: write its name there") from None
    if base.startswith((".", "/", "~")) or base.count("/") > 1 or Path(base).exists():
        raise CpuftError(
            f"the adapters in {folder} are for a base model in the folder {base}, which nobody else can load: train "
            f"with --lora-merge, which saves the whole model, or with a --model of the hub"
        )


def _upload_files(folder: Path, files: list[str], name: str, public: bool) -> str:
    """Make the repository if necessary, upload the files in one commit, and return the address of the model."""
    with requires("hub", "cpuft push needs huggingface_hub, which is not installed"):
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session
    token = huggingface_hub.get_token()
    if not token:
        raise CpuftError(f"there is no token for the Hugging Face hub: {_LOG_IN}")
    get_session().timeout = _SECONDS  # the client of the hub waits without a limit
    hub, address = huggingface_hub.HfApi(token=token), mask_secrets(constants.ENDPOINT, os.environ, token)
    try:
        repository = hub.create_repo(name, private=not public, exist_ok=True).repo_id
        if not public and not hub.repo_info(repository).private:
            raise CpuftError(
                f"{name} is public on the hub: add --public to upload the model for everybody, or give another name"
            )
        additions = [huggingface_hub.CommitOperationAdd(file, folder / file) for file in files]
        hub.create_commit(repository, additions, commit_message="Upload a model trained with cpuft")
    except CpuftError:
        raise
    except Exception as error:  # the client, its HTTP library and its uploader raise errors of many classes
        reason = mask_secrets(" ".join(str(error).split()) or type(error).__name__, os.environ, token)[:200]
        raise CpuftError(
            f"the upload of {name!r:.100} to {address} failed ({reason}): check the name (OWNER/NAME), the network and "
            f"the proxy settings, or {_LOG_IN} to it"
        ) from None
    return f"{address}/{repository}"
