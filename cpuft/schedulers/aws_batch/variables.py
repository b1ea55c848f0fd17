"""What AWS Batch tells a node of a multi-node job, and the keys that all its nodes make of the job's secret.

Source of the variables: the user guide of AWS Batch, "Multi-node parallel job environment variables".
"""

from __future__ import annotations

import hmac
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from cpuft.config import is_count
from cpuft.errors import CpuftError
from cpuft.files import hash_text

TOKEN = "CPUFT_BATCH_TOKEN"
"""The job's secret, which Batch fetches from Secrets Manager."""
SECONDS = "CPUFT_MEET_SECONDS"
"""Within which all nodes must have met: an image of some GB may still be on its way to the last one."""
_SECONDS, _DAY = "600", 86400
_NUMBERS = ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_MAIN_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES")
_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_JOB = "AWS_BATCH_JOB_ID"
_LEAST_LETTERS = 32


@dataclass(frozen=True)
class Node:
    """A node's place in its job."""

    job: str
    index: int
    main: int
    count: int
    address: str
    """Of the main node, which Batch does not tell itself."""
    seconds: int
    token: str = field(repr=False)


def parse_node(environ: Mapping[str, str]) -> Node:
    """A node's place. Raises CpuftError: variables are missing or contradict each other, or there is no token."""
    said = ", ".join(f"{name}={environ.get(name, '')[:40]!r}" for name in _NUMBERS)
    # A node's own name is the job's with its index behind.
    job, texts = environ.get(_JOB, "").partition("#")[0], [environ.get(name, "") for name in _NUMBERS]
    if not job or not all(is_count(text, 0, 99_999) for text in texts):
        raise CpuftError(f"this is no node of a multi-node job of AWS Batch ({said}): start it by cpuft submit batch")
    index, main, count = map(int, texts)
    if max(index, main) >= count:
        raise CpuftError(f"Batch's variables contradict each other ({said}): see which of them the job sets itself")
    address, token, seconds = environ.get(_ADDRESS, ""), environ.get(TOKEN, ""), environ.get(SECONDS, _SECONDS)
    if not _is_address(address) if address else index != main:
        raise CpuftError(f"{_ADDRESS}={address[:40]!r} is no address of a main node: leave it to Batch")
    if count > 1 and len(token) < _LEAST_LETTERS:
        what = "is too short a secret" if token else "is not set"
        raise CpuftError(f"{TOKEN} {what}: give cpuft submit batch --secret one of {_LEAST_LETTERS} characters or more")
    if not is_count(seconds, most=_DAY):
        raise CpuftError(f"{SECONDS}={seconds[:40]!r}: give whole seconds, {_DAY} at most")
    return Node(job, index, main, count, address, int(seconds), token)


def _is_address(text: str) -> bool:
    try:
        return not IPv4Address(text).is_unspecified
    except ValueError:
        return False


def passing(text: str) -> CpuftError:
    """An error for which no input is to blame: another attempt may do."""
    error = CpuftError(text)
    error.passes = True
    return error


def choose_address(interfaces: Mapping[str, str], routed: str) -> str:
    """Where the main node listens: its one address of a network of its own; of several `routed`, by which it reaches
    others. Containers have one of 169.254.0.0/16 beside it, by which they ask for their role.

    Raises CpuftError: there is none.
    """
    own = [one for one in interfaces.values() if not (IPv4Address(one).is_loopback or IPv4Address(one).is_link_local)]
    if routed in own or len(own) == 1:
        return routed if routed in own else own[0]
    said = ", ".join(f"{name} {address}" for name, address in sorted(interfaces.items()))
    raise CpuftError(f"the main node cannot tell its address among {said}: give the job a network mode of awsvpc")


class Keys:
    """A server's key and its clients' (ed25519): the same on all nodes of a job, and others in other jobs."""

    def __init__(self, node: Node) -> None:
        import paramiko

        made = [_make_key(node, role) for role in ("server", "client", "mark")]
        self.server, self.client, mark = (paramiko.Ed25519Key(file_obj=io.StringIO(text)) for text in made)
        self.client_file = made[1]
        """The client's private key, for ssh."""
        self.server_line = f"{self.server.get_name()} {self.server.get_base64()}"
        """The server's public key."""
        self.mark = f".cpuft-{hash_text(mark.get_base64(), 16)}"
        """A file of the main node's: who sees it works in the same folder."""


def _make_key(node: Node, role: str) -> str:
    """A private key in OpenSSH's form."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    words = f"cpuft {role} {node.job}".encode(errors="surrogateescape")
    seed = hmac.digest(node.token.encode(errors="surrogateescape"), words, "sha256")
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    return Ed25519PrivateKey.from_private_bytes(seed).private_bytes(*form).decode()
