"""The service of examples/service, run as its README says: under load, killed, and with bad input."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import httpx2
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[1]
SERVICE = ROOT / "examples" / "service"
SECONDS = float(os.environ.get("TRIO_ACCEL_SERVICE_SECONDS", "60"))
GOLD = {"x-api-key": "gold"}
_SERVING = re.compile(r"serving at (http://\S+) \(process (\d+)\); administrator's key: (\S+)")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux"),
    pytest.mark.timeout(SECONDS + 120),
    pytest.mark.xdist_group("service"),
]


@pytest.mark.parametrize(
    "forms",
    [
        "array arrays",
        "cache caches cached caching",
        "device devices",
        "kill kills killed killing",
        "pass passes passed passing",
        "process processes processed processing",
        "queue queues queued",
        "string strings",
        "time times",
    ],
)
def test_forms_of_a_word_are_one_word(monkeypatch: pytest.MonkeyPatch, forms: str) -> None:
    monkeypatch.syspath_prepend(str(SERVICE))
    model = importlib.import_module("search_model")
    assert len(set(model.words_of(forms))) == 1
    assert model.words_of("the device") != model.words_of("the kernel")
    assert model.words_of("It is what you have.") == []


@attrs.frozen
class Serving:
    process: subprocess.Popen[str]
    url: str
    admin_key: str

    def post(self, path: str, body: object, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        sent = {name.replace("_", "-"): value for name, value in {**GOLD, **headers}.items()}
        return httpx2.post(self.url + path, content=content, headers=sent, timeout=20.0, trust_env=False)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=20.0, trust_env=False)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Serving, None, None]:
    folder = tmp_path_factory.mktemp("service")
    command = (sys.executable, str(SERVICE / "serve.py"), "--port", "0", "--models", str(folder))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "TRIO_ACCEL_BACKEND": "cpu"}
    with subprocess.Popen(
        (*command, "--key", "gold=3", "--key", "free=1", "--key", "small=0.02", "--rate", "5000"),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = _SERVING.search(line)
            assert found is not None, line
            yield Serving(process, found[1], found[3])
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline().startswith("ending")
            assert process.wait(20) == 0
            # Its worker processes and its socket are gone, too.
            assert [path.name for path in folder.rglob("*.sock")] == []
        finally:
            process.kill()


@pytest.mark.slow
def test_no_request_is_without_an_outcome_while_workers_are_killed(service: Serving) -> None:
    command = (sys.executable, str(SERVICE / "load.py"), "--json", "--url", service.url, "--clients", "4")
    killing = ("--kill-every", "5", "--admin-key", service.admin_key, "--swap-every", "4")
    done = subprocess.run(
        (*command, *killing, "--seconds", str(SECONDS)),
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS + 60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    print({name: value for name, value in found.items() if name != "seconds"})
    assert found["without"] == found["wrong"] == 0
    assert sum(found["outcomes"].values()) == found["begun"] > 50
    # Each loss has the requests that it hit run again, so that none is refused for it.
    assert set(found["outcomes"]) == {"200"}
    assert found["kills"] >= SECONDS / 5 - 2
    assert set(found["swaps"]) == {"200"}
    assert set(found["models"]) == {"v1", "v2"}
    memory = np.array(found["memory"])
    early, late = memory[len(memory) // 5 : len(memory) // 5 + 5].min(), memory[-5:].min()
    assert late < 1.1 * early


def test_texts_that_are_near_are_found(service: Serving) -> None:
    response = service.post("similar", {"text": "the deadline of a request has passed", "count": 4})
    assert response.status_code == 200
    sentences = response.json()["sentences"]
    assert len(sentences) == 4
    cosines = [sentence["cosine"] for sentence in sentences]
    assert cosines == sorted(cosines, reverse=True)
    # What `/similar` says of angles is what the vectors of `/embed` have.
    texts = [sentence["text"] for sentence in sentences]
    response = service.post("embed", {"texts": ["the deadline of a request has passed", *texts]})
    asked, *near = np.array(response.json()["vectors"])
    np.testing.assert_allclose([vector @ asked for vector in near], cosines, atol=1e-5)
    # A sentence of the guide is found by itself.
    (itself,) = service.post("similar", {"text": texts[2], "count": 1}).json()["sentences"]
    assert itself["cosine"] == pytest.approx(1.0, abs=1e-5)


def test_a_text_gets_the_same_vector_alone_and_in_a_batch(service: Serving) -> None:
    texts = ["the mailbox is full", "a worker process", "xyzzy", ""]
    together = np.array(service.post("embed", {"texts": texts}).json()["vectors"])
    for text, vector in zip(texts, together, strict=True):
        (alone,) = service.post("embed", {"texts": [text]}).json()["vectors"]
        np.testing.assert_allclose(alone, vector, atol=1e-6)
    # A text without a word that is known has no direction.
    assert not together[2:].any()


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("embed", "{", 400, "not JSON"),
        ("embed", "[" * 100_000, 400, "not JSON"),
        ("embed", "[]", 400, "no JSON object"),
        ("embed", {}, 400, "texts must be a list"),
        ("embed", {"texts": []}, 400, "1 to 64"),
        ("embed", {"texts": ["a"] * 65}, 400, "1 to 64"),
        ("embed", {"texts": [1]}, 400, "must be a text"),
        ("embed", {"texts": ["a" * 10_001]}, 400, "at most 10000"),
        ("embed", b"\xff" * (1 << 20) + b"\xff", 413, "more than"),
        ("similar", {"text": "a", "count": 0}, 400, "count"),
        ("similar", {"text": "a", "count": True}, 400, "count"),
        ("similar", {"count": 3}, 400, "text is missing"),
        ("admin/model", {"model": "v2"}, 403, "administrator"),
    ],
)
def test_what_makes_no_sense_is_refused(
    service: Serving, path: str, body: object, status: int, why: str
) -> None:
    response = service.post(path, body)
    assert response.status_code == status
    assert why in response.json()["error"]


def test_keys_and_deadlines(service: Serving) -> None:
    body = {"texts": ["a worker"]}
    assert service.post("embed", body, x_api_key="unknown").status_code == 401
    assert service.post("embed", body, x_deadline="0.000001").status_code == 504
    for text in ("nan", "-1", "soon", "1e9"):
        assert service.post("embed", body, x_deadline=text).status_code == 400
    assert service.post("embed", body, x_deadline="5").status_code == 200
    assert service.post("admin/model", {"model": "v9"}, x_api_key=service.admin_key).status_code == 400
    assert service.get("embed").status_code == 405


def test_one_key_beyond_its_rate_is_refused_and_another_is_not(service: Serving) -> None:
    # A request takes 3200 of the 5000 tokens in the bucket of this key.
    body = {"texts": ["a"] * 64}
    assert service.post("embed", body, x_api_key="small").status_code == 200
    refused = service.post("embed", body, x_api_key="small")
    assert refused.status_code == 429
    assert 0 < float(refused.headers["retry-after"]) < 1
    assert service.post("embed", body).status_code == 200


def test_a_client_ends_nothing_but_its_own_connection(service: Serving) -> None:
    upgrade = (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAAA\r\n\r\n"
    )
    address = urlsplit(service.url)
    for data in (*[upgrade] * 5, b"\x00" * 100, b"GET /" + b"x" * 100_000, b"POST /embed HTTP/1.1\r\n"):
        with socket.create_connection((address.hostname, address.port), timeout=5) as client:
            client.sendall(data)
            client.settimeout(0.2)
            with suppress(OSError):
                while client.recv(4096):
                    pass
    assert service.post("embed", {"texts": ["a"]}).status_code == 200
    assert service.process.poll() is None


def test_metrics_health_and_readiness(service: Serving) -> None:
    assert service.get("health").json()["process"] == service.process.pid
    ready = service.get("ready").json()
    assert ready["status"] == "ready"
    families = {family.name: family for family in text_string_to_metric_families(service.get("metrics").text)}
    messages = families["trio_accel_messages"]
    paths = {sample.labels["path"] for sample in messages.samples}
    assert {"search/scheduler", "search/batcher", "search/models"} <= paths


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--port", "taken"), "Address already in use"),
        (("--port", "80000"), "argument --port: invalid port_of value: '80000'"),
        (("--key", "gold=-1"), "argument --key: invalid tenant_of value: 'gold=-1'"),
        (("--key", "=1"), "argument --key: invalid tenant_of value: '=1'"),
        (("--models", "/dev/null/models"), "Not a directory"),
        (("--device", "quantum"), "argument --device: invalid device_of value: 'quantum'"),
    ],
)
def test_what_cannot_be_served_is_told_in_a_sentence(
    tmp_path: Path, options: tuple[str, str], why: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        option, value = options
        value = str(taken.getsockname()[1]) if value == "taken" else value
        defaults = {"--port": "0", "--models": str(tmp_path), option: value}
        command = [
            sys.executable,
            str(SERVICE / "serve.py"),
            *(part for pair in defaults.items() for part in pair),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode in {1, 2}
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "nonsense", "http://[::1"])
def test_a_load_on_nothing_is_told_in_a_sentence(url: str) -> None:
    command = (sys.executable, str(SERVICE / "load.py"), "--seconds", "5", "--url", url)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"no service answers at {url}: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_while_it_starts_is_told_in_a_sentence(tmp_path: Path) -> None:
    # It comes while the models are fitted: the second of the two lines is not printed yet.
    command = (
        sys.executable,
        str(SERVICE / "serve.py"),
        "--port",
        "0",
        "--dashboard",
        "--models",
        str(tmp_path),
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("dashboard: ")
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    assert (process.returncode, out, error) == (1, "", "interrupted before it served\n")
