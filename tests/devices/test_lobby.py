"""Listeners with connections that have to prove themselves: a bounded number, and a bounded time."""

from __future__ import annotations

import errno
import logging
import resource
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from trio_accel.devices.base import _lobby as lobbies

WORD = b"a member"


async def echo(stream: trio.SocketStream, admit: lobbies.Admit) -> None:
    """Admit who sends the word; a member that sends `fail` meets a bug."""
    word = b""
    while len(word) < len(WORD):
        if not (part := await stream.receive_some(len(WORD) - len(word))):
            return
        word += part
    if word != WORD:
        raise OSError("this is not a member")
    admit()
    async with stream:
        while data := await stream.receive_some():
            if data == b"fail":
                raise LookupError("a bug of the server")
            await stream.send_all(data)


@asynccontextmanager
async def listening(
    serve: Any = echo, max_strangers: int = 4, seconds: float = 60.0
) -> AsyncGenerator[Callable[..., Any], None]:
    """Yield a function that connects, and sends some bytes."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    made: list[trio.SocketStream] = []

    async def connect(data: bytes = b"") -> trio.SocketStream:
        made.append(await trio.open_tcp_stream("127.0.0.1", port))
        if data:
            await made[-1].send_all(data)
        return made[-1]

    with trio.fail_after(60):
        async with listener, trio.open_nursery() as nursery:
            nursery.start_soon(
                lobbies.Lobby(serve, max_strangers=max_strangers, seconds=seconds).run, listener
            )
            yield connect
            nursery.cancel_scope.cancel(reason="the test has ended")
    for stream in made:
        # The listener has closed its end of each.
        assert await end_of(stream)
        await stream.aclose()


async def end_of(stream: trio.SocketStream) -> bool:
    """Wait until the other end has closed a connection, for a minute."""
    with trio.move_on_after(60):
        try:
            while await stream.receive_some():
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        return True
    return False


async def ask(stream: trio.SocketStream) -> None:
    await stream.send_all(b"still here")
    assert await stream.receive_some() == b"still here"


async def is_open(stream: trio.SocketStream) -> bool:
    with trio.move_on_after(0.02):
        await end_of(stream)
        return False
    return True


async def test_the_oldest_of_too_many_strangers_is_closed() -> None:
    async with listening() as connect:
        member = await connect(WORD)
        await ask(member)
        strangers = []
        for number in range(20):
            strangers.append(await connect(b"a m"[: number % 4]))
            if number % 5 == 0:
                await ask(member)
                await ask(await connect(WORD))
        for stranger in strangers[:-4]:
            assert await end_of(stranger)
        assert [await is_open(stranger) for stranger in strangers[-4:]] == [True] * 4
        # A slow one still proves itself.
        await strangers[-1].send_all(WORD[len(b"a m"[: 19 % 4]) :])
        await ask(strangers[-1])


async def test_a_stranger_has_so_many_seconds_and_a_member_all(
    mock_clock: trio.testing.MockClock,
) -> None:
    async with listening(seconds=30.0) as connect:
        member, silent, slow = await connect(WORD), await connect(), await connect()
        await ask(member)
        # A byte from time to time gives no more of them.
        for byte in WORD[:-1]:
            await slow.send_all(bytes([byte]))
            await trio.testing.wait_all_tasks_blocked(0.02)
            mock_clock.jump(30.0 / len(WORD))
        async with trio.open_nursery() as nursery:
            for stranger in (silent, slow):
                nursery.start_soon(end_of, stranger)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert len(nursery.child_tasks) == 2
            mock_clock.jump(30.0 / len(WORD))
        for stranger in (silent, slow):
            assert await end_of(stranger)
        await ask(member)


async def test_a_failure_ends_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as connect:
        member, stranger, failing = await connect(WORD), await connect(b"nobody__"), await connect(WORD)
        assert await end_of(stranger)
        await ask(failing)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        await failing.send_all(b"fail")
        assert await end_of(failing)
        await trio.testing.wait_all_tasks_blocked()
        assert "a connection has failed" in caplog.text
        await ask(member)


async def test_who_is_closed_while_it_is_admitted_is_not_served() -> None:
    proved, served = trio.Event(), list[str]()

    async def serve(stream: trio.SocketStream, admit: lobbies.Admit) -> None:
        await proved.wait()
        admit()
        served.append(str(stream.socket.getpeername()))
        await stream.aclose()

    async with listening(serve, max_strangers=1) as connect:
        first = await connect()
        await trio.testing.wait_all_tasks_blocked(0.02)
        second = await connect()
        assert await end_of(first)
        proved.set()
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert served == [str(second.socket.getsockname())]


class Short:
    """A listener in a process without a descriptor for a while."""

    def __init__(self, number: int, streams: list[Any]) -> None:
        self.number, self.streams, self.tries = number, streams, list[float]()

    async def accept(self) -> Any:
        await trio.lowlevel.checkpoint()
        self.tries.append(trio.current_time())
        if self.streams:
            return self.streams.pop()
        if len(self.tries) > 50:
            raise OSError(errno.EBADF, "this listener is over")
        raise OSError(self.number, "no descriptor is left")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_a_listener_without_descriptors_neither_ends_nor_spins(
    number: int, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = trio.socket.socketpair()
    listener: Any = Short(number, [trio.SocketStream(ours)])
    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="this listener is over")):
        await lobbies.Lobby(echo, max_strangers=4, seconds=60.0).run(listener)
    # The stranger gives its descriptor away at once, and then each try has waited.
    assert await theirs.recv(1) == b""
    theirs.close()
    pauses = [then - before for before, then in zip(listener.tries, listener.tries[1:], strict=False)]
    assert pauses[:2] == [0.0, 0.0]
    assert min(pauses[2:]) >= 0.05


async def test_strangers_leave_descriptors_in_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit
    async with listening(max_strangers=1000) as connect:
        member = await connect(WORD)
        await ask(member)
        free = member.socket.fileno() + 40
        monkeypatch.setattr(
            resource,
            "getrlimit",
            lambda what: (free, 1 << 20) if what == resource.RLIMIT_NOFILE else real(what),
        )
        strangers = [await connect() for _ in range(60)]
        await ask(member)
        assert sum([await is_open(stranger) for stranger in strangers]) < 40
        await ask(await connect(WORD))
