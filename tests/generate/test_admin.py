"""`examples/generate/serve.py` with adapters: its options, and the path of the administration over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from chosen import ROOT, SEARCHED
from options import admin_key_of
from serving import RANDOM, Serving, chat, serving
from text import SMOLLM2, InputError

pytest.importorskip("safetensors", reason="pip install '.[adapters]'")
pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux"),
    pytest.mark.timeout(120),
    pytest.mark.xdist_group("generate"),
]
from test_adapters import write  # noqa: E402  # which needs the package

PATH = "/admin/adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    write(made / "one.safetensors", 1, config=attrs.evolve(SMOLLM2, layers=1))
    return made


def ask(service: Serving, method: str, body: Any = None, key: str = "admin") -> tuple[int, Any]:
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
    with service.send(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content) as sock:
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])


def text_of(client: Any) -> str:
    found: str = chat(client, max_tokens=30).choices[0].message.content
    return found


def test_a_swap_between_two_tokens(folder: Path) -> None:
    options = (*RANDOM, "--exact", "--sequences", "4", "--adapters", str(folder))
    with serving(*options, GENERATE_ADMIN_KEY="admin", GENERATE_KEYS="client") as service:
        client = service.client("client")
        plain = text_of(client)
        stream = iter(chat(client, max_tokens=30, stream=True))
        begun = [next(stream), next(stream)]
        assert ask(service, "POST", {"adapter": "one.safetensors"})[0] == 200
        # The begun text has the old weights, and the next one the new ones.
        adapted = text_of(service.client("client"))
        parts = [*begun, *stream]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == plain
        assert adapted != plain
        for key in ("client", "", "none"):
            assert ask(service, "DELETE", key=key)[0] == 401
        # A client that leaves in the middle of its request has done nothing.
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer admin\r\nContent-Length: 30\r\n\r\n"
        service.send(f'{head}{{"adapter": "none"'.encode()).close()
        assert ask(service, "POST", {"adapter": "none"})[0] == 404
        assert ask(service, "GET")[1]["adapter"] == "one.safetensors"
        assert text_of(client) == adapted
        assert ask(service, "DELETE")[1]["adapter"] is None
        assert text_of(client) == plain
        service.close_clients()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(40) == 0


@pytest.mark.slow
def test_texts_of_an_adapter_under_faults(folder: Path) -> None:
    options = (*RANDOM, "--adapter", str(folder / "one.safetensors"), "--faults", "0.5")
    with serving(*options, GENERATE_ADMIN_KEY="admin") as service:
        assert service.process.stdout is not None
        assert ", 0 wrong, " in service.process.stdout.readline()
        status, found = ask(service, "DELETE")
        assert (status, found["error"]["code"]) == (409, "faults")
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(40) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none.safetensors", "bad.safetensors"])
def test_an_adapter_that_the_service_cannot_begin_with(tmp_path: Path, name: str) -> None:
    (tmp_path / "bad.safetensors").write_text("no adapter")
    program = str(ROOT / "examples" / "generate" / "serve.py")
    done = subprocess.run(
        [sys.executable, program, "--port", "0", *RANDOM, "--adapter", str(tmp_path / name)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SEARCHED},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    says = (
        "there is no adapter 'none.safetensors'" if "none" in name else "the adapter bad.safetensors cannot"
    )
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_of_the_administration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GENERATE_ADMIN_KEY", raising=False)
    assert admin_key_of(None, {}) is None
    monkeypatch.setenv("GENERATE_ADMIN_KEY", " secret ")
    assert admin_key_of(None, {"client": 1.0}) == "secret"
    path = tmp_path / "key"
    path.write_text("other\n")
    assert admin_key_of(path, {}) == "other"
    for text, keys in (("", {}), ("\n \n", {}), ("a\nb", {}), ("gold", {"gold": 3.0}), ("schlüssel", {})):
        path.write_text(text)
        with pytest.raises(InputError, match=r"administration key|must have only ASCII"):
            admin_key_of(path, keys)
