"""Whole messages, in order, with their descriptors, over a socket that takes and gives what it likes."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import pickle
import resource
import socket
from collections.abc import AsyncIterator, Generator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from trio_accel.devices.wire import _frames
from trio_accel.devices.wire._channel import Channel, EndOfChannel
from trio_accel.devices.wire._frames import (
    BUFFER,
    HEADER,
    LOST,
    MAX_DESCRIPTORS,
    Received,
    close_all,
)

pytestmark = pytest.mark.no_device

Message: TypeAlias = tuple[object, ...]
LARGE = bytes(range(256)) * (3 << 12)  # 3 MiB: more than the socket and the read buffer hold


def descriptors_open() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Generator[None, None, None]:
    gc.collect()
    before = descriptors_open()
    yield
    assert descriptors_open() == before


@attrs.frozen
class Pair:
    left: Channel
    right: Channel


@asynccontextmanager
async def open_pair(*, buffer: int | None = None, writers: bool = True) -> AsyncIterator[Pair]:
    """Two connected channels, closed at the end; their writers run unless they shall not."""
    sockets = socket.socketpair()
    if buffer is not None:
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    pair = Pair(*map(Channel, sockets))
    try:
        async with trio.open_nursery() as nursery:
            if writers:
                nursery.start_soon(pair.left.run)
                nursery.start_soon(pair.right.run)
            yield pair
            pair.left.close()
            pair.right.close()
    finally:
        pair.left.close()
        pair.right.close()


async def collect(channel: Channel, count: int) -> list[Message]:
    """Receive this many messages, which carry no descriptors."""
    messages: list[Message] = []
    while len(messages) < count:
        for message, descriptors in await channel.receive():
            assert not descriptors
            messages.append(message)
    return messages


async def until_the_end(channel: Channel) -> list[Message]:
    messages: list[Message] = []
    with suppress(EndOfChannel):
        while True:
            messages.extend(message for message, _ in await channel.receive())
    return messages


def inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


@attrs.define
class Files:
    """Open files that nobody else has."""

    opened: list[int] = attrs.field(factory=list)

    def new(self, count: int) -> tuple[int, ...]:
        made = tuple(os.memfd_create("test") for _ in range(count))
        self.opened.extend(made)
        return made

    def close(self) -> None:
        while self.opened:
            os.close(self.opened.pop())


@pytest.fixture
def files(no_descriptor_left: None) -> Generator[Files, None, None]:
    files = Files()
    yield files
    files.close()


class TestMessages:
    async def test_they_arrive_in_order_and_messages_of_one_moment_together(self) -> None:
        async with open_pair() as pair:
            expected = [("request", number, (1.5, None)) for number in range(1000)]
            for message in expected:
                pair.left.send(message)
            await wait_all_tasks_blocked()
            received = await pair.right.receive()
            assert [message for message, _ in received] == expected
            assert pair.left.pending_bytes == 0

    async def test_a_lone_message_can_be_sent_at_once_but_never_before_others(self) -> None:
        async with open_pair(writers=False) as pair:
            pair.left.send(("alone",), now=True)
            assert pair.left.pending_bytes == 0
            assert await collect(pair.right, 1) == [("alone",)]
            pair.left.send(("first",))
            pair.left.send(("second",), now=True)
            assert pair.left.pending_bytes > 0
            with trio.move_on_after(0):
                await pair.left.run()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.left.run)
                assert await collect(pair.right, 2) == [("first",), ("second",)]
                pair.left.close()

    async def test_the_contents_of_a_message_may_change_once_it_is_sent(self) -> None:
        async with open_pair() as pair:
            content = [1, 2]
            pair.left.send(("list", content))
            content.append(3)
            assert await collect(pair.right, 1) == [("list", [1, 2])]

    async def test_messages_with_descriptors_keep_their_position_among_others(self, files: Files) -> None:
        expected: list[Message] = []
        async with open_pair() as pair:
            for number in range(300):
                message: Message = ("plain" if number % 7 else "with one", number)
                expected.append(message)
                if number % 7:
                    pair.left.send(message)
                else:
                    pair.left.send(message, files.new(number % 2))
            received = await pair.right.receive()
            while len(received) < len(expected):
                received += await pair.right.receive()
            assert [message for message, _ in received] == expected
            for (_, number), (_, descriptors) in zip(expected, received, strict=True):
                assert len(descriptors) == (number % 7 == 0) * (number % 2)
                for descriptor in descriptors:
                    os.close(descriptor)

    async def test_an_immediate_message_that_does_not_fit_is_finished_by_the_writer(self) -> None:
        async with open_pair() as pair:
            await wait_all_tasks_blocked()
            pair.left.send((LARGE,), now=True)
            pair.left.send(("after",), now=True)
            assert 0 < pair.left.pending_bytes < len(LARGE)
            assert await collect(pair.right, 2) == [(LARGE,), ("after",)]

    async def test_two_ends_with_many_messages_do_not_block_each_other(self) -> None:
        async with open_pair() as pair:
            expected: list[Message] = [(number, LARGE) for number in range(3)]
            for message in expected:
                pair.left.send(message)
                pair.right.send(message)
            async with trio.open_nursery() as nursery:
                for channel in (pair.left, pair.right):

                    @nursery.start_soon
                    async def read(channel: Channel = channel) -> None:
                        assert await collect(channel, 3) == expected

    async def test_a_sender_is_not_kept_by_a_peer_that_does_not_read(self) -> None:
        async with open_pair() as pair:
            for _ in range(5):
                pair.left.send((LARGE,))
                await wait_all_tasks_blocked()
            assert pair.left.pending_bytes > 4 * len(LARGE)
            assert len(await collect(pair.right, 5)) == 5
            assert pair.left.pending_bytes == 0

    async def test_sizes_around_the_sizes_of_the_buffers(self) -> None:
        edges = (_frames._SEND_ALONE_FROM_BYTES, BUFFER, 2 * BUFFER)
        expected: list[Message] = [(b"x" * (edge + off),) for edge in edges for off in range(-40, 3)]
        async with open_pair() as pair:
            for message in expected:
                pair.left.send(message)
            assert await collect(pair.right, len(expected)) == expected

    async def test_an_unencodable_message_is_the_sender_s_error_and_sends_nothing(self) -> None:
        async with open_pair() as pair:
            with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
                pair.left.send((lambda: None,))
            with pytest.raises(ValueError, match="16 descriptors"):
                pair.left.send(("many",), range(MAX_DESCRIPTORS + 1))
            with pytest.raises(OSError, match="Bad file descriptor"):
                pair.left.send(("bad",), (0, 1 << 20))
            assert pair.left.pending_bytes == 0


class TestDescriptors:
    async def test_they_arrive_with_their_message_among_many_others(self, files: Files) -> None:
        expected: list[tuple[int, list[int]]] = []
        async with open_pair() as pair:
            for number in range(200):
                mine = files.new({0: 0, 1: 1, 2: MAX_DESCRIPTORS, 3: 0}[number % 4])
                expected.append((number, [inode(descriptor) for descriptor in mine]))
                pair.left.send((number, LARGE[: number * 97]), mine, now=number % 3 == 0)
                # They were duplicated; the number may belong to another file by the time they are sent.
                files.close()
            received: list[tuple[object, list[int]]] = []
            while len(received) < len(expected):
                for (number, content), descriptors in await pair.right.receive():
                    assert content == LARGE[: number * 97]  # type: ignore[operator]
                    received.append((number, [inode(descriptor) for descriptor in descriptors]))
                    assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
                    close_all(descriptors)
            assert received == expected

    async def test_with_a_message_larger_than_the_socket(self, files: Files) -> None:
        async with open_pair(buffer=1) as pair:
            (mine,) = files.new(1)
            pair.left.send((LARGE,), (mine,))
            pair.left.send(("after",))
            [(message, (descriptor,))] = await pair.right.receive()
            assert message == (LARGE,)
            assert inode(descriptor) == inode(mine)
            os.close(descriptor)
            assert await collect(pair.right, 1) == [("after",)]

    async def test_unsent_and_unclaimed_ones_are_closed(self, files: Files) -> None:
        async with open_pair() as pair:
            pair.left.send((LARGE,), files.new(2))
            pair.left.send((LARGE,), files.new(2))
            await wait_all_tasks_blocked()
            with trio.move_on_after(0):
                await pair.right.receive()
            # The beginning of the first message, and the descriptors with it.
            assert not pair.right._inbox.read(pair.right._sock)
            assert len(pair.right._inbox._descriptors) == 2

    async def test_a_message_reports_its_lost_descriptors(self, files: Files) -> None:
        async with open_pair() as pair:
            pair.left.send(("fine",))
            pair.left.send(("lost",), files.new(8))
            pair.left.send(("without",))
            await wait_all_tasks_blocked()
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            spare = os.dup(0)
            os.close(spare)
            # Some of them arrive, and are closed.
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 2, limits[1]))
            try:
                received: list[object] = []
                while len(received) < 3:
                    received += await pair.right.receive()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert received == [(("fine",), ()), (("lost",), (LOST,)), (("without",), ())]
            mine = files.new(2)
            pair.left.send(("again",), mine)
            [(message, descriptors)] = await pair.right.receive()
            assert message == ("again",)
            assert list(map(inode, descriptors)) == list(map(inode, mine))
            close_all(descriptors)

    async def test_a_kernel_without_memory_to_read_is_asked_again(
        self, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
    ) -> None:
        async with open_pair() as pair:
            sock, refused = pair.right._sock, list[int]()

            class Refusing:
                def recvmsg_into(self, *arguments: Any) -> Any:
                    if len(refused) < 3:
                        refused.append(1)
                        raise OSError(errno.ENOBUFS, "no buffer space")
                    return sock.recvmsg_into(*arguments)

                def __getattr__(self, name: str) -> Any:
                    return getattr(sock, name)

            monkeypatch.setattr(pair.right, "_sock", Refusing())
            pair.left.send(("here",))
            assert await collect(pair.right, 1) == [("here",)]
            assert len(refused) == 3

    async def test_a_kernel_that_takes_no_more_is_asked_again(
        self, files: Files, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
    ) -> None:
        transmit = _frames._transmit
        refused: list[int] = []

        def refuse(sock: socket.socket, data: memoryview, descriptors: tuple[int, ...]) -> int:
            if len(refused) < 3:
                refused.append(len(descriptors))
                raise OSError(errno.ETOOMANYREFS, "too many references")
            return transmit(sock, data, descriptors)

        monkeypatch.setattr(_frames, "_transmit", refuse)
        async with open_pair() as pair:
            pair.left.send(("file",), files.new(1))
            [(message, descriptors)] = await pair.right.receive()
            close_all(descriptors)
            assert message == ("file",)
            assert refused == [1, 1, 1]


class TestEnd:
    async def test_everything_sent_before_it_is_received(self) -> None:
        async with open_pair() as pair:
            for number in range(100):
                pair.left.send((number,))
            await wait_all_tasks_blocked()
            pair.left.close()
            assert await until_the_end(pair.right) == [(number,) for number in range(100)]
            with pytest.raises(EndOfChannel, match="peer is gone"):
                await pair.right.receive()

    @pytest.mark.parametrize("size", [1, 4, 5, 20, BUFFER + 100])
    async def test_in_the_middle_of_a_message(self, size: int) -> None:
        async with open_pair() as pair:
            pair.left.send(("whole",))
            await wait_all_tasks_blocked()
            payload = pickle.dumps((LARGE,))
            frame = HEADER.pack(len(payload), 0, 2) + payload
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def send() -> None:
                    rest = memoryview(frame[:size])
                    while rest:
                        await trio.lowlevel.wait_writable(pair.left._sock)
                        rest = rest[pair.left._sock.send(rest) :]
                    pair.left.close()

                assert await until_the_end(pair.right) == [("whole",)]

    async def test_a_peer_that_dies_with_messages_unread(self) -> None:
        async with open_pair() as pair:
            pair.right.send(("last words",))
            pair.left.send(("unread",))
            await wait_all_tasks_blocked()
            pair.right.close()
            # The kernel reports a reset instead of an end, but not before what there is to read.
            assert await until_the_end(pair.left) == [("last words",)]

    async def test_sending_to_a_gone_peer_raises_nothing(self, files: Files) -> None:
        async with open_pair(writers=False) as pair:
            pair.left.send((LARGE,), files.new(1), now=True)
            pair.left.send(("more",), files.new(1))
            pair.right.close()
            with trio.fail_after(60):
                await pair.left.run()
            for now in (False, True):
                pair.left.send(("and more",), files.new(1), now=now)
            assert pair.left.pending_bytes == 0
            assert "broken" in repr(pair.left)

    async def test_the_writer_returns_when_the_reader_finds_the_peer_closed(self) -> None:
        async with open_pair(writers=False) as pair, trio.open_nursery() as nursery:
            nursery.start_soon(pair.left.run)
            await wait_all_tasks_blocked()
            pair.right.close()
            assert not await until_the_end(pair.left)

    async def test_closing_wakes_reader_and_writer(self) -> None:
        async with open_pair(writers=False) as pair, trio.open_nursery() as nursery:

            @nursery.start_soon
            async def read() -> None:
                with pytest.raises(EndOfChannel, match="this end is closed"):
                    await pair.left.receive()

            nursery.start_soon(pair.left.run)  # waits for room
            nursery.start_soon(pair.right.run)  # waits for something to send
            pair.left.send((LARGE,))
            await wait_all_tasks_blocked()
            pair.left.close()
            pair.right.close()
            pair.left.close()
            assert "closed" in repr(pair.left)

    async def test_closing_is_seen_by_the_peer_while_another_process_holds_a_copy(self) -> None:
        async with open_pair() as pair:
            copy = pair.left._sock.dup()
            pair.left.close()
            assert not await until_the_end(pair.right)
            copy.close()

    def test_closing_outside_of_trio(self) -> None:
        sockets = socket.socketpair()
        left, right = map(Channel, sockets)
        left.close()
        right.close()
        assert [sock.fileno() for sock in sockets] == [-1, -1]
        left.send(("to nobody",))
        assert left.pending_bytes == 0

    @pytest.mark.parametrize("payload", [b"", b"\x80\x05no pickle", pickle.dumps(("x",), 5)[:-1]])
    async def test_a_malformed_message_ends_the_channel_after_the_messages_before_it(
        self, payload: bytes
    ) -> None:
        async with open_pair() as pair:
            pair.left.send(("fine",))
            await wait_all_tasks_blocked()
            pair.left._sock.send(HEADER.pack(len(payload), 0, 2) + payload)
            assert await collect(pair.right, 1) == [("fine",)]
            with pytest.raises(EndOfChannel) as caught:
                await pair.right.receive()
            assert caught.value.__cause__ is not None

    async def test_descriptors_that_never_came_end_the_channel(self) -> None:
        async with open_pair() as pair:
            payload = pickle.dumps(("x",))
            pair.left._sock.send(HEADER.pack(len(payload), 2, 1) + payload)
            with pytest.raises(EndOfChannel) as caught:
                await pair.right.receive()
            assert "0 descriptors instead of 2" in str(caught.value.__cause__)


class TestCancellation:
    async def test_of_receiving_loses_nothing(self) -> None:
        async with open_pair() as pair:
            for _ in range(3):
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await pair.right.receive()
                assert scope.cancelled_caught
                pair.left.send(("kept",))
                await wait_all_tasks_blocked()
            assert await collect(pair.right, 3) == [("kept",)] * 3

    async def test_of_the_writer_loses_nothing(self) -> None:
        async with open_pair(writers=False) as pair:
            pair.left.send((LARGE,))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.left.run)
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            pair.left.send(("after",))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.left.run)
                assert await collect(pair.right, 2) == [(LARGE,), ("after",)]
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            # The writer cancelled while it was idle is not waited for.
            pair.left.send(("again",))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.left.run)
                assert await collect(pair.right, 1) == [("again",)]
                pair.left.close()


SIZES = st.lists(
    st.one_of(st.integers(0, 60), st.integers(0, 20_000), st.sampled_from((262_100, 262_144, 400_000))),
    min_size=1,
    max_size=12,
)


class TestProperty:
    @settings(deadline=None, max_examples=40)
    @given(
        sizes=SIZES,
        carried=st.lists(st.integers(0, 3), min_size=12, max_size=12),
        buffer=st.sampled_from((1, 5_000, 20_000, 200_000)),
        at_once=st.lists(st.booleans(), min_size=12, max_size=12),
        cancelled=st.sets(st.integers(0, 30)),
    )
    def test_any_messages_through_any_buffer_past_any_cancellation(
        self, sizes: list[int], carried: list[int], buffer: int, at_once: list[bool], cancelled: set[int]
    ) -> None:
        async def main() -> list[tuple[Message, int]]:
            received: list[tuple[Message, int]] = []
            files = Files()
            async with open_pair(buffer=buffer) as pair:
                for number, size in enumerate(sizes):
                    pair.left.send((number, LARGE[:size]), files.new(carried[number]), now=at_once[number])
                    files.close()
                attempts = 0
                while len(received) < len(sizes):
                    with trio.CancelScope() as scope:
                        if attempts in cancelled:
                            scope.cancel()
                        keep(await pair.right.receive(), received)
                    attempts += 1
            return received

        def keep(messages: Iterable[Received], received: list[tuple[Message, int]]) -> None:
            for message, descriptors in messages:
                received.append((message, len(descriptors)))
                close_all(descriptors)

        expected = [((number, LARGE[:size]), carried[number]) for number, size in enumerate(sizes)]
        assert trio.run(main) == expected

    @settings(deadline=None, max_examples=40)
    @given(sizes=SIZES, data=st.data())
    def test_any_cut_of_the_bytes(self, sizes: list[int], data: st.DataObject) -> None:
        expected: list[Message] = [(number, LARGE[:size]) for number, size in enumerate(sizes)]
        payloads = [pickle.dumps(message, 5) for message in expected]
        stream = b"".join(
            HEADER.pack(len(payload), 0, number) + payload for number, payload in enumerate(payloads, 1)
        )
        points = data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=20))
        cuts = [0, *sorted(points), len(stream)]

        async def main() -> list[Message]:
            raw, sock = socket.socketpair()
            raw.setblocking(False)
            channel = Channel(sock)
            received: list[Message] = []
            with raw:
                for start, stop in itertools.pairwise(cuts):
                    rest = memoryview(stream)[start:stop]
                    while rest:
                        with suppress(BlockingIOError):
                            rest = rest[raw.send(rest) :]
                        received.extend(message for message, _ in channel._inbox.read(sock))
            received.extend(await until_the_end(channel))
            channel.close()
            return received

        assert trio.run(main) == expected
