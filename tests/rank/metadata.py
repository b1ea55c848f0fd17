"""A stand-in for the service by which a host of EC2 learns that it is about to go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

PATH = "/latest/meta-data/spot/instance-action"
_TOKEN = "a token"


@dataclass
class Metadata:
    """What it will answer, in turn, and what it was asked; the last answer is given again and again."""

    url: str
    answers: list[int]
    asked: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, token: str) -> tuple[int, str]:
        self.asked.append(f"{method} {path}")
        if method == "PUT":
            return 200, _TOKEN
        if token != _TOKEN:
            return 401, ""
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0], '{"action": "terminate"}'


@contextmanager
def serve_metadata(*answers: int) -> Iterator[Metadata]:
    """Serve it on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, text = told.answer(self.command, self.path, self.headers.get("X-aws-ec2-metadata-token", ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        told = Metadata(f"http://127.0.0.1:{server.server_port}{PATH}", list(answers))
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield told
        finally:
            server.shutdown()
            thread.join()
