"""Asks over the two connections to a node: admission, refusals, and the order of waiting messages."""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from cluster_entities import until

from trio_accel.cluster import _frames as frames
from trio_accel.cluster import _link as links

SECRET = bytes(range(32))
Serve: TypeAlias = Callable[[Any], Awaitable[object]]
BIG = np.zeros(64 << 20, np.uint8)


class Unreadable:
    """An object that can be pickled, but not read."""

    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ImportError("there is no such module")


class UnprintableError(Exception):
    """An error with a failing text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoError:
    """A class that a forged error names."""


class ForgedError(Exception):
    """An error that becomes another object when it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return NoError, ()


@attrs.define
class Served:
    """Serves the requests, and counts."""

    begun: int = 0
    running: int = 0
    most: int = 0

    async def __call__(self, request: Any) -> object:
        what, *given = request
        self.begun += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if what == "sleep":
                await trio.sleep(*given)
            if what == "fail":
                raise given[0]
            if what == "forge":
                raise ForgedError
            return given[0]
        finally:
            self.running -= 1


@asynccontextmanager
async def listening(serve: Serve, secret: bytes = SECRET) -> AsyncGenerator[tuple[Any, trio.Nursery], None]:
    """Have one end that listens; the nursery is for the other one."""
    async with trio.open_nursery() as nursery:
        yield await links.listen("127.0.0.1", secret, serve, nursery), nursery
        nursery.cancel_scope.cancel(reason="the test has ended")


@asynccontextmanager
async def linked(serve: Serve, window: float = 64) -> AsyncGenerator[Any, None]:
    async with listening(serve) as (address, nursery):
        yield await address.connect("far", window, nursery)


async def raw(address: Any, *data: bytes) -> trio.SocketStream:
    """Connect without knowing the rules."""
    stream = await trio.open_tcp_stream(address.host, address.port)
    for one in data:
        await stream.send_all(one)
    return stream


async def wait_closed(stream: trio.SocketStream) -> None:
    """Read until the other end has closed."""
    with trio.fail_after(60):
        try:
            while await stream.receive_some(1 << 16):
                pass
        except trio.BrokenResourceError:
            pass
    await stream.aclose()


async def ask_after(link: Any) -> None:
    """Ask independently of the events before."""
    assert await link.ask(("echo", "still here")) == "still here"


@pytest.mark.parametrize("secret", [bytes(32), b"", SECRET + b"x"], ids=["other", "none", "longer"])
async def test_a_wrong_secret_is_refused(secret: bytes) -> None:
    served = Served()
    async with listening(served) as (address, nursery):
        wrong = attrs.evolve(address, secret=secret)
        with pytest.raises(links.LinkLostError, match="node far cannot be reached") as caught:
            await wrong.connect("far", 64, nursery)
        assert not caught.value.is_begun
        await ask_after(await address.connect("far", 64, nursery))
    assert served.begun == 1


async def test_the_listener_must_also_know_the_secret() -> None:
    async with listening(Served(), b"another") as (address, nursery):
        with pytest.raises(links.LinkLostError, match="cannot be reached"):
            await attrs.evolve(address, secret=SECRET).connect("far", 64, nursery)


async def test_other_versions_do_not_join() -> None:
    async with listening(Served()) as (address, nursery):
        name = "trio_accel 0.0, Python 2.7"

        async def greet(connection: trio.SocketStream) -> None:
            await connection.receive_some(128)
            await connection.send_all(name.encode().ljust(64) + bytes(32))
            await connection.aclose()

        listeners = await nursery.start(trio.serve_tcp, greet, 0)
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(links.LinkLostError, match=r"it has trio_accel 0\.0, Python 2\.7, and this"):
            await attrs.evolve(address, port=port).connect("far", 64, nursery)
        # The other way round, who listens closes without a word.
        await wait_closed(await raw(address, name.encode().ljust(64), bytes(64)))
        await ask_after(await address.connect("far", 64, nursery))


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 100_000],
    ids=["nothing", "http", "zeros", "much"],
)
async def test_strangers_are_closed_and_the_end_stays(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_PROOF", 0.3)
    async with listening(Served()) as (address, nursery):
        link = await address.connect("far", 64, nursery)
        await wait_closed(await raw(address, data))
        await ask_after(link)


async def test_nobody_there() -> None:
    async with listening(Served()) as (address, _):
        pass
    async with trio.open_nursery() as nursery:
        with pytest.raises(links.LinkLostError, match="cannot be reached"):
            await address.connect("far", 64, nursery)


def frame(number: int, kind: int, *lengths: int) -> bytes:
    return struct.pack("<QBI", number, kind, len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths)


SENSELESS = {
    "an unknown kind": frame(1, 9, 4) + b"1234",
    "too many parts": struct.pack("<QBI", 1, 0, 1 << 31),
    "a length that no array has": frame(1, 0, (1 << 64) - 1),
    "a length beyond all memory": frame(1, 0, 1 << 62, 1 << 62),
    "more than a message may have": frame(1, 0, 1 << 30, 1 << 30),
    "half a head": b"123",
    "half a frame": frame(1, 0, 1000) + b"123",
}


@pytest.mark.parametrize("what", SENSELESS)
async def test_a_senseless_frame_ends_only_that_link(what: str) -> None:
    async with listening(Served()) as (address, nursery):
        good = await address.connect("far", 64, nursery)
        bad = await address.connect("far", 64, nursery)
        for stream in bad._streams:
            await stream.write(SENSELESS[what])
            # The rest of it never arrives.
            stream.sock.shutdown(trio.socket.SHUT_WR)
        with trio.fail_after(60):
            await bad.lost.wait()
        await ask_after(good)


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", pickle.dumps(Unreadable()), pickle.dumps(7), pickle.dumps((("echo", 1), "soon"))],
    ids=["nothing", "garbage", "no module", "no request", "no deadline"],
)
async def test_an_unreadable_request_fails_on_its_own(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    async with linked(served) as link, trio.open_nursery() as nursery:
        nursery.start_soon(link.ask, ("sleep", 0.1))
        await trio.testing.wait_all_tasks_blocked()
        pack, given = links.pack, iter([data])
        monkeypatch.setattr(links, "pack", lambda value: next(([one] for one in given), None) or pack(value))
        with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever reading it raises
            await link.ask("anything")
        assert not isinstance(caught.value, links.LinkLostError)
        assert "on node far" in caught.value.__notes__[0]
        monkeypatch.undo()
        await ask_after(link)


async def test_an_unreadable_reply_fails_on_its_own() -> None:
    async def serve(request: Any) -> object:
        return Unreadable() if request == "bad" else request[1]

    async with linked(serve) as link:
        with pytest.raises(ImportError, match="there is no such module"):
            await link.ask("bad")
        with pytest.raises(ImportError, match="there is no such module"):
            await link.ask(("echo", Unreadable()))
        await ask_after(link)


async def test_an_unsendable_message_is_the_error_of_its_ask() -> None:
    async def serve(request: Any) -> object:
        return (lambda: None) if request == "bad" else request[1]

    async with linked(serve) as link:
        for _ in range(2):
            with pytest.raises(TypeError, match="cannot go to another node"):
                await link.ask("bad")
            with pytest.raises(TypeError, match="cannot go to another node"):
                await link.ask(("echo", lambda: None))
        await ask_after(link)


async def test_strange_errors_end_only_their_request() -> None:
    async with linked(Served()) as link:
        with pytest.raises(UnprintableError):
            await link.ask(("fail", UnprintableError()))
        with pytest.raises(RuntimeError, match="ForgedError"):
            await link.ask(("forge",))
        with pytest.raises(KeyError, match="gone") as caught:
            await link.ask(("fail", KeyError("gone")))
        assert "in __call__" in caught.value.__notes__[0]
        await ask_after(link)


async def test_a_moved_deadline_is_sent_to_the_peer() -> None:
    """The node has given up by the deadline of the request."""

    async def serve(request: Any) -> None:
        begun.set()
        await trio.sleep(1000.0)

    scope, begun = trio.CancelScope(), trio.Event()

    async def move() -> None:
        # The node has the deadline by now.
        await begun.wait()
        scope.deadline += 1000.0

    async with linked(serve) as link, trio.open_nursery() as nursery:
        scope.deadline = trio.current_time() + 2.0
        nursery.start_soon(move)
        with trio.fail_after(60), scope, pytest.raises(trio.TooSlowError, match="with which it was asked"):
            await link.ask("anything")


async def test_a_small_ask_does_not_wait_for_large_asks() -> None:
    done = list[str]()

    async def ask(link: Any, name: str, value: object) -> None:
        assert len(await link.ask(("echo", value))) == len(value)  # type: ignore[arg-type]
        done.append(name)

    async with linked(Served()) as link, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(ask, link, "large", BIG)
        while not link._streams[1].posted.statistics().current_buffer_used:  # noqa: ASYNC110  # of the link
            await trio.lowlevel.checkpoint()
        nursery.start_soon(ask, link, "small", b"small")
    assert done.index("small") < 2
    assert done.count("large") == 4


async def test_arrays_arrive_unchanged() -> None:
    given = {
        "large": np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024),
        "turned": np.arange(12.0).reshape(3, 4).T,
        "none": np.zeros((0, 3)),
        "text": "x" * 100_000,
    }
    async with linked(Served()) as link:
        for _ in range(2):
            found = await link.ask(("echo", given))
            assert found["text"] == given["text"]
            for name in ("large", "turned", "none"):
                np.testing.assert_array_equal(found[name], given[name])
                assert found[name].flags.writeable


async def test_a_message_of_very_many_arrays_is_sent_like_any_other() -> None:
    given = [np.full(1, number) for number in range((1 << 16) + 5)]
    async with linked(Served()) as link:
        # Before it holds the loop, the other end has admitted the connection, which has two seconds for that.
        await ask_after(link)
        found = await link.ask(("echo", given))
        assert np.concatenate(found).tolist() == list(range(len(given)))
        found[0][0] = found[-1][0] = 7
        await ask_after(link)


async def test_an_error_beyond_all_bounds_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its text and its pickle together are more than a message may have.
    monkeypatch.setattr(frames, "MOST_BYTES", 3 << 20)
    async with linked(Served()) as link:
        with pytest.raises(RuntimeError) as caught:
            await link.ask(("fail", ValueError("x" * (2 << 20))))
        text = str(caught.value)
        assert (text[:13], len(text)) == ("ValueError: x", 1 << 20)
        with pytest.raises(ValueError, match="is too large"):
            await link.ask(("fail", ValueError("x" * (4 << 20))))
        await ask_after(link)


async def test_cancelled_asks_hold_no_place() -> None:
    served = Served()
    async with linked(served, window=50) as link:
        for _ in range(40):
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(link.ask, ("sleep", 1000))
                # Some are cancelled before they were sent, some while they are served.
                await trio.lowlevel.checkpoint()
                if served.begun % 2:
                    # clock: any moment will do
                    await trio.sleep(0.002)
                nursery.cancel_scope.cancel(reason="nobody waits for these")
        await ask_after(link)
        with trio.fail_after(60):
            await until(lambda: not served.running)
        assert not link._replies
        assert not link._outcomes
        # The window is free again, all of it.
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(link.ask, ("sleep", 0.01))


async def test_who_waits_for_answers_waits_for_no_cancelled_ask() -> None:
    scope = trio.CancelScope()

    async def ask() -> None:
        with scope:
            await link.ask(("sleep", 1000))

    async with linked(Served()) as link:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(link.wait_answered)
                await trio.testing.wait_all_tasks_blocked()
                assert len(nursery.child_tasks) == 2
                scope.cancel(reason="nobody waits for its reply")


async def test_a_cancelled_large_ask_is_not_overtaken_by_its_cancellation() -> None:
    served = Served()
    async with linked(served) as link:
        for _ in range(3):
            with trio.move_on_after(0.005):
                await link.ask(("sleep", 1000, BIG))
        await ask_after(link)
        with trio.fail_after(60):
            posted = link._streams[1].posted
            await until(lambda: not (posted.statistics().current_buffer_used or served.running))


async def test_a_deadline_is_sent_with_the_ask() -> None:
    served = Served()
    async with linked(served) as link:
        start = trio.current_time()
        with trio.move_on_after(0.3) as scope:
            await link.ask(("sleep", 1000))
        assert scope.cancelled_caught
        assert trio.current_time() - start > 0.29
        with trio.fail_after(60):
            await until(lambda: not served.running)


async def test_the_window_bounds_the_messages_in_flight() -> None:
    served = Served()
    async with linked(served, window=3) as link, trio.open_nursery() as nursery:
        for _ in range(9):
            nursery.start_soon(link.ask, ("sleep", 0.05))
        await trio.testing.wait_all_tasks_blocked(0.02)
        # The cluster's own messages do not wait for them.
        assert await link.ask(("echo", "table"), at_once=True) == "table"
        assert served.running == 3
    assert served.most == 4


@pytest.mark.parametrize("is_far", [True, False])
async def test_a_lost_link_ends_the_messages_in_flight(is_far: bool) -> None:
    ends = itertools.count()
    async with trio.open_nursery() as outer:
        far = await outer.start(_far_end)
        link = await far[0].connect("far", 2, outer)

        async def ask(wanted: bool) -> None:
            with pytest.raises(links.LinkLostError) as caught:
                await link.ask(("sleep", 1000))
            assert caught.value.is_begun is wanted
            next(ends)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask, True)
            await trio.testing.wait_all_tasks_blocked(0.02)
            # These wait for the window, and have not begun.
            for _ in range(2):
                nursery.start_soon(ask, False)
            await trio.testing.wait_all_tasks_blocked(0.02)
            if is_far:
                far[1].cancel()
            else:
                link.close()
        assert next(ends) == 4
        await link.lost.wait()
        await ask_begins_nothing(link)
        outer.cancel_scope.cancel()


async def _far_end(task_status: trio.TaskStatus[tuple[Any, trio.CancelScope]]) -> None:
    async with listening(Served()) as (address, nursery):
        task_status.started((address, nursery.cancel_scope))
        await trio.sleep_forever()


async def ask_begins_nothing(link: Any) -> None:
    with pytest.raises(links.LinkLostError, match="node far is gone") as caught:
        await link.ask(("echo", 1))
    assert not caught.value.is_begun


async def test_of_two_that_bind_a_port_one_listens_there() -> None:
    # Another agent listens at the first port.
    with trio.socket.socket() as first, trio.socket.socket() as spare:
        first.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
        await first.bind(("127.0.0.1", 0))
        await spare.bind(("127.0.0.1", 0))
        ports = [first.getsockname()[1], spare.getsockname()[1]]
        first.listen(1)
        spare.close()
        async with trio.open_nursery() as nursery:
            address = await links.listen("127.0.0.1", b"s" * 32, serve_nothing, nursery, ports=ports)
            assert address.port == ports[1]
            with pytest.raises(OSError, match="none of these ports free"):
                await links.listen("127.0.0.1", b"s" * 32, serve_nothing, nursery, ports=ports)
            nursery.cancel_scope.cancel()


async def test_a_port_is_lost_between_bind_and_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    with trio.socket.socket() as one:
        kind: Any = type(one)
    real, tries = kind.listen, list[int]()

    def listen(self: Any, backlog: int) -> None:
        tries.append(self.getsockname()[1])
        if len(tries) == 1:
            raise OSError(98, "in use")
        real(self, backlog)

    monkeypatch.setattr(kind, "listen", listen, raising=False)
    async with trio.open_nursery() as nursery:
        address = await links.listen("127.0.0.1", b"s" * 32, serve_nothing, nursery, ports=(0, 0))
        assert address.port == tries[1] != tries[0]
        nursery.cancel_scope.cancel()


async def serve_nothing(request: object) -> None:
    await trio.lowlevel.checkpoint()
