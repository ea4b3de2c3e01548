"""The service of `examples/generate` in a process of its own, and its clients."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import IO, Any

import attrs
import pytest
from chosen import ROOT, SEARCHED

for name in ("tokenizers", "jinja2", "llguidance", "pydantic", "hypercorn", "starlette", "prometheus_client"):
    pytest.importorskip(name, reason="pip install '.[generate,http,metrics]'")
openai: Any = pytest.importorskip("openai", reason="pip install openai")

HELLO = [{"role": "user", "content": "Hello"}]
RANDOM = ("--random-weights", "--layers", "1", "--pages", "300")


@attrs.frozen
class Serving:
    process: subprocess.Popen[str]
    port: int
    clients: list[Any] = attrs.field(factory=list[Any])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", timeout: float = 60.0) -> Any:
        options = {"max_retries": 0, "timeout": timeout}
        self.clients.append(openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options))
        return self.clients[-1]

    def close_clients(self) -> None:
        while self.clients:
            self.clients.pop().close()

    def send(self, data: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        sock.sendall(data)
        return sock

    def get(self, path: str) -> str:
        with self.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()) as sock:
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        return answer.decode().partition("\r\n\r\n")[2]

    def pages(self) -> int:
        found = re.search(r"^trio_accel_pages_used\{.*\} (\d+)\.0$", self.get("/metrics"), re.MULTILINE)
        assert found is not None
        return int(found[1])


@contextmanager
def serving(*options: str, stderr: IO[str] | None = None, **environment: str) -> Generator[Serving]:
    command = (sys.executable, str(ROOT / "examples" / "generate" / "serve.py"), "--port", "0", *options)
    more = {"PYTHONPATH": SEARCHED, "OPENBLAS_NUM_THREADS": "1", **environment}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **more}
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", line)
            assert found is not None, (line, process.wait(10))
            running = Serving(process, int(found[1]))
            yield running
            running.close_clients()
        finally:
            process.kill()


def chat(client: Any, messages: Any = HELLO, **options: Any) -> Any:
    given = {"model": "random", "max_tokens": 8, "temperature": 0, **options}
    return client.chat.completions.create(messages=messages, **given)


def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def post(service: Serving, path: str, body: str | bytes) -> tuple[int, Any]:
    content = body.encode() if isinstance(body, str) else body
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    with service.send(head.encode() + content) as sock:
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])
