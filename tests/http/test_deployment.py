"""The files of the page on deployment, given to the programs that read them: nginx, systemd, a client."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(sys.platform != "linux", reason="the page is for Linux"),
]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/deploy.md").read_text(encoding="utf-8")
CADDY = shutil.which("caddy")
NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


def block(language: str, begin: str = "") -> str:
    """Return the first block of code in a language, with such a beginning."""
    found = re.findall(rf"^```{language}\n({begin}.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(found[0])


@contextmanager
def serving(arguments: list[str], **popen: object) -> Iterator[int]:
    """Run a service, and yield its port."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **popen) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout is not None
            line: str = process.stdout.readline()
            yield int(re.findall(r"[0-9]+", line)[-1])
        finally:
            process.terminate()
            process.wait(20)


def of_the_image() -> tuple[list[str], list[str]]:
    """Return the packages that the container installs, and the arguments of its program."""
    text = block("dockerfile")
    [installs] = re.findall(r"^RUN pip install (.*)$", text, re.MULTILINE)
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    python, *arguments = json.loads(entry)
    assert python == "python"
    return installs.replace("'", "").split(), [part.replace("/app", str(ROOT)) for part in arguments]


def test_the_container_has_the_packages_that_its_program_imports() -> None:
    packages, [program, *_] = of_the_image()
    imported = re.findall(r"^(?:from|import) (\w+)", Path(program).read_text(encoding="utf-8"), re.MULTILINE)
    others = {*imported} - sys.stdlib_module_names - {"numpy", "trio", "trio_accel", "pydantic"}
    assert others == {"fastapi"}  # which brings pydantic
    assert {"/app[http]", *others} <= {*packages}


def test_the_program_of_the_container_listens_on_all_addresses() -> None:
    _, arguments = of_the_image()
    with serving([*arguments, "--port", "0"]) as port:
        # Another address of this machine than the default address of programs.
        socket.create_connection(("127.0.0.2", port), 5).close()


def test_the_image_gets_neither_history_nor_environments() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    assert {".git", ".venv*", ".env*"} <= {*ignored.split()}
    assert ignored in PAGE


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_publishes_the_service_without_its_probes(tmp_path: Path) -> None:
    with serving([str(ROOT / "examples/serve_a_model.py"), "--port", "0"]) as port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            front: int = free.getsockname()[1]
        text = block("nginx").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        text = text.replace("listen 80", f"listen 127.0.0.1:{front}")
        paths = [
            f"{kind}_temp_path {tmp_path};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        ]
        config = tmp_path / "nginx.conf"
        config.write_text(
            f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr;\n"
            f"events {{}}\nhttp {{ access_log off; {' '.join(paths)}\n{text}}}\n"
        )
        assert NGINX is not None
        command = [NGINX, "-e", "stderr", "-c", str(config)]
        for path, answer in published_by(command, front, port, {}).items():
            assert (path, answer.status_code) == (path, 404)
            assert ("nginx" in answer.text) == (path != "healthy")


PROBES = ("health", "ready", "metrics", "health/", "/health", "x/../ready", "%6detrics")


def published_by(
    command: list[str], front: int, port: int, environment: dict[str, str]
) -> dict[str, httpx2.Response]:
    """Run a proxy of the service at a port, and return its answers to requests for probes, by path."""
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | environment) as proxy:
        try:
            url = f"http://127.0.0.1:{front}"
            transport = httpx2.HTTPTransport(retries=8)
            with httpx2.Client(transport=transport, trust_env=False, timeout=20) as client:
                answer = client.post(f"{url}/predict", json=[3, 4])
                assert (answer.status_code, answer.json()["distances"][0]) == (200, 5.0)
                assert client.get(f"http://127.0.0.1:{port}/health").status_code == 200
                return {path: client.get(f"{url}/{path}") for path in (*PROBES, "healthy")}
        finally:
            proxy.terminate()


@pytest.mark.skipif(CADDY is None, reason="Caddy is not installed")
def test_caddy_publishes_the_service_without_its_probes(tmp_path: Path) -> None:
    with serving([str(ROOT / "examples/serve_a_model.py"), "--port", "0"]) as port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            front: int = free.getsockname()[1]
        text = block("text", "predictions").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        config = tmp_path / "Caddyfile"
        site = f"http://127.0.0.1:{front}"
        config.write_text("{\n    admin off\n}\n" + text.replace("predictions.example", site))
        assert CADDY is not None
        command = [CADDY, "run", "--config", str(config)]
        answers = published_by(command, front, port, {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)})
    assert {path for path, answer in answers.items() if answer.status_code != 404} == set()
    # The proxy answers without a text, and the service with one.
    assert {path for path, answer in answers.items() if answer.text} == {"health/", "healthy"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_as_hardened_as_documented(tmp_path: Path) -> None:
    unit = tmp_path / "service.service"

    def exposure(text: str) -> float:
        unit.write_text(text)
        command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return float(told.rpartition("service.service: ")[2].split()[0])

    hardened, plain = block("ini"), re.sub(r"(?ms)^CapabilityBoundingSet.*^UMask=.*?\n", "", block("ini"))
    # Versions of systemd differ by some tenths.
    assert exposure(hardened) == pytest.approx(1.5, abs=0.4)
    assert exposure(plain) == pytest.approx(9.2, abs=0.4)


ACTIVATED = """
{function}

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from trio_accel.http import run

async def main():
    async def answer(request):
        return PlainTextResponse("activated")

    listeners = activated()
    print(listeners[0].socket.getsockname()[1], flush=True)
    await serve(Starlette(routes=[Route("/", answer)]), listeners=listeners)

run(main)
"""


def test_a_socket_of_systemd_is_served(tmp_path: Path) -> None:
    program = tmp_path / "activated.py"
    program.write_text(ACTIVATED.format(function=block("python").partition("\n\n\nawait")[0]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # As systemd does it: the socket is file 3 of the program.
        start = f"import os, sys; os.dup2({listener.fileno()}, 3); os.set_inheritable(3, True)"
        start += (
            f"; os.environ['LISTEN_FDS'] = '1'; os.execv(sys.executable, [sys.executable, {str(program)!r}])"
        )
        with serving(["-c", start], pass_fds=[listener.fileno()]) as port:
            assert httpx2.get(f"http://127.0.0.1:{port}/", trust_env=False).text == "activated"
