"""A stand-in for EC2's metadata service, which announces interruptions of an instance."""

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
    """The status codes of its answers in order, of which the last one is repeated, and the requests so far."""

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
    """Serve these status codes on a free port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, text = metadata.answer(self.command, self.path, self.headers.get("X-aws-ec2-metadata-token", ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        metadata = Metadata(f"http://127.0.0.1:{server.server_port}{PATH}", list(answers))
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield metadata
        finally:
            server.shutdown()
            thread.join()
