"""The service of examples/service, run as its README says: under load, killed, and with bad input."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import attrs
import httpx2
import numpy as np
import pytest
import trio
from http_2 import HTTP_2, check_http_2
from kept_connections import Asked, check_kept_connections, check_next
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import open_stream_to_socket_listener

import trio_accel as ta
from trio_accel.http import serve

ROOT = Path(__file__).parents[1]
SERVICE = ROOT / "examples" / "service"
SECONDS = float(os.environ.get("TRIO_ACCEL_SERVICE_SECONDS", "25"))
GOLD = {"x-api-key": "gold"}
T = TypeVar("T")
_SERVING = re.compile(r"serving at (http://\S+) \(process (\d+)\); administrator's key: ([0-9a-f]{32})")

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
    model = importlib.import_module("search_words")
    assert len(set(model.words_of(forms))) == 1
    assert model.words_of("the device") != model.words_of("the kernel")
    assert model.words_of("It is what you have.") == []


async def test_an_error_beside_a_deadline_is_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SERVICE))
    batch = importlib.import_module("search_batch")

    class Scheduler:
        async def ask(self, call: ta.patterns.FairCall[str]) -> None:
            try:
                await trio.sleep_forever()
            finally:
                if call.item.text == "bad":
                    raise ta.AccelError("the deadline came first")

    limit, breaker = ta.patterns.RateLimit(100.0, burst=100.0), ta.patterns.CircuitBreaker()
    service = batch.Service(None, None, {"key": 1.0}, Scheduler(), None, limit, breaker)
    tasks = [batch.Task("embed", text) for text in ("good", "bad", "good")]
    scope = trio.CancelScope(deadline=-inf)
    with pytest.raises(ta.AccelError, match="came first"), scope:
        await service.ask("key", tasks)


@attrs.frozen
class Serving:
    process: subprocess.Popen[str]
    url: str
    admin_key: str
    folder: Path

    def post(self, path: str, body: object, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        sent = {name.replace("_", "-"): value for name, value in {**GOLD, **headers}.items()}
        return httpx2.post(self.url + path, content=content, headers=sent, timeout=20.0, trust_env=False)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=20.0, trust_env=False)


@contextmanager
def serving(source: Path, folder: Path, *options: str) -> Generator[Serving, None, None]:
    """Run a copy of the example, which needs nothing but what is in its folder."""
    copy, models = folder / "copy", folder / "models"
    if not copy.exists():
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "TRIO_ACCEL_BACKEND": "cpu"}
    environment["PYTHONPATH"] = str(ROOT)
    with subprocess.Popen(
        (sys.executable, "serve.py", "--port", "0", "--models", str(models), *options),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=copy,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = _SERVING.search(line)
            assert found is not None, (line, process.wait(10))
            yield Serving(process, found[1], found[3], models)
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline().startswith("ending")
            assert process.wait(20) == 0
            # Its worker processes and its socket are gone, too.
            assert [path.name for path in folder.rglob("*.sock")] == []
        finally:
            process.kill()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[Serving, None, None]:
    folder = tmp_path_factory.mktemp("service")
    keys = ("--key", "gold=3", "--key", "free=1", "--key", "small=0.02")
    with serving(SERVICE, folder, *keys, "--rate", "5000") as found:
        yield found


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


def test_a_body_that_is_too_long_is_refused(service: Serving) -> None:
    refused = service.post("embed", b"\xff" * (1 << 20) + b"\xff")
    assert refused.status_code == 413
    assert refused.json()["error"] == "the body must have at most 1048576 bytes"
    assert service.post("embed", b"\xff" * (1 << 20)).status_code == 400


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
    # A request takes 3200 of the 5000 tokens in the bucket of this key, and 5000 come each second.
    body = {"texts": ["a"] * 64}
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(service.post, "embed", body, x_api_key="small") for _ in range(4)]
    responses = sorted((future.result() for future in futures), key=lambda response: response.status_code)
    assert responses[0].status_code == 200
    refused = responses[-1]
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


@pytest.mark.parametrize("asked", HTTP_2)
def test_http_2_is_not_served(service: Serving, asked: bytes) -> None:
    check_http_2(urlsplit(service.url).port, asked)


def memory_of(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("stay", [0.0, 0.02])
def test_clients_that_leave_hold_up_no_other(service: Serving, stay: float) -> None:
    address = urlsplit(service.url)
    body = json.dumps({"texts": ["the worker process was killed and the arrays survive it"] * 64})
    request = (
        f"POST /embed HTTP/1.1\r\nHost: a\r\nx-api-key: gold\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    pid, is_over, left = service.process.pid, threading.Event(), Counter[str]()
    memory = memory_of(pid)

    def leave_again_and_again() -> None:
        while not is_over.is_set():
            with suppress(OSError), socket.create_connection((address.hostname, address.port), 5) as client:
                client.sendall(request.encode())
                time.sleep(stay)
                left["clients"] += 1

    flood = [threading.Thread(target=leave_again_and_again) for _ in range(5)]
    for thread in flood:
        thread.start()
    try:
        descriptors, waits = 0, list[float]()
        for _ in range(10):
            begun = time.monotonic()
            assert service.get("health").status_code == 200
            assert service.post("embed", {"texts": ["a worker"]}, x_api_key="free").status_code == 200
            waits.append(time.monotonic() - begun)
            descriptors = max(descriptors, descriptors_of(pid))
    finally:
        is_over.set()
        for thread in flood:
            thread.join()
    print(left, waits, descriptors, memory, memory_of(pid))
    assert left["clients"] > 50
    # It was 18 and 25 seconds when each of these clients had its texts asked for.
    assert max(waits) < 10
    assert sorted(waits)[5] < 3
    assert descriptors < 400
    assert memory_of(pid) < memory + (32 << 20)


def test_a_key_has_a_bound_on_requests_at_once_and_another_key_goes_on(service: Serving) -> None:
    address = urlsplit(service.url)
    body = json.dumps({"texts": ["a"]})
    whole = f"POST /embed HTTP/1.1\r\nHost: a\r\nx-api-key: free\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    worker = worker_of(service)
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        # They wait for a device that has stopped.
        os.kill(worker, signal.SIGSTOP)
        stack.callback(os.kill, worker, signal.SIGCONT)
        for _ in range(16):
            client = stack.enter_context(socket.create_connection((address.hostname, address.port), 5))
            client.sendall(whole.encode())
        refused = eventually(
            lambda: service.post("embed", {"texts": ["a"]}, x_api_key="free", x_deadline="1"),
            lambda seen: seen.status_code == 429,
        )
        assert "16 requests under way" in refused.json()["error"]
        # Another key waits for the device, and is not refused.
        other = threads.submit(service.post, "embed", {"texts": ["a"]})
        os.kill(worker, signal.SIGCONT)
        assert other.result().status_code == 200
    # They have left, and their places are free.
    eventually(
        lambda: service.post("embed", {"texts": ["a"]}, x_api_key="free"),
        lambda seen: seen.status_code == 200,
    )


def test_a_client_without_its_body_takes_no_place_of_its_key(service: Serving) -> None:
    address = urlsplit(service.url)
    begun = b"POST /embed HTTP/1.1\r\nHost: a\r\nx-api-key: free\r\nContent-Length: 100\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(socket.create_connection((address.hostname, address.port), 5))
            client.sendall(begun)
        assert service.post("embed", {"texts": ["a"]}, x_api_key="free").status_code == 200


def worker_of(service: Serving) -> int:
    """The process of the device."""
    [device] = service.get("health").json()["devices"].values()
    return int(device["pid"])


KEPT = [
    Asked(200, "POST", "/embed", '{"texts": ["a worker"]}'),
    Asked(200, "GET", "/health"),
    Asked(404, "POST", "/nothing", "x" * 100_000),
    Asked(405, "GET", "/embed"),
    Asked(400, "POST", "/embed", "{"),
    Asked(200, "POST", "/similar", '{"text": "a worker", "count": 2}'),
    Asked(403, "POST", "/admin/model", '{"model": "v1"}'),
    Asked(200, "GET", "/ready"),
    Asked(200, "GET", "/metrics"),
]


def test_kept_connections_serve_each_request(service: Serving) -> None:
    port = urlsplit(service.url).port
    assert port is not None
    check_kept_connections(port, KEPT, GOLD)
    check_next(port, Asked(413, "POST", "/embed", "x" * ((1 << 20) + 5)), KEPT[0], GOLD)


@pytest.mark.slow
def test_connections_have_a_bound(service: Serving) -> None:
    address = urlsplit(service.url)
    before = descriptors_of(service.process.pid)

    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((address.hostname, address.port), 9))
            for _ in range(300)
        ]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost")
        # They hold no place, and the oldest make room.
        assert service.get("health").status_code == 200
        assert descriptors_of(service.process.pid) < before + 280
        assert clients[0].recv(1000)[:13] in {b"", b"HTTP/1.1 408 "}
    eventually(lambda: descriptors_of(service.process.pid), lambda seen: seen < before + 20)
    assert service.get("health").status_code == 200


def test_clients_that_leave_after_their_answer_hold_nothing(service: Serving) -> None:
    before = descriptors_of(service.process.pid)
    for _ in range(40):
        assert service.get("health").status_code == 200
    # Hypercorn would keep each connection for five seconds.
    eventually(lambda: descriptors_of(service.process.pid), lambda seen: seen < before + 5, within=2.0)


@pytest.mark.slow
def test_a_client_that_does_not_read_is_given_up(service: Serving) -> None:
    address = urlsplit(service.url)
    body = json.dumps({"texts": ["the worker process"] * 64})
    request = (
        f"POST /embed HTTP/1.1\r\nHost: a\r\nx-api-key: gold\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    before = descriptors_of(service.process.pid)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        client.settimeout(1)
        with suppress(OSError):
            for _ in range(100):
                client.sendall(request.encode())
        eventually(lambda: descriptors_of(service.process.pid), lambda seen: seen <= before, within=40)


def eventually(look: Callable[[], T], is_right: Callable[[T], bool], within: float = 10.0) -> T:
    until = time.monotonic() + within
    while not is_right(seen := look()):
        assert time.monotonic() < until, seen
        time.sleep(0.05)
    return seen


@pytest.mark.slow
@pytest.mark.alone
def test_a_deadline_is_kept_while_the_worker_is_stopped(service: Serving) -> None:
    late: list[float] = []

    def ask(number: int) -> int:
        deadline = 0.3 + 0.1 * number
        begun = time.monotonic()
        status = service.post("embed", {"texts": ["a worker"] * 4}, x_deadline=f"{deadline:.1f}").status_code
        late.append(time.monotonic() - begun - deadline)
        return status

    def compare(number: int) -> None:
        # The time of the client, of the connection and of the machine: a request that is refused at once.
        begun = time.monotonic()
        assert service.post("embed", {}).status_code == 400
        own.append(time.monotonic() - begun)

    own: list[float] = []
    worker = worker_of(service)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(compare, range(12)))
        os.kill(worker, signal.SIGSTOP)
        try:
            assert list(threads.map(ask, range(12))) == [504] * 12
        finally:
            os.kill(worker, signal.SIGCONT)
    print(sorted(late), sorted(own))
    assert min(late) > 0
    assert sorted(late)[6] < 0.05 + sorted(own)[6]
    assert max(late) < 0.05 + max(own)
    assert service.post("embed", {"texts": ["a"]}).status_code == 200


@asynccontextmanager
async def serving_here(folder: Path) -> AsyncGenerator[tuple[trio.SocketListener, ta.Device], None]:
    """Serve in this loop: whatever delays the service delays a task that only sleeps, too."""
    batch, web = map(importlib.import_module, ("search_batch", "search_web"))
    options = ta.DeviceOptions(isolation="process")
    async with (
        ta.open_system("search") as system,
        system.open_device("cpu", options=options) as device,
        batch.open_service(system, device, folder, {"gold": 1.0}, rate=5000.0) as opened,
        trio.open_nursery() as nursery,
    ):
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(partial(serve, web.application(opened, "key"), listeners=[listener], signals=()))
        yield listener, device
        nursery.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.alone
async def test_a_504_is_late_by_no_more_than_a_timer_of_the_same_loop(
    service: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SERVICE))
    late, of_timer = list[float](), list[float]()
    body = json.dumps({"texts": ["a worker"] * 4}).encode()

    async def ask(listener: trio.SocketListener, seconds: float) -> bytes:
        head = f"x-api-key: gold\r\nx-deadline: {seconds}\r\nContent-Length: {len(body)}\r\n\r\n"
        due = trio.current_time() + seconds
        async with await open_stream_to_socket_listener(listener) as stream:
            await stream.send_all(b"POST /embed HTTP/1.1\r\nHost: a\r\n" + head.encode() + body)
            status = bytes(await stream.receive_some())[:12]
        late.append(trio.current_time() - due)
        return status

    async def tick() -> None:
        while True:
            due = trio.current_time() + 0.01
            await trio.sleep_until(due)
            of_timer.append(trio.current_time() - due)

    async with serving_here(service.folder) as (listener, device), trio.open_nursery() as nursery:
        assert await ask(listener, 9.0) == b"HTTP/1.1 200"
        late.clear()
        worker = (await device.statistics()).pid
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        # The service freezes what lives when it begins. Tests leave more behind.
        gc.disable()
        try:
            nursery.start_soon(tick)
            for _ in range(12):
                assert await ask(listener, 0.2) == b"HTTP/1.1 504"
        finally:
            gc.enable()
            os.kill(worker, signal.SIGCONT)
        nursery.cancel_scope.cancel()
    print(f"late by ms: {np.sort(late) * 1e3}, a timer: {np.percentile(of_timer, (50, 90, 100)) * 1e3}")
    assert min(late) > 0
    assert max(late) < 0.05 + max(of_timer)
    assert np.median(late) < 0.05 + np.median(of_timer)


def workers_of(pid: int) -> list[int]:
    """The worker processes below a process."""
    name = Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip()
    found = [pid] if name == "accel worker" else []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text(encoding="ascii").split():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += workers_of(int(child))
    return found


def test_health_tells_of_a_device_that_is_given_up_which_comes_back(service: Serving) -> None:
    def kill_all() -> httpx2.Response:
        for worker in workers_of(service.process.pid):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        return service.get("health")

    refused = eventually(kill_all, lambda seen: seen.status_code == 503, within=20.0)
    assert refused.json()["status"] == "failed"
    assert "given up" in refused.json()["faults"][0]
    refused = service.post("embed", {"texts": ["a"]})
    assert refused.status_code == 503
    assert 0 < float(refused.headers["retry-after"]) < 2
    eventually(lambda: service.get("health").status_code, lambda status: status == 200)
    # The circuit breaker may be open for a second more.
    eventually(lambda: service.post("embed", {"texts": ["a"]}).status_code, lambda status: status == 200)


def test_metrics_health_and_readiness(service: Serving) -> None:
    assert worker_of(service) in workers_of(service.process.pid)
    assert service.get("health").json()["faults"] == []
    assert service.get("ready").json() == {"status": "ready"}
    assert service.post("embed", {"texts": ["a"]}).status_code == 200
    families = {family.name: family for family in text_string_to_metric_families(service.get("metrics").text)}
    messages = families["trio_accel_messages"]
    paths = {sample.labels["path"] for sample in messages.samples}
    assert {"search/scheduler", "search/batcher", "search/models"} <= paths


def test_why_a_model_was_not_replaced_is_told_to_strangers_by_no_text(service: Serving) -> None:
    # Either: a test under load replaces it to and fro, and ends when its time is over.
    serves = service.post("embed", {"texts": ["a"]}).json()["model"]
    wanted = {"v1": "v2", "v2": "v1"}[serves]
    file = service.folder / f"{wanted}.safetensors"
    kept = file.read_bytes()
    file.write_bytes(b"nonsense")
    try:
        refused = service.post("admin/model", {"model": wanted}, x_api_key=service.admin_key)
    finally:
        file.write_bytes(kept)
    assert refused.status_code == 409
    assert refused.json() == {"error": "the model was not replaced: the log says why"}
    assert service.post("embed", {"texts": ["a"]}).json()["model"] == serves
    # A key that is no ASCII is compared, too.
    strange = {"x-api-key": "\u00e9".encode()}
    response = httpx2.post(service.url + "admin/model", headers=strange, timeout=20.0, trust_env=False)
    assert response.status_code == 403


OTHER_MODEL = """
from contextlib import asynccontextmanager

import attrs
import numpy as np
import trio_accel as ta

VERSIONS = {"lengths": 1, "broken": 0}


@attrs.frozen
class Task:
    kind: str
    text: str
    count: int = 0


def kind_of(task):
    return task.kind


def cost_of(task):
    return 1.0


async def make_models(device, folder):
    pass


class Lengths:
    def __init__(self, scale):
        self.scale = scale

    def embed(self, lengths):
        return lengths[:, None] * self.scale


@asynccontextmanager
async def load_model(device, folder, version):
    if version == "broken":
        raise ValueError("a reason")
    scale = await device.put(np.array([2.0, 3.0]))
    async with ta.open_program(device, Lengths, scale) as program:

        async def model(tasks):
            lengths = np.array([float(len(task.text)) for task in tasks])
            return (await (await program.ask(Lengths.embed, lengths)).to_host()).tolist()

        yield model


PROBE = Task("embed", "abc")


def check(result):
    if result != [6.0, 9.0]:
        raise ValueError(result)
"""


@pytest.mark.slow
def test_another_model_is_one_file(tmp_path: Path) -> None:
    shutil.copytree(SERVICE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("search_words.py", "search_fit.py", "sentences.txt", "README.md", "load.py"):
        (tmp_path / "copy" / name).unlink()
    (tmp_path / "copy" / "search_model.py").write_text(OTHER_MODEL, encoding="utf-8")
    with serving(SERVICE, tmp_path, "--show-errors") as service:
        response = service.post("embed", {"texts": ["a", "abc"]})
        assert response.json() == {"model": "lengths", "vectors": [[2.0, 3.0], [6.0, 9.0]]}
        # `--show-errors` tells why.
        refused = service.post("admin/model", {"model": "broken"}, x_api_key=service.admin_key)
        assert refused.status_code == 409
        assert "a reason" in refused.json()["error"]


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, is_link: bool) -> None:
    folder = tmp_path / "models"
    if is_link:
        folder.symlink_to(tmp_path / "target")
        (tmp_path / "target").mkdir()
    else:
        folder.mkdir()
    os.chown(folder, 4711, 4711, follow_symlinks=False)
    assert (
        refusal(folder) == f"PermissionError: {folder} belongs to user 4711: choose another with --models\n"
    )


@pytest.mark.slow
def test_a_folder_that_anybody_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert (
        refusal(tmp_path)
        == f"PermissionError: anybody can write to {tmp_path}: choose another with --models\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("missing", "FileNotFoundError: [Errno 2] No such file or directory: '{folder}/sentences.txt'\n"),
        (
            "few",
            "WeightsError: {folder}/sentences.txt: 2 sentences with 0 words in common are too few to fit\n",
        ),
        (
            "module",
            "No module named 'search_web': this needs all files of its folder, starlette and hypercorn",
        ),
    ],
)
def test_a_copy_that_is_not_whole_is_told_in_a_sentence(tmp_path: Path, change: str, why: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(SERVICE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / ("search_web.py" if change == "module" else "sentences.txt")).unlink()
    if change == "damaged":
        (copy / "models").mkdir(mode=0o700)
        for version in ("v1", "v2"):
            (copy / "models" / f"{version}.safetensors").write_bytes(b"nonsense")
    if change == "few":
        rows = "".join(f"page\tThe worker process of {number}.\n" for number in range(2))
        (copy / "sentences.txt").write_text(rows, encoding="utf-8")
    told = refusal(copy / "models", copy)
    assert told.startswith(why.format(folder=copy))
    assert told.count("\n") == 1


def refusal(models: Path, source: Path = SERVICE) -> str:
    command = (sys.executable, str(source / "serve.py"), "--port", "0", "--models", str(models))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "nonsense", "http://[::1"])
def test_a_load_on_nothing_is_told_in_a_sentence(url: str) -> None:
    command = (sys.executable, str(SERVICE / "load.py"), "--seconds", "5", "--url", url)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"no service answers at {url}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
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
