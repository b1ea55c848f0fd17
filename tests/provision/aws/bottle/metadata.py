"""The metadata service of instances, version 2. It recognizes instances by their addresses."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.provision.aws.bottle.machines import METADATA

_ROOT = "/latest/"
_TOKENS: set[str] = set()


def describe(instance: Any, notice: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of an instance of moto, by path; the interruption notice only if there is one."""
    told = {
        "ami-id": instance.image_id,
        "hostname": instance.private_dns_name,
        "instance-id": instance.id,
        "instance-life-cycle": instance.lifecycle or "on-demand",
        "instance-type": instance.instance_type,
        "local-hostname": instance.private_dns_name,
        "local-ipv4": instance.private_ip,
        "placement/availability-zone": instance.availability_zone,
        "placement/region": instance.region_name,
    }
    told |= {"public-ipv4": instance.public_ip} if instance.public_ip else {}
    if notice:
        told |= {"spot/instance-action": json.dumps(notice), "spot/termination-time": notice["time"]}
    paths = {f"meta-data/{path}": text for path, text in told.items()}
    if instance.user_data:
        paths["user-data"] = base64.b64decode(str(instance.user_data)).decode()
    return paths


def find(paths: Mapping[str, str], path: str) -> str | None:
    """Return the text at a path, or the names below it."""
    folder = f"{path.rstrip('/')}/" if path else ""
    below = [one.removeprefix(folder).partition("/") for one in paths if one.startswith(folder)]
    return paths.get(path, "\n".join(sorted({name + slash for name, slash, _ in below})) or None)


class Service(ThreadingHTTPServer):
    """Serves the metadata of the instance that `look` finds for the address of a request."""

    daemon_threads = True

    def __init__(self, look: Any) -> None:
        super().__init__((METADATA, 80), _Handler)
        self.look = look


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        if self.path != f"{_ROOT}api/token" or "X-aws-ec2-metadata-token-ttl-seconds" not in self.headers:
            self._answer(400)
            return
        token = os.urandom(16).hex()
        _TOKENS.add(token)
        self._answer(200, token)

    def do_GET(self) -> None:
        found = self.server.look(self.client_address[0])
        if not found:
            self._answer(404)
            return
        instance, notice = found
        known = self.headers.get("X-aws-ec2-metadata-token") in _TOKENS
        if not known and instance.metadata_options.http_tokens == "required":
            self._answer(401)
            return
        text = find(describe(instance, notice), self.path.removeprefix(_ROOT))
        self._answer(404 if text is None else 200, text or "")

    def _answer(self, status: int, text: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Discard log lines."""
