"""The begin and end of `trio_accel.http.serve`, and its reports of a system."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import trio
from attacked import KINDS, Handlers, Seen, Work, ask, connect, get, make, post, read_all, serving, status
from fastapi import FastAPI
from pydantic import FiniteFloat
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.http import Limits, errors, on_host, run, serve
from trio_accel.patterns import Batcher, Submit

ROOT = Path(__file__).parents[2]
STOP = (signal.SIGUSR1,)

pytestmark = pytest.mark.filterwarnings(
    # Starlette leaves the generator of a cancelled stream to the garbage collector.
    "ignore:Async generator:ResourceWarning",
    "ignore:Exception ignored in. <async_generator:pytest.PytestUnraisableExceptionWarning",
)


async def test_services_of_one_program_register_one_function_for_its_end(app: Any) -> None:
    registered = list[int]()
    for _ in range(3):
        async with serving(app, signals=STOP):
            signal.raise_signal(STOP[0])
        registered.append(atexit._ncallbacks())  # pyright: ignore[reportPrivateUsage]
    assert registered == registered[:1] * 3


async def test_a_signal_lets_open_requests_end_and_cuts_the_rest(
    app: Any, seen: Seen, caplog: pytest.LogCaptureFixture, mock_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "trio_accel.http")
    async with serving(app, limits=Limits(grace=8.0), signals=STOP) as port:
        idle = await connect(port, get("/ping"))
        assert b" 200 " in await idle.receive_some()
        held, late = await connect(port, get("/hold")), await connect(port, get("/sse?n=1000&s=60"))
        assert b" 200 " in await late.receive_some()
        await seen.until(lambda them: them.running == 2)
        for _ in range(2):  # the second one changes nothing
            signal.raise_signal(STOP[0])
        assert await read_all(idle) == b""
        with pytest.raises(OSError, match="all attempts to connect"):
            await connect(port)
        seen.release.set()
        answer = await read_all(held)
        assert b"connection: close" in answer
        assert answer.endswith(b"released")
        await wait_all_tasks_blocked(0.02)
        assert (seen.cancelled, seen.running) == (0, 1)
        mock_clock.jump(8.0)
        # The stream is cut in a way that its client notices.
        assert not (await read_all(late)).endswith(b"0\r\n\r\n")
        await seen.until(lambda them: (them.served, them.cancelled, them.running) == (1, 1, 0))
    assert caplog.messages[1:] == ["ending: 2 requests are open, and have 7 s"]


async def test_a_request_and_a_lifespan_that_do_not_end_share_the_grace(
    seen: Seen, mock_clock: MockClock
) -> None:
    times: list[float] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[None, None]:
        yield
        times.append(trio.current_time() - began)
        try:
            await trio.sleep_forever()
        finally:
            times.append(trio.current_time() - began)

    app = make("starlette", seen, lifespan=lifespan)
    async with serving(app, limits=Limits(grace=10.0), signals=STOP) as port:
        stream = await connect(port, get("/slow"))
        await seen.until(lambda them: them.running == 1)
        began = trio.current_time()
        signal.raise_signal(STOP[0])
        for seconds in (8.9, 0.11, 0.5):
            await wait_all_tasks_blocked(0.01)
            mock_clock.jump(seconds)
    assert times == pytest.approx([9.01, 9.51])
    assert (seen.cancelled, seen.running) == (1, 0)
    await stream.aclose()


async def test_it_ends_as_soon_as_the_last_request_has_ended(app: Any, seen: Seen) -> None:
    async with trio.open_nursery() as nursery:
        port = await nursery.start(partial(serve, app, port=0, signals=STOP))
        stream = await connect(port, get("/hold"))
        await seen.until(lambda them: them.running == 1)
        signal.raise_signal(STOP[0])
        seen.release.set()
        assert (await read_all(stream)).endswith(b"released")
        with trio.fail_after(60):
            while nursery.child_tasks:  # noqa: ASYNC110  # the nursery has no event
                await trio.sleep(0.01)


async def test_cancelling_it_cuts_everything(app: Any, seen: Seen) -> None:
    async with serving(app, limits=Limits(stall=60)) as port:
        streams = [await connect(port, get(path)) for path in ("/slow", "/big", "/ping")]
        await seen.until(lambda them: them.running == 2)
    for stream in streams:
        await read_all(stream)
    gc.collect()  # Starlette leaves the generator to it
    await seen.until(lambda them: them.running == 0)


async def test_an_occupied_port_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            started.append(scope["type"])

        with pytest.raises(OSError, match=f"cannot listen at port {port} of 127.0.0.1: ") as error:
            await serve(app, port=port)
        assert error.value.strerror is not None
        assert started == []


async def test_the_last_part_of_an_answer_and_its_end_are_one_system_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send_all, sent = trio.SocketStream.send_all, list[bytes]()

    async def noted(stream: trio.SocketStream, data: bytes) -> None:
        if stream.socket.getsockname()[1] == port:
            sent.append(bytes(data))
        await send_all(stream, data)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            raise NotImplementedError
        await send({"type": "http.response.start", "status": 200})
        for part in (b"first", b"second", b"last"):
            await send({"type": "http.response.body", "body": part, "more_body": part != b"last"})

    async with serving(app) as port:
        monkeypatch.setattr(trio.SocketStream, "send_all", noted)
        answer = await ask(port, get("/", "Connection: close"))
    assert answer == b"".join(sent)
    assert len(sent) == 3
    assert sent[-1] == b"4\r\nlast\r\n0\r\n\r\n"


async def test_open_listeners_may_be_given(app: Any) -> None:
    listeners = [(await trio.open_tcp_listeners(0, host="127.0.0.1"))[0] for _ in range(2)]
    ports = [each.socket.getsockname()[1] for each in listeners]
    async with serving(app, listeners=listeners) as port:
        assert port == ports[0]
        assert [await status(each, get("/ping")) for each in ports] == [200, 200]
    assert [each.socket.fileno() for each in listeners] == [-1, -1]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_lifespan_runs_around_the_requests(kind: str, seen: Seen) -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[dict[str, Any], None]:
        steps.append("started")
        try:
            yield {"greeting": "hello"}
        finally:
            steps.append("ended")

    async def greet(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.state.greeting)

    app = make(kind, seen, lifespan=lifespan)
    app.add_route("/greet", greet)
    async with serving(app, signals=STOP) as port:
        assert steps == ["started"]
        assert (await ask(port, get("/greet", "Connection: close"))).endswith(b"hello")
        signal.raise_signal(STOP[0])
    assert steps == ["started", "ended"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["startup", "shutdown", "between"])
async def test_an_error_of_the_lifespan_is_that_error(kind: str, when: str, seen: Seen) -> None:
    fails = trio.Event()

    async def fail() -> None:
        await fails.wait()
        raise LookupError("between")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[None, None]:
        if when == "startup":
            raise LookupError(when)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            yield
            nursery.cancel_scope.cancel()
        if when == "shutdown":
            raise LookupError(when)

    async def client(port: int) -> None:
        assert await status(port, get("/ping")) == 200
        fails.set() if when == "between" else signal.raise_signal(STOP[0])

    async with trio.open_nursery() as nursery:

        async def begin(task_status: trio.TaskStatus[int]) -> None:
            with pytest.raises(LookupError, match=when):
                await serve(
                    make(kind, seen, lifespan=lifespan), port=0, signals=STOP, task_status=task_status
                )
            if when == "startup":
                task_status.started(0)

        if port := await nursery.start(begin):
            await client(port)


async def test_a_plain_function_needs_no_lifespan(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    async with serving(app, signals=STOP) as port:
        assert (await ask(port, get("/", "Connection: close"))).startswith(b"HTTP/1.1 204 ")
        signal.raise_signal(STOP[0])
    assert caplog.records == []


async def test_a_lifespan_that_reports_a_failure_is_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no model"})

    with pytest.raises(RuntimeError, match="no model"):
        await serve(app, port=0)


async def test_a_signal_cancels_a_start_that_does_not_end(seen: Seen) -> None:
    requests, begun = 0, trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal requests
        if scope["type"] == "http":
            requests += 1
        with Work(seen):
            begun.set()
            await trio.sleep_forever()

    async def stop() -> None:
        await begun.wait()
        # This client is in the queue of the listener. Nobody may serve it.
        nursery.start_soon(ask, listeners[0].socket.getsockname()[1], get("/"))
        await wait_all_tasks_blocked()
        signal.raise_signal(STOP[0])

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            # The program continues as if the signal had come after the start.
            port = await nursery.start(partial(serve, app, listeners=listeners, signals=STOP))
            assert port > 0
    assert (seen.cancelled, seen.running, requests) == (1, 0, 0)


class Doubler:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @ta.programs.method(refuses=(ValueError,))
    def double(self, rows: list[float]) -> ta.programs.Array:
        if any(row < 0 for row in rows):
            raise ValueError(f"negative: {min(rows)}")
        return np.array(rows) * self.factor

    def count(self, rows: list[float]) -> int:
        return len(rows)

    def crash(self) -> int:
        raise ZeroDivisionError


async def json_of(port: int, path: str) -> tuple[int, Any]:
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{port}{path}")
        return answer.status_code, answer.json()


async def test_an_operator_sees_the_system(app: Any, system: ta.System, device: ta.Device) -> None:
    with ta.telemetry.record(system) as recorder:
        async with serving(app, system=system, recorder=recorder) as port:
            code, shown = await json_of(port, "/health")
            assert (code, shown["status"], shown["faults"]) == (200, "alive", [])
            assert shown["devices"][device.path]["generation"] == 1
            assert await json_of(port, "/ready") == (200, {"status": "ready"})
            metrics = await ask(port, get("/metrics", "Connection: close"))
            assert b"\r\ncontent-type: text/plain; version=0.0.4" in metrics
            assert b"trio_accel_device_up{" in metrics
            assert await status(port, post("/health", b"")) == 404  # which is the application's


async def test_an_opening_device_is_not_a_fault(app: Any, system: ta.System) -> None:
    async with serving(app, system=system) as port, trio.open_nursery() as nursery:
        opening = trio.Event()

        async def open_one() -> None:
            opening.set()
            await system.open_device("cpu", name="late")

        nursery.start_soon(open_one)
        await opening.wait()
        while True:
            code, shown = await json_of(port, "/health")
            assert (code, shown["faults"]) == (200, [])
            assert await status(port, get("/ready")) in {200, 503}
            if shown["devices"] and next(iter(shown["devices"].values()))["generation"]:
                break


async def test_without_a_system_the_routes_are_the_applications(app: Any) -> None:
    async with serving(app) as port:
        assert [await status(port, get(path)) for path in ("/health", "/ready", "/metrics")] == [404] * 3


async def test_an_ended_program_is_seen(app: Any, system: ta.System, device: ta.Device) -> None:
    never = ta.Intensity(0, 60.0)
    program = await ta.open_program(device, Doubler, 2.0, name="doubler", intensity=never)
    async with serving(app, system=system) as port:
        assert (await json_of(port, "/health"))[0] == 200
        for _ in range(2):
            with pytest.raises(ta.ActorError):
                await program.ask(Doubler.crash)
        assert program.has_ended
        code, shown = await json_of(port, "/health")
        assert (code, shown["status"]) == (503, "failed")
        assert shown["faults"] == ["program 'doubler' has ended"]
        await program.reset()
        assert (await json_of(port, "/health"))[0] == 200
        for _ in range(2):
            with pytest.raises(ta.ActorError):
                await program.ask(Doubler.crash)
        await program.aclose()
        assert (await json_of(port, "/health"))[0] == 200


async def test_a_given_up_device_is_seen(app: Any, system: ta.System) -> None:
    options = ta.DeviceOptions(intensity=ta.Intensity(0, 60.0), isolation="inline")
    device = await system.open_device("cpu", options=options, name="fragile")
    async with serving(app, system=system) as port:
        async with system.open_device("cpu", name="other"):
            pass  # closed, which is not a fault
        assert (await json_of(port, "/health"))[0] == 200
        ta.testing.poison(device)
        for lost in (ta.ContextPoisonedError, ta.DeviceLostError):
            with pytest.raises(lost):
                await device.put(np.ones(3))
        code, shown = await json_of(port, "/health")
        assert code == 503
        assert "fragile" in shown["faults"][0]


async def test_a_device_that_will_be_opened_again_is_alive_but_not_ready(app: Any, system: ta.System) -> None:
    intensity = ta.Intensity(0, 60.0, pause=ta.Backoff(initial=600.0, base=600.0, maximum=600.0))
    options = ta.DeviceOptions(intensity=intensity, isolation="inline", on_failure="reopen")
    async with (
        system.open_device("cpu", options=options, name="fragile") as device,
        serving(app, system=system) as port,
    ):
        assert await json_of(port, "/ready") == (200, {"status": "ready"})
        ta.testing.poison(device)
        for lost in (ta.ContextPoisonedError, ta.DeviceLostError):
            with pytest.raises(lost):
                await device.put(np.ones(3))
        code, shown = await json_of(port, "/health")
        # A new process would lose the other devices, and open this one no sooner.
        assert (code, shown["status"], shown["faults"]) == (200, "alive", [])
        code, shown = await json_of(port, "/ready")
        assert (code, shown["status"]) == (503, "not ready")
        assert re.search("fragile: the device was given up: .*; it is opened again in ", shown["faults"][0])


async def test_a_handler_that_holds_the_loop_is_warned_of_once(
    app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    line = Handlers.blocked.__code__.co_firstlineno + 3
    options = ta.SystemOptions(held_after=0.2)
    async with ta.open_system("held", options=options) as system:
        with ta.telemetry.record(system) as recorder:
            async with serving(app, system=system, recorder=recorder) as port:
                for _ in range(3):
                    assert await status(port, get("/blocked?s=0.35")) == 200
                with trio.fail_after(60):
                    while system.loop_holds.seconds < 0.7:  # noqa: ASYNC110  # nobody is told
                        await trio.sleep(0.01)
                metrics = (await ask(port, get("/metrics", "Connection: close"))).decode()
    # On a busy machine other lines may also hold the loop.
    [record] = [each for each in caplog.records if "in blocked:" in each.message]
    assert record.levelno == logging.WARNING
    assert f"attacked.py:{line}, in blocked: no other task ran; move such work to a thread" in record.message
    [held] = re.findall(r"^trio_accel_loop_held_seconds_total{.*} (.+)$", metrics, re.MULTILINE)
    assert float(held) > 0.6


@pytest.mark.parametrize("kind", KINDS)
async def test_errors_become_answers(kind: str) -> None:
    class MineError(ta.AccelError):
        pass

    raised = {
        "lost": ta.ContextLostError("lost"),
        "full": ta.MailboxFullError("full", path="test/a"),
        "limited": ta.patterns.RateLimitError("later", retry_after=7.2),
        "value": ValueError("bad \ud800" + "x" * 1000),
        "mine": MineError("mine"),
    }

    async def fail(request: Request) -> None:
        raise raised[request.path_params["name"]]

    handlers = errors(ValueError, MineError)
    if kind == "starlette":
        app: Any = Starlette(routes=[Route("/{name}", fail)], exception_handlers=handlers)
    else:
        app = FastAPI(exception_handlers=handlers)
        app.add_api_route("/{name}", fail, response_model=None)
    async with serving(app) as port, httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        answers = {name: await client.get(f"/{name}") for name in raised}
    found = {name: (each.status_code, each.headers.get("retry-after")) for name, each in answers.items()}
    assert found == {
        "lost": (503, "1"),
        "full": (503, "1"),
        "limited": (503, "7"),
        "value": (400, None),
        "mine": (400, None),
    }
    assert answers["lost"].json() == {"error": "try again"}
    assert answers["value"].json()["error"] == "bad ?" + "x" * 195


@pytest.mark.parametrize("refused", [(), (ValueError,)])
@pytest.mark.parametrize(
    ("body", "field", "message", "value"),
    [
        ("[1e400, 2]", 0, "Input should be a finite number", "Infinity"),
        ("[1, -1e400]", 1, "Input should be a finite number", "-Infinity"),
        ("[1, NaN]", 1, "Input should be a finite number", "NaN"),
        ("[Infinity, 2]", 0, "Input should be a finite number", "Infinity"),
        ("[1, 1" + "0" * 400 + "]", 1, "Input should be a valid number", 10**400),
        ('["one", 2]', 0, "Input should be a valid number, unable to parse string as a number", "one"),
        ("[1]", 1, "Field required", [1]),
    ],
)
async def test_the_answer_names_an_infinite_or_nan_number(
    refused: tuple[type[Exception], ...], body: str, field: int, message: str, value: object
) -> None:
    app = FastAPI(exception_handlers=errors(*refused))
    app.add_api_route("/", take_point, methods=["POST"])
    async with serving(app) as port, httpx2.AsyncClient(trust_env=False) as client:
        headers = {"content-type": "application/json"}
        found = await client.post(f"http://127.0.0.1:{port}/", content=body, headers=headers)
    assert found.status_code == 422
    [told] = found.json()["detail"]
    assert (told["loc"], told["msg"], told["input"]) == (["body", field], message, value)


async def take_point(point: tuple[FiniteFloat, FiniteFloat]) -> None:
    pass


def test_errors_are_classes() -> None:
    for wrong in (KeyboardInterrupt, ValueError("a"), "ValueError"):
        with pytest.raises(TypeError, match="pass classes of exceptions"):
            errors(wrong)  # type: ignore[arg-type]


async def test_a_method_on_the_host_is_a_model(system: ta.System, device: ta.Device) -> None:
    async with ta.open_program(device, Doubler, 3.0) as program:
        batcher = await system.spawn(Batcher, on_host(program, Doubler.double), capacity=10)
        assert (await batcher.ask(Submit(2.0))).tolist() == 6.0
        with pytest.raises(ValueError, match="negative"):
            await on_host(program, Doubler.double)([-1.0])
        assert await on_host(program, Doubler.count)([1.0, 2.0]) == 2


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"requests": 0}, ValueError, "requests must be an integer of at least 1"),
        ({"connections": 1.5}, ValueError, "connections must be"),
        ({"body": -1}, ValueError, "body must be"),
        ({"bodies": 10}, ValueError, "bodies must be at least body"),
        ({"wait": 0}, ValueError, "wait must be seconds above 0"),
        ({"stall": float("nan")}, ValueError, "stall must be"),
        ({"answer": "30"}, ValueError, "answer must be"),
        ({"grace": float("inf")}, ValueError, "grace must be"),
        ({"grace": -1}, ValueError, "grace must be"),
        ({"timeout": 1}, TypeError, "timeout"),
    ],
)
def test_limits_are_checked(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        Limits(**options)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"app": None}, TypeError, "app must be an ASGI application"),
        ({"port": -1}, ValueError, "port must be an integer from 0 to 65535"),
        ({"port": "80"}, ValueError, "port must be"),
        ({"limits": {}}, TypeError, "limits must be Limits"),
        ({"ports": 1}, TypeError, "ports"),
        ({"host": None}, TypeError, "host must be a name or an address, got None"),
        ({"host": "a..b"}, ValueError, r"host must be a name or an address, got 'a\.\.b'"),
        ({"host": "a" * 70}, ValueError, "host must be"),
        ({"listeners": ()}, TypeError, r"listeners must be one or more trio.SocketListener, got \(\)"),
        ({"listeners": [3]}, TypeError, "listeners must be"),
        ({"listeners": 3}, TypeError, "listeners must be"),
        ({"system": 3}, TypeError, "system must be an open system, got 3"),
        ({"recorder": 3}, TypeError, "recorder must be a Recorder, got 3"),
        ({"error_body": {}}, TypeError, "error_body must be a function of a status and a text, got {}"),
    ],
)
async def test_arguments_are_checked(options: dict[str, Any], error: type[Exception], told: str) -> None:
    given: dict[str, Any] = {"app": make("starlette", Seen()), **options}
    with pytest.raises(error, match=told):
        await serve(given.pop("app"), **given)


async def test_it_reports_that_another_thread_has_no_signals(app: Any) -> None:
    def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="main thread"):
            trio.run(partial(serve, app, port=0))

    await trio.to_thread.run_sync(elsewhere)


PROGRAM = """
import sys
import numpy as np
import trio
import trio_accel as ta
from functools import partial
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from trio_accel.http import on_host, run, serve

class Model:
    def double(self, rows: list[float]) -> ta.programs.Array:
        return np.array(rows) * 2

async def main(port):
    options = ta.DeviceOptions(isolation="process")
    async with ta.open_system("demo") as system, system.open_device("cpu", options=options) as device:
        model = on_host(await ta.open_program(device, Model), Model.double)

        async def double(request):
            return JSONResponse((await model(await request.json())).tolist())

        app = Starlette(routes=[Route("/", double, methods=["POST"])])
        async with trio.open_nursery() as nursery:
            print(await nursery.start(partial(serve, app, port=port, system=system)), flush=True)

if __name__ == "__main__":
    run(main, int(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux")
@pytest.mark.slow
@pytest.mark.parametrize("way", ["file", "module"])
def test_a_program_file_serves_from_a_worker_until_sigterm(tmp_path: Path, way: str) -> None:
    (tmp_path / "service.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, *(["service.py"] if way == "file" else ["-m", "service"])]
    options: Any = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True}
    with subprocess.Popen([*command, "0"], **options, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            answer = httpx2.post(f"http://127.0.0.1:{port}/", content=b"[1.5, 4]", trust_env=False)
            assert answer.json() == [3.0, 8.0]
            taken = subprocess.run([*command, str(port)], **options, capture_output=True, check=False)
            assert taken.returncode == 1
            assert taken.stderr.startswith(f"cannot listen at port {port} of 127.0.0.1: ")
            assert len(taken.stderr.splitlines()) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_main_function_of_another_module_runs_unchanged() -> None:
    async def main(number: int) -> int:
        await trio.lowlevel.checkpoint()
        return number + 1

    assert run(main, 2) == 3


@pytest.mark.slow
def test_a_main_function_without_a_file_is_refused() -> None:
    code = "from trio_accel.http import run\nasync def main(): pass\nrun(main)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "TypeError: run: pass a function at the top level of a file" in done.stderr


@pytest.mark.slow
def test_a_file_with_the_name_of_another_module_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "json.py"
    file.write_text("from trio_accel.http import run\nasync def main(): pass\nrun(main)", encoding="utf-8")
    code = f"import json, runpy; runpy.run_path({str(file)!r}, None, '__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has the name of another module" in done.stderr
