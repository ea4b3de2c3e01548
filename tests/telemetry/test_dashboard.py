"""The page of the dashboard: what is served, to whom, and what bad readers do to the program."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import attrs
import httpx2
import numpy as np
import pytest
import trio
from telemetry.read_snapshot import always, read_snapshot
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.actors import Reading
from trio_accel.telemetry import Dashboard, SystemSnapshot, open_dashboard

MODULE = importlib.import_module("trio_accel.telemetry._dashboard")


@attrs.frozen
class Fail(ta.Message["Worker"]):
    text: str


class Worker(ta.Actor):
    @ta.handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise LookupError(message.text)


@pytest.fixture
async def dashboard(system: ta.System) -> AsyncGenerator[Dashboard, None]:
    async with open_dashboard(system, interval=0.2, errors=True) as opened:
        yield opened


@pytest.fixture
async def client(dashboard: Dashboard) -> AsyncGenerator[httpx2.AsyncClient, None]:
    async with httpx2.AsyncClient(base_url=dashboard.url, trust_env=False) as opened:
        yield opened


async def snapshots(dashboard: Dashboard) -> AsyncGenerator[SystemSnapshot, None]:
    """What a page is sent, for a minute at most."""
    buffer = b""
    async with await connect(dashboard) as stream:
        await stream.send_all(b"GET /events HTTP/1.0\r\nHost: localhost\r\n\r\n")
        with trio.fail_after(60):
            async for data in stream:
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: "):
                        # Its users close it with `aclosing`.
                        yield read_snapshot(line.removeprefix(b"data: "))  # noqa: ASYNC101, ASYNC119


async def is_served(client: httpx2.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx2.TransportError:
        return False


async def connect(dashboard: Dashboard) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", port_of(dashboard))


def port_of(dashboard: Dashboard) -> int:
    port = urlsplit(dashboard.url).port
    assert port is not None
    return port


async def test_what_is_served(client: httpx2.AsyncClient, dashboard: Dashboard) -> None:
    page = await client.get("")
    assert page.status_code == 200
    for name in ("page.css", "page.js"):
        assert name in page.text
        found = await client.get(name)
        assert found.status_code == 200
        assert "default-src 'none'" in found.headers["content-security-policy"]
        assert "<!--" not in found.text
        assert "http" not in found.text.replace("http://www.w3.org/2000/svg", "")
    assert (await client.get("../_dashboard.py")).status_code == 404
    assert (await client.post("events")).status_code == 405
    assert (await client.get("", headers={"Host": "elsewhere.example"})).status_code == 400
    assert urlsplit(dashboard.url).hostname == "127.0.0.1"


async def test_each_page_has_its_first_snapshot_at_once(system: ta.System, device: ta.Device) -> None:
    array = await device.put(np.ones(1000))
    async with (
        open_dashboard(system, interval=60) as dashboard,
        aclosing(snapshots(dashboard)) as first,
        aclosing(snapshots(dashboard)) as second,
    ):
        # The second one comes while the first one waits for the next snapshot.
        for found in (first, second):
            [row] = (await anext(found)).devices
            assert row.memory is not None
            assert row.memory.used >= array.nbytes
    array.release()


async def test_a_restart_is_sent(dashboard: Dashboard, system: ta.System) -> None:
    worker = await system.spawn(Worker, name="worker")
    async with aclosing(snapshots(dashboard)) as found:
        async for snapshot in found:
            [row] = [row for row in snapshot.actors if row.path == "test/worker"]
            if not row.restarts:
                await worker.tell(Fail("it is not here"))
                continue
            assert any("it is not here" in failure.traceback for failure in snapshot.failures)
            break


async def test_pages_beyond_the_limit_are_refused_and_those_that_left_count_no_more(
    dashboard: Dashboard,
) -> None:
    async def open_page() -> trio.SocketStream:
        stream = await connect(dashboard)
        await stream.send_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return stream

    async def status(stream: trio.SocketStream) -> bytes:
        with trio.fail_after(60):
            return bytes(await stream.receive_some()).split(b" ")[1]

    streams = [await open_page() for _ in range(16)]
    assert {await status(stream) for stream in streams} == {b"200"}
    refused = await open_page()
    assert await status(refused) == b"503"
    for stream in (refused, *streams):
        await stream.aclose()
    with trio.fail_after(60):
        while True:
            again = await open_page()
            found = await status(again)
            await again.aclose()
            if found == b"200":
                break
            await trio.sleep(0.05)


async def test_connections_are_bounded(dashboard: Dashboard, system: ta.System) -> None:
    """A local user who opens 300 takes 64 descriptors, and keeps nobody else out."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    held = [await connect(dashboard) for _ in range(300)]
    async with httpx2.AsyncClient(trust_env=False) as client:
        assert (await client.get(dashboard.url)).status_code == 200
    assert descriptors() - before <= 300 + 64 + 2  # with the ends of this test
    for stream in held[: 300 - 65]:
        with trio.fail_after(60), suppress(trio.BrokenResourceError):
            assert await stream.receive_some() == b""
    for stream in held:
        await stream.aclose()
    assert system.tree().find("test/dashboard").restarts == 0


@pytest.mark.slow
async def test_requests_beyond_the_limit_are_refused(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "_CONNECTIONS", 3)
    async with open_dashboard(system) as dashboard:
        streams = []
        for number in range(4):
            streams.append(await connect(dashboard))
            await streams[-1].send_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (b"503" if number == 3 else b"200") in await streams[-1].receive_some()
        for stream in streams:
            await stream.aclose()
        assert system.tree().find("test/dashboard").restarts == 0


@pytest.mark.parametrize(
    "origin", ["http://elsewhere.example", "null", "http://127.0.0.1:1", "https://localhost"]
)
async def test_a_foreign_origin_reads_nothing(client: httpx2.AsyncClient, origin: str) -> None:
    for page in ("", "page.js", "events"):
        async with client.stream("GET", page, headers={"Origin": origin}) as found:
            assert found.status_code == 403


async def test_its_own_origin_reads(client: httpx2.AsyncClient, dashboard: Dashboard) -> None:
    for page in ("", "events"):
        async with client.stream("GET", page, headers={"Origin": dashboard.url.rstrip("/")}) as found:
            assert found.status_code == 200


async def test_http_2_is_not_served(dashboard: Dashboard) -> None:
    found = b""
    async with await connect(dashboard) as stream:
        await stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        with trio.fail_after(60), suppress(trio.BrokenResourceError):
            while part := await stream.receive_some():
                found += part
    # Of HTTP/2, the first frame would be that of the settings.
    assert b"\x00\x04\x00\x00\x00\x00\x00" not in found
    assert b" 101 " not in found
    assert b"<!doctype" not in found


@pytest.mark.parametrize(
    ("upgrade", "expected"),
    [
        (b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n", 200),
        (b"uPGRADE:H2C\r\n", 200),
        (b"Upgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\n", 505),
    ],
)
async def test_an_upgrade_is_ignored_or_refused_whatever_is_before_it(
    dashboard: Dashboard, upgrade: bytes, expected: int
) -> None:
    get = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    asks = get + b"Connection: close, Upgrade\r\n" + upgrade + b"\r\n"
    for parts in ((asks,), (asks[:50], asks[50:]), (get + b"\r\n", asks)):
        found = b""
        async with await connect(dashboard) as stream:
            with trio.fail_after(60), suppress(trio.BrokenResourceError):
                for part in parts:
                    await stream.send_all(part)
                    await wait_all_tasks_blocked(0.001)
                while part := await stream.receive_some():
                    found += part
        statuses = [int(answer[:3]) for answer in found.split(b"HTTP/1.1 ")[1:]]
        assert statuses == ([200, expected] if parts == (get + b"\r\n", asks) else [expected])


async def test_a_browser_that_wants_secure_pages_is_served(client: httpx2.AsyncClient) -> None:
    assert (await client.get("", headers={"Upgrade-Insecure-Requests": "1"})).status_code == 200


async def test_those_that_send_or_read_too_slowly_are_closed_without_a_word_in_the_log(
    system: ta.System,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(MODULE, "_HEAD_SECONDS", 0.05)
    monkeypatch.setattr(MODULE, "_SEND_SECONDS", 0.05)
    async with open_dashboard(system) as dashboard:
        opened = len(os.listdir("/proc/self/fd"))
        async with await connect(dashboard) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost")
            with trio.fail_after(60):
                assert await stream.receive_some() == b""
        large = attrs.evolve(dashboard.recorder.snapshot(), system="s" * 20_000_000)
        vars(dashboard.recorder)["snapshot"] = always(large)
        async with await connect(dashboard) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            taken = len(await stream.receive_some(1))
            # The server has begun, and closes its end.
            with trio.fail_after(60):
                while len(os.listdir("/proc/self/fd")) > opened + 1:  # noqa: ASYNC110  # nobody is told
                    await trio.sleep(0.001)
            # What is left of it is in the buffers of the kernel.
            with trio.fail_after(60), suppress(trio.BrokenResourceError):
                while part := await stream.receive_some():
                    taken += len(part)
        assert taken < 20_000_000
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        assert system.tree().find("test/dashboard").restarts == 0


async def test_texts_of_errors_are_shown_where_that_is_wanted(system: ta.System) -> None:
    worker = await system.spawn(Worker, name="worker")
    for wanted in (False, True):
        async with (
            open_dashboard(system, errors=wanted) as dashboard,
            aclosing(snapshots(dashboard)) as found,
        ):
            await worker.tell(Fail("a <secret>"))
            async for snapshot in found:
                if snapshot.failures:
                    break
            async with httpx2.AsyncClient(trust_env=False) as client:
                page = (await client.get(dashboard.url)).text
        [row] = snapshot.failures
        assert row.error == ("LookupError: a <secret>" if wanted else "LookupError")
        assert ("Traceback" in row.traceback) is wanted
        assert ("secret" in snapshot.to_json()) is wanted
        assert ("secret" in page) is wanted
        # Its first state is in the page, and nothing of it ends the script that holds it.
        assert '"test/worker"' in page
        assert "<secret" not in page


@pytest.mark.slow
async def test_one_that_does_not_read_holds_up_nothing(dashboard: Dashboard, system: ta.System) -> None:
    for number in range(200):
        await system.spawn(Worker, name=f"worker-{number}")
    stuck = socket.create_connection(("127.0.0.1", port_of(dashboard)))
    with stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = 0
        async with aclosing(snapshots(dashboard)) as found:
            async for snapshot in found:
                assert len(snapshot.actors) == 202
                seen += 1
                if seen == 10:
                    break


async def test_garbage_is_answered_and_the_page_lives(
    client: httpx2.AsyncClient, dashboard: Dashboard
) -> None:
    for data in (b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 100_000):
        async with await connect(dashboard) as stream:
            await stream.send_all(data)
            with trio.move_on_after(1):
                await stream.receive_some()
    assert (await client.get("")).status_code == 200


async def test_snapshots_that_take_long_come_less_often(
    dashboard: Dashboard, system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, snapshot = list[float](), dashboard.recorder.snapshot()

    def slow(**_: bool) -> SystemSnapshot:
        made.append(trio.current_time())
        # clock: the time that this work takes decides nothing
        time.sleep(0.05)
        return snapshot

    monkeypatch.setattr(dashboard.recorder, "snapshot", slow)
    async with await connect(dashboard) as stream:
        await stream.send_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with trio.fail_after(60):
            while len(made) < 3:
                await trio.sleep(0.01)
                await stream.receive_some()
    assert made[2] - made[0] >= 1.0
    assert system.tree().find("test/dashboard").restarts == 0


async def test_the_charts_begin_with_the_dashboard_and_ask_no_device(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at a page shows what was before it; while nobody looks, devices are left alone."""
    for module in (MODULE, importlib.import_module("trio_accel.telemetry._past")):
        monkeypatch.setattr(module, "INTERVAL", 0.1)
    worker = await system.spawn(Worker, name="worker")
    async with open_dashboard(system) as dashboard, system.open_device("cpu"):
        for _ in range(3):
            await worker.tell(Fail("it is not here"))
        past: Any = None
        async with httpx2.AsyncClient(base_url=dashboard.url, trust_env=False) as client:
            with trio.fail_after(60):
                while past is None or min(len(past[span]["rate"]) for span in ("recent", "whole")) < 3:
                    await trio.sleep(0.05)
                    assert dashboard.recorder.snapshot(asks=False).devices[0].age is None
                    past = (await client.get("past")).json()
    for lines in (past["recent"], past["whole"]):
        times, rates = zip(*lines["rate"], strict=True)
        assert len(times) >= 3
        assert list(times) == sorted(times)
        assert max(rates) > 0
        assert "test/worker Fail" in lines["latency"]


async def test_snapshots_for_the_charts_take_little_time(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, times, snapshot = list[bool](), list[float](), dashboard.recorder.snapshot()
    monkeypatch.setattr(MODULE, "INTERVAL", 0.05)

    def slow(*, asks: bool = True) -> SystemSnapshot:
        made.append(asks)
        times.append(trio.current_time())
        # clock: the time that this work takes decides nothing
        time.sleep(0.02)
        return snapshot

    monkeypatch.setattr(dashboard.recorder, "snapshot", slow)
    with trio.fail_after(60):
        while len(made) < 2:  # noqa: ASYNC110  # nobody is told
            await trio.sleep(0.01)
    # A hundred times as long as one takes, at least.
    assert times[1] - times[0] >= 1.9
    assert made == [False, False]


async def test_a_page_begins_with_a_snapshot(client: httpx2.AsyncClient, dashboard: Dashboard) -> None:
    dashboard.recorder.counter("tokens").add(3)
    text = (await client.get("")).text
    shown = json.loads(text[text.index('{"time"') : text.index("</script>", text.index('{"time"'))])
    assert [one["value"] for one in shown["readings"] if one["name"] == "tokens"] == [3.0]


async def test_a_port_that_is_taken(system: ta.System) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError, match="in use"):
            async with open_dashboard(system, port=taken.getsockname()[1]):
                pass
        assert len(list(system.tree().walk())) == 1


@pytest.mark.parametrize(
    "bad",
    [
        *({"port": port} for port in (-1, 70000, "80", 80.5, True)),
        *({"interval": interval} for interval in (0.0, 0.09, 61, math.nan, math.inf, "1", True, None)),
    ],
)
async def test_what_is_out_of_range(system: ta.System, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        async with open_dashboard(system, **bad):
            pass


@pytest.mark.parametrize("missing", ["starlette", "hypercorn"])
async def test_without_the_extra(system: ta.System, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    found = importlib.import_module

    def load(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, package)

    monkeypatch.setattr(importlib, "import_module", load)
    told = rf"package {missing} cannot be imported.*'\.\[dashboard\]' in a checkout"
    with pytest.raises(ta.NotSupportedError, match=told):
        async with open_dashboard(system):
            pass


async def test_a_server_that_fails_is_started_again_at_the_same_address(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_dashboard(system) as dashboard:

        def breaks(**_: bool) -> SystemSnapshot:
            monkeypatch.undo()
            raise RuntimeError("the server breaks")

        monkeypatch.setattr(dashboard.recorder, "snapshot", breaks)
        async with await connect(dashboard) as stream:
            await stream.send_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with trio.fail_after(60):
                while system.tree().find("test/dashboard").restarts != 1:  # noqa: ASYNC110  # nobody is told
                    await trio.sleep(0.01)
        async with httpx2.AsyncClient(trust_env=False) as client:
            with trio.fail_after(60):
                while not await is_served(client, dashboard.url):  # noqa: ASYNC110  # nobody is told
                    await trio.sleep(0.01)
    assert len(list(system.tree().walk())) == 1


async def test_a_connection_that_breaks_the_server_breaks_itself_alone(
    dashboard: Dashboard, client: httpx2.AsyncClient, system: ta.System
) -> None:
    upgrade = (
        b"GET /events HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAAA\r\n\r\n"
    )
    for _ in range(5):
        async with await connect(dashboard) as stream:
            await stream.send_all(upgrade)
            with trio.fail_after(60):
                assert b" 200 " in await stream.receive_some()
    assert (await client.get("")).status_code == 200
    assert system.tree().find("test/dashboard").restarts == 0


async def test_it_is_closed_while_a_browser_does_not_read(system: ta.System) -> None:
    stuck = socket.socket()
    with stuck:
        # So little that what is sent waits for it.
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with open_dashboard(system, interval=0.1) as dashboard:
            large = attrs.evolve(dashboard.recorder.snapshot(), system="s" * 20_000_000)
            vars(dashboard.recorder)["snapshot"] = always(large)
            stuck.connect(("127.0.0.1", port_of(dashboard)))
            stuck.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            # What fits into the buffers is there, and the rest waits.
            await trio.to_thread.run_sync(stuck.recv, 1)
        # It reads no more, so whoever waited for it would not return.


async def test_there_is_one_dashboard_and_then_another(system: ta.System) -> None:
    async with open_dashboard(system):
        with pytest.raises(ValueError, match="dashboard"):
            async with open_dashboard(system):
                pass
    async with open_dashboard(system) as dashboard:
        assert dashboard.url.startswith("http://127.0.0.1:")


async def test_an_error_of_the_program_stays_what_it_is(system: ta.System) -> None:
    with pytest.raises(LookupError, match="of the program"):
        async with open_dashboard(system):
            raise LookupError("of the program")


def test_what_is_sent_is_one_line_of_json() -> None:
    snapshot = SystemSnapshot(time=1.0, system="a\nb", pid=1, uptime=0.0, recorded=0.0)
    assert "\n" not in snapshot.to_json()
    assert json.loads(snapshot.to_json())["system"] == "a\nb"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
async def test_a_number_that_json_lacks_is_sent_as_null(
    system: ta.System, dashboard: Dashboard, number: float
) -> None:
    class Shows(Worker):
        @asynccontextmanager
        async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None]:
            context.show_readings(
                lambda: [
                    Reading(name="loss", kind="gauge", help="Its loss.", value=number),
                    Reading(
                        name="lengths",
                        kind="histogram",
                        help="Lengths.",
                        value=2.0,
                        bounds=(1.0, number),
                        counts=(1, 1, 0),
                    ),
                ]
            )
            yield

    await system.spawn(Shows, name="shows")
    async with aclosing(snapshots(dashboard)) as sent:
        snapshot = await anext(sent)
    values: list[Any] = [(row.value, row.bounds) for row in snapshot.readings]
    assert values == [(None, ()), (2.0, (1.0, None))]
    # JavaScript does not read NaN, which Python's JSON does.
    json.loads(dashboard.recorder.snapshot().to_json(), parse_constant=pytest.fail)
