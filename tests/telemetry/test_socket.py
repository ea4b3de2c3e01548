"""The observer socket: what clients see, and clients that are slow, dead, too many or talk nonsense."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import trio_accel as ta
from trio_accel.telemetry import ObserverSocketError, list_programs, open_observation, open_socket


@attrs.frozen
class Double(ta.Request["Doubler", int]):
    n: int


class Doubler(ta.Actor):
    @ta.handles(Double)
    async def double(self, message: Double) -> int:
        return 2 * message.n


class Lines:
    """A client that reads and writes lines, and checks nothing."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.rest = b""

    async def send(self, text: bytes) -> None:
        await self.stream.send_all(text)

    async def next(self) -> dict[str, Any] | None:
        while b"\n" not in self.rest:
            try:
                part = await self.stream.receive_some()
            except trio.BrokenResourceError:
                part = b""
            if not part:
                return None
            self.rest += part
        line, _, self.rest = self.rest.partition(b"\n")
        content: dict[str, Any] = json.loads(line)
        return content


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own; socket paths must be short."""
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    (folder / "tmp").mkdir()
    # However busy the machine is: a snapshot that takes long comes less often.
    monkeypatch.setattr("trio_accel.telemetry._socket.perf_counter", lambda: 0.0)
    return folder


async def connect(path: Path) -> Lines:
    return Lines(await trio.open_unix_socket(str(path)))


class TestSnapshots:
    async def test_a_client_is_told_the_program_and_then_its_tree(self, system: ta.System) -> None:
        await system.spawn(Doubler, name="doubler")
        async with open_socket(system) as opened, open_observation(opened.path, interval=0.1) as observation:
            assert observation.system == "test"
            assert observation.program == ta.telemetry.ObservedProgram(
                name=f"test-{os.getpid()}", pid=os.getpid(), path=opened.path
            )
            snapshot = await anext(observation)
            assert [actor.path for actor in snapshot.actors] == ["test", "test/doubler", "test/observer"]
            assert opened.clients == 1

    async def test_the_counters_of_the_next_snapshot_have_gone_on(
        self, system: ta.System, autojump_clock: trio.testing.MockClock
    ) -> None:
        doubler = await system.spawn(Doubler, name="doubler")
        async with open_socket(system) as opened, open_observation(opened.path) as observation:
            handled = []
            for _ in range(3):
                snapshot = await anext(observation)
                handled += [actor.handled for actor in snapshot.actors if actor.path == "test/doubler"]
                assert await doubler.ask(Double(21)) == 42
            assert handled == [0, 1, 2]

    @pytest.mark.parametrize("interval", [0.1, 1.0, 7.5, 60])
    async def test_they_come_at_the_interval_asked_for(
        self, system: ta.System, interval: float, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with open_socket(system) as opened:
            client = await connect(opened.path)
            async with client.stream:
                await client.send(json.dumps({"interval": interval}).encode() + b"\n")
                assert "protocol" in (await client.next() or {})
                await client.next()
                # Until the request has been read: the default is 1 s.
                await client.next()
                times = []
                for _ in range(4):
                    assert "actors" in (await client.next() or {})
                    times.append(trio.current_time())
                gaps = [after - before for before, after in itertools.pairwise(times)]
                assert gaps == pytest.approx([interval] * 3, abs=0.02)

    async def test_an_interval_can_be_changed_in_the_middle(
        self, system: ta.System, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with open_socket(system) as opened:
            client = await connect(opened.path)
            async with client.stream:
                await client.send(b'{"interval":60}\n')
                assert "protocol" in (await client.next() or {})
                await client.next()
                await trio.sleep(5)
                began = trio.current_time()
                await client.send(b'{"interval":0.5}\n')
                await client.next()
                await client.next()
                assert trio.current_time() - began < 2.0

    async def test_all_clients_get_the_same_bytes_and_cost_one_snapshot(
        self, system: ta.System, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
    ) -> None:
        taken: list[ta.telemetry.SystemSnapshot] = []
        look = ta.telemetry.Recorder.snapshot

        def count(recorder: ta.telemetry.Recorder) -> ta.telemetry.SystemSnapshot:
            taken.append(look(recorder))
            return taken[-1]

        monkeypatch.setattr(ta.telemetry.Recorder, "snapshot", count)
        async with open_socket(system) as opened:
            clients = [await connect(opened.path) for _ in range(5)]
            for client in clients:
                await client.next()
            first = [await client.next() for client in clients]
            assert all(one == first[0] for one in first)
            assert len(taken) == 1
            for client in clients:
                await client.stream.aclose()

    async def test_a_costly_snapshot_comes_less_often_than_was_asked_for(
        self, system: ta.System, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
    ) -> None:
        # Each look at the clock is 0.1 s after the one before: a snapshot seems to take 0.1 s, which may be
        # 2 % of the time.
        times = iter(range(1000))
        monkeypatch.setattr("trio_accel.telemetry._socket.perf_counter", lambda: next(times) / 10)
        async with open_socket(system) as opened, open_observation(opened.path, interval=0.1) as observation:
            await anext(observation)
            began = trio.current_time()
            await anext(observation)
            assert trio.current_time() - began == pytest.approx(5.0, abs=0.05)


class TestBadClients:
    """None of them holds the program, or makes it keep more and more."""

    @pytest.mark.parametrize(
        ("request_", "why"),
        [
            (b"hello\n", "must be one JSON object, got b'hello'"),
            (b"GET / HTTP/1.1\r\n", "must be one JSON object"),
            (b"\xff\xfe\x00\n", "must be one JSON object"),
            (b"[" * 900 + b"\n", "must be one JSON object"),
            (b"[1]\n", "must be one JSON object"),
            (b"{}\n", "interval must be a number of seconds from 0.1 to 60, got None"),
            (b'{"interval": 0}\n', "from 0.1 to 60, got 0"),
            (b'{"interval": 0.09}\n', "got 0.09"),
            (b'{"interval": 61}\n', "got 61"),
            (b'{"interval": 1e999}\n', "got inf"),
            (b'{"interval": NaN}\n', "got nan"),
            (b'{"interval": true}\n', "got True"),
            (b'{"interval": "1"}\n', "got 1"),
            (b"x" * 5000, "at most 1024 bytes"),
        ],
        ids=lambda value: str(value)[:24],
    )
    async def test_nonsense_is_answered_by_one_line_and_the_end(
        self, system: ta.System, request_: bytes, why: str, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with open_socket(system) as opened:
            client = await connect(opened.path)
            async with client.stream:
                await client.send(request_)
                lines = []
                while (line := await client.next()) is not None:
                    lines.append(line)
            assert why in lines[-1]["error"]
            assert "error" not in lines[0]
            await trio.testing.wait_all_tasks_blocked()
            assert opened.clients == 0

    async def test_a_client_that_does_not_read_is_let_go_and_others_are_served(
        self, system: ta.System, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        large = {"text": "x" * 1_000_000}
        monkeypatch.setattr(ta.telemetry.SystemSnapshot, "to_json", lambda _: json.dumps(large))
        async with open_socket(system) as opened:
            slow, good = await connect(opened.path), await connect(opened.path)
            assert "protocol" in (await good.next() or {})
            began = trio.current_time()
            for _ in range(8):
                assert await good.next() == large
            assert trio.current_time() - began == pytest.approx(7.0, abs=0.1)
            # The first snapshot did not fit into the kernel's buffer: its deadline was at 5 s.
            assert opened.clients == 1
            assert await drained(slow) < 1_000_000
            await good.stream.aclose()
            await slow.stream.aclose()

    async def test_a_flood_of_requests_stays_with_its_sender(
        self, system: ta.System, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with open_socket(system) as opened:
            client = await connect(opened.path)
            sent = 0
            with trio.move_on_after(10):
                while True:
                    sent += await client.stream.socket.send(b'{"interval": 60}\n' * 1000)
            buffer = client.stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            # In 10 s it reads 100 times 1024 bytes; the rest waits in the kernel, whose bound is its buffer.
            assert sent < 100 * 1024 + 2 * buffer
            assert "protocol" in (await client.next() or {})
            assert "actors" in (await client.next() or {})
            await client.stream.aclose()

    async def test_a_client_that_is_killed_leaves_its_place(self, system: ta.System) -> None:
        connecting = (
            "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
            "s.recv(10); print('ready', flush=True); time.sleep(60)"
        )
        async with open_socket(system) as opened, started(connecting, str(opened.path)) as child:
            assert opened.clients == 1
            child.kill()
            await until(lambda: not opened.clients)

    async def test_more_than_eight_clients_are_refused(self, system: ta.System) -> None:
        async with open_socket(system) as opened:
            clients = [await connect(opened.path) for _ in range(8)]
            for client in clients:
                await client.next()
            with pytest.raises(ObserverSocketError, match="8 clients are connected already"):
                async with open_observation(opened.path):
                    pass
            for client in clients[1:]:
                await client.stream.aclose()
            # A place is free again.
            await until(lambda: opened.clients == 1)
            async with open_observation(opened.path) as observation:
                await anext(observation)
            await clients[0].stream.aclose()

    async def test_a_flood_of_connections_is_taken_slowly_and_leaves_nothing(
        self, system: ta.System, autojump_clock: trio.testing.MockClock
    ) -> None:
        async with open_socket(system) as opened:
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(100):
                with trio.socket.socket(trio.socket.AF_UNIX) as connection:
                    await connection.connect(str(opened.path))
            began = trio.current_time()
            async with open_observation(opened.path) as observation:
                await anext(observation)
            # 50 in a second: this one was the last.
            assert trio.current_time() - began == pytest.approx(2.0, abs=0.1)
            await trio.sleep(1)
            assert opened.clients == 0

    async def test_another_user_is_refused(
        self, system: ta.System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with open_socket(system) as opened:
            monkeypatch.setattr(os, "getuid", lambda: 4711)
            monkeypatch.setattr("trio_accel.telemetry._socket.peer_of", lambda _: (99, 1234))
            client = await connect(opened.path)
            assert await client.next() is None
            await client.stream.aclose()
        assert "refused process 99 of user 1234" in caplog.text

    async def test_an_error_of_the_snapshot_drops_the_client_alone(
        self, system: ta.System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with open_socket(system) as opened:
            with monkeypatch.context() as patch:
                patch.setattr(ta.telemetry.SystemSnapshot, "to_json", lambda _: 1 / 0)
                client = await connect(opened.path)
                await client.next()
                assert await client.next() is None
                await client.stream.aclose()
            async with open_observation(opened.path) as observation:
                await anext(observation)
        assert "ZeroDivisionError" in caplog.text


PROGRAM = """
import sys, trio, trio_accel as ta
async def main():
    async with ta.open_system("other") as system, ta.telemetry.open_socket(system, sys.argv[1]):
        print("ready", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@asynccontextmanager
async def started(program: str, *arguments: str) -> AsyncGenerator[trio.Process]:
    """A program that has said that it is ready; killed at the end."""
    async with trio.open_nursery() as nursery:
        run = functools.partial(
            trio.run_process, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        child: trio.Process = await nursery.start(run, [sys.executable, "-c", program, *arguments])
        assert child.stdout is not None
        async with child.stdout:
            said = b""
            while b"ready" not in said:
                part = await child.stdout.receive_some()
                assert part, "the program has ended"
                said += part
            yield child
        nursery.cancel_scope.cancel()


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not holds():  # noqa: ASYNC110  # the kernel tells nobody
            await trio.sleep(0.01)


async def drained(client: Lines) -> int:
    """Bytes that were in the connection when the program closed it."""
    count = len(client.rest)
    while part := await client.stream.receive_some():
        count += len(part)
    return count


class TestNames:
    async def test_a_second_program_with_the_name_is_told_the_first(
        self, system: ta.System, runtime: Path
    ) -> None:
        path = runtime / "trio_accel" / "same.sock"
        async with started(PROGRAM, "same") as child:
            with pytest.raises(
                ObserverSocketError, match=rf"process {child.pid} has .* the name 'same' open"
            ):
                async with open_socket(system, "same"):
                    pass
            assert [(one.name, one.pid) for one in list_programs()] == [("same", child.pid)]
            child.kill()
            await child.wait()
        # What it left is taken over.
        assert path.is_socket()
        assert list_programs() == []
        async with open_socket(system, "same") as opened:
            assert opened.path == path
            assert [(one.name, one.pid) for one in list_programs()] == [("same", os.getpid())]
        assert not path.exists()

    async def test_ctrl_c_removes_the_socket(self, runtime: Path) -> None:
        async with started(PROGRAM, "mine") as child:
            assert [one.name for one in list_programs()] == ["mine"]
            child.send_signal(signal.SIGINT)
            assert await child.wait() != 0
        assert list((runtime / "trio_accel").iterdir()) == []

    async def test_sockets_of_the_dead_are_cleaned_up_and_nothing_else(
        self, system: ta.System, runtime: Path
    ) -> None:
        folder = runtime / "trio_accel"
        folder.mkdir(mode=0o700)
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(folder / "dead-1.sock"))
        dead.close()
        (folder / "notes.sock").write_text("a file")
        async with open_socket(system, "mine"):
            assert sorted(path.name for path in folder.iterdir()) == ["mine.sock", "notes.sock"]
        with pytest.raises(ObserverSocketError, match=r"cannot open .*notes.sock"):
            async with open_socket(system, "notes"):
                pass
        assert (folder / "notes.sock").read_text() == "a file"

    async def test_two_systems_of_a_program_have_names_of_their_own(self, system: ta.System) -> None:
        async with ta.open_system("ô ther") as other:
            async with open_socket(system) as one, open_socket(other) as two:
                assert (one.name, two.name) == (f"test-{os.getpid()}", f"__ther-{os.getpid()}")
                assert len(list_programs()) == 2
            with pytest.raises(ObserverSocketError, match=f"process {os.getpid()} has"):
                async with open_socket(system, "same"), open_socket(other, "same"):
                    pass

    async def test_a_system_has_one_at_a_time(self, system: ta.System) -> None:
        async with open_socket(system, "one") as opened:
            with pytest.raises(ValueError, match="observer"):
                async with open_socket(system, "two"):
                    pass
            assert [one.path for one in list_programs()] == [opened.path]
        async with open_socket(system, "two"):
            assert [one.name for one in list_programs()] == ["two"]

    async def test_an_error_of_the_body_stays_what_it_is(self, system: ta.System) -> None:
        with pytest.raises(KeyError):
            async with open_socket(system, "one"):
                raise KeyError("of the body")
        assert list_programs() == []

    async def test_a_server_that_fails_is_restarted_at_the_same_path(
        self, system: ta.System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        serve = trio.serve_listeners
        calls: list[int] = []

        async def fail_once(*arguments: Any, **more: Any) -> None:
            calls.append(1)
            if len(calls) == 1:
                more["task_status"].started([])
                raise RuntimeError("on purpose")
            await serve(*arguments, **more)

        monkeypatch.setattr("trio.serve_listeners", fail_once)
        async with open_socket(system) as opened, open_observation(opened.path) as observation:
            [row] = [row for row in (await anext(observation)).actors if row.name == "observer"]
            assert (row.restarts, len(calls)) == (1, 2)

    async def test_a_socket_that_another_took_meanwhile_is_left_alone(self, system: ta.System) -> None:
        async with open_socket(system, "mine") as opened:
            opened.path.unlink()
            opened.path.write_text("of another one")
        assert opened.path.read_text() == "of another one"

    @pytest.mark.parametrize(
        "name", ["", ".", "..", ".hidden", "-x", "a/b", "../up", "a b", "ü", "x" * 65, 7]
    )
    async def test_what_is_no_name_is_refused(self, system: ta.System, name: Any) -> None:
        with pytest.raises(ValueError, match="name must be 1 to 64 letters"):
            async with open_socket(system, name):
                pass

    async def test_many_programs_open_at_once(self, system: ta.System) -> None:
        results: list[str] = []

        async def try_one() -> None:
            try:
                async with open_socket(system, "wanted"):
                    results.append("open")
                    await trio.sleep(0.3)
            except ObserverSocketError:
                results.append("refused")

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(try_one)
        assert sorted(results) == ["open", *["refused"] * 9]


class TestFolder:
    async def test_only_the_user_may_enter(self, system: ta.System, runtime: Path) -> None:
        mask = os.umask(0)
        try:
            async with open_socket(system) as opened:
                assert stat.S_IMODE(opened.path.lstat().st_mode) == 0o600
                assert stat.S_ISSOCK(opened.path.lstat().st_mode)
                assert opened.path.parent == runtime / "trio_accel"
                assert stat.S_IMODE(opened.path.parent.lstat().st_mode) == 0o700
        finally:
            os.umask(mask)

    async def test_without_a_runtime_folder_it_lies_among_temporary_files(
        self, system: ta.System, runtime: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for value in ("", "relative", str(runtime / "missing")):
            monkeypatch.setenv("XDG_RUNTIME_DIR", value)
            async with open_socket(system) as opened:
                assert opened.path.parent == runtime / "tmp" / f"trio_accel-{os.getuid()}"
                assert stat.S_IMODE(opened.path.parent.lstat().st_mode) == 0o700
                assert [one.path for one in list_programs()] == [opened.path]

    async def test_a_symbolic_link_is_refused(self, system: ta.System, runtime: Path) -> None:
        (runtime / "elsewhere").mkdir(mode=0o700)
        (runtime / "trio_accel").symlink_to(runtime / "elsewhere")
        await refused(system, "a symbolic link perhaps")
        assert list((runtime / "elsewhere").iterdir()) == []

    async def test_a_folder_that_others_may_enter_is_refused(self, system: ta.System, runtime: Path) -> None:
        (runtime / "trio_accel").mkdir()
        (runtime / "trio_accel").chmod(0o755)
        await refused(system, "other users may enter .*; run: chmod 700")

    async def test_the_folder_of_another_user_is_refused(
        self, system: ta.System, runtime: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", "")
        uid = os.getuid()
        folder = runtime / "tmp" / f"trio_accel-{uid + 1}"
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        await refused(system, rf"belongs to another user \(uid {uid}\)")

    async def test_a_path_that_is_too_long_is_refused(
        self, system: ta.System, runtime: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deep = runtime / ("x" * 90)
        deep.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
        await refused(system, "too long for this platform")


async def refused(system: ta.System, why: str) -> None:
    with pytest.raises(ObserverSocketError, match=why):
        async with open_socket(system):
            pass
    assert list_programs() == []


class TestOtherEnd:
    async def test_a_program_that_ends_ends_the_snapshots(self, system: ta.System) -> None:
        async with open_socket(system) as opened, open_observation(opened.path) as observation:
            await anext(observation)
            path = opened.path
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(observation)
            assert scope.cancelled_caught
        with pytest.raises(ObserverSocketError, match="no program listens at"):
            async with open_observation(path):
                pass

    async def test_the_socket_closes_under_its_clients(self, system: ta.System) -> None:
        async with trio.open_nursery() as nursery, open_socket(system) as opened:
            # It outlives the socket: that is what is tested.
            seen = await nursery.start(count_snapshots, opened.path)  # noqa: ASYNC111
            # The body is over, and the loop below ends by itself.
        assert seen[0] >= 1

    @pytest.mark.parametrize(
        ("answer", "why"),
        [
            (b"hello\n", "no observer socket"),
            (b'{"protocol": 2}\n', "no observer socket of this version"),
            (b"", "no observer socket: it closed the connection without a word"),
            (b'{"protocol": 1}\n', "the name that it gives is none"),
            (b'{"protocol": 1, "name": "\\u001b[2J"}\n', "the name that it gives is none"),
            (b'{"error":"' + b"x" * 9999, "closed the connection without a word"),
            (b'{"error":"' + b"x" * 9999 + b'"}\n', "the program refused: x{300}$"),
            (b'{"error": "go away"}\n', "the program refused: go away"),
            (b'{"protocol": 1, "name": "x"}\n7\n', "sent what is no snapshot"),
            (b'{"protocol": 1, "name": "x"}\n{"snap": {}}\n', "sent what is no snapshot"),
        ],
    )
    async def test_a_server_that_talks_nonsense(self, runtime: Path, answer: bytes, why: str) -> None:
        path = runtime / "odd.sock"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()
        async with trio.open_nursery() as nursery:

            async def serve(stream: trio.SocketStream) -> None:
                async with stream:
                    await stream.send_all(answer)

            listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            with pytest.raises(ObserverSocketError, match=why):
                async with open_observation(path) as observation:
                    await anext(observation)
            nursery.cancel_scope.cancel()

    @pytest.mark.skipif(
        sys.platform != "linux", reason="elsewhere a full queue refuses as if no program listened"
    )
    async def test_a_program_whose_queue_is_full_is_waited_for(
        self, runtime: Path, nursery: trio.Nursery
    ) -> None:
        """As one that has not taken a connection for long, since its loop is held."""
        path = runtime / "held.sock"
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
            listening.bind(str(path))
            listening.listen(0)
            first.connect(str(path))
            names: list[str] = []
            is_over = trio.Event()

            async def look() -> None:
                async with open_observation(path) as observation:
                    names.append(observation.program.name)
                is_over.set()

            nursery.start_soon(look)
            await trio.testing.wait_all_tasks_blocked(0.01)
            listening.accept()[0].close()
            listener = trio.socket.from_stdlib_socket(listening)
            with trio.fail_after(10):
                connection, _ = await listener.accept()
                await connection.send(b'{"protocol": 1, "name": "held"}\n')
                await is_over.wait()
            connection.close()
        assert names == ["held"]

    @pytest.mark.parametrize("interval", [0, 0.05, 61, float("nan"), "1", None])
    async def test_an_interval_that_is_none(self, system: ta.System, interval: Any) -> None:
        async with open_socket(system) as opened:
            with pytest.raises(ValueError, match="interval must be"):
                async with open_observation(opened.path, interval=interval):
                    pass
            assert opened.clients == 0


async def count_snapshots(path: Path, task_status: trio.TaskStatus[list[int]]) -> None:
    seen = [0]
    async with open_observation(path, interval=0.1) as observation:
        async for _ in observation:
            seen[0] += 1
            if seen[0] == 1:
                task_status.started(seen)
