"""Frames shown in shared memory instead of being sent: none is lost, and none arrives twice."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_accel.devices.wire import _frames, _protocol
from trio_accel.devices.wire._channel import Channel, EndOfChannel
from trio_accel.devices.wire._frames import Received, close_all
from trio_accel.devices.wire._protocol import SIZE, SharedFrame, SharedPage

pytestmark = pytest.mark.skipif(not SharedFrame.is_possible(), reason="this processor reorders stores")

PEER = Path(__file__).with_name("answering_peer.py")
LARGEST = SIZE - 128
# The text, the number of descriptors, and the way it is sent.
SAYS: dict[str, tuple[str, int, Callable[[Channel, tuple[object, ...]], None]]] = {
    "post": ("posted", 0, lambda channel, message: channel.send(message, now=True)),
    "later": ("later", 0, lambda channel, message: channel.send(message)),
    "send": ("sent", 0, lambda channel, message: channel.send(message, now=True)),
    "large": ("x" * LARGEST, 0, lambda channel, message: channel.send(message, now=True)),
    "descriptor": ("file", 1, lambda channel, message: channel.send(message, (0,), now=True)),
}


class Watched:
    """Memory as words, of which each access can be followed by something else."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.accesses = 0
        self.after: dict[int, Callable[[], None]] = {}

    def _accessed(self) -> None:
        self.accesses += 1
        action = self.after.pop(self.accesses, None)
        if action is not None:
            action()

    def __getitem__(self, index: int) -> int:
        value: int = self.words[index]
        self._accessed()
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value
        self._accessed()

    def release(self) -> None:
        self.words.release()


def watched(frame: SharedFrame) -> Watched:
    made = Watched(frame._words)
    frame._words = made  # type: ignore[assignment]
    return made


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(SIZE))


class TestFrame:
    def test_a_frame_shown_to_an_awake_peer_is_taken_once(self, memory: memoryview) -> None:
        sender, receiver = SharedFrame(memory), SharedFrame(memory)
        assert not sender.show(1, b"asleep")
        assert receiver.take(1) == b"asleep"
        receiver.wake()
        assert sender.show(2, b"awake")
        assert not sender.is_taken(2)
        assert receiver.take(1) is None
        assert receiver.take(3) is None
        assert receiver.take(2) == b"awake"
        assert sender.is_taken(2)
        receiver.sleep()
        assert not sender.show(3, b"")

    def test_only_small_frames_are_shown(self, memory: memoryview) -> None:
        sender, receiver = SharedFrame(memory), SharedFrame(memory)
        receiver.wake()
        whole = bytes(range(256)) * (LARGEST // 256) + bytes(LARGEST % 256)
        assert sender.show(1, whole)
        assert not sender.show(2, whole + b"!")
        assert receiver.take(1) == whole
        assert receiver.take(2) is None

    @pytest.mark.parametrize("access", range(1, 5))
    def test_a_receiver_falling_asleep_meanwhile_has_seen_it_or_has_reported_so(
        self, memory: memoryview, access: int
    ) -> None:
        sender, receiver = SharedFrame(memory), SharedFrame(memory)
        receiver.wake()
        taken: list[bytes | None] = []

        def fall_asleep() -> None:
            receiver.sleep()
            taken.append(receiver.take(1))

        words = watched(sender)
        words.after[access] = fall_asleep
        is_seen = sender.show(1, b"frame")
        assert len(taken) == 1
        assert taken[0] == b"frame" or not is_seen

    @pytest.mark.parametrize("access", [1, 2])
    def test_a_frame_shown_meanwhile_is_seen_or_sent(self, memory: memoryview, access: int) -> None:
        sender, receiver = SharedFrame(memory), SharedFrame(memory)
        receiver.wake()
        seen: list[bool] = []
        words = watched(receiver)
        words.after[access] = lambda: seen.append(sender.show(1, b"frame"))
        receiver.sleep()
        taken = receiver.take(1)
        assert len(seen) == 1
        assert not (seen[0] and taken is None)
        assert taken in (b"frame", None)

    @pytest.mark.parametrize("access", range(1, 5))
    def test_no_half_of_one_is_taken(self, memory: memoryview, access: int) -> None:
        """The next is shown while one is read; its sender has also sent it, so it may be missed."""
        sender, receiver = SharedFrame(memory), SharedFrame(memory)
        sender.show(1, b"old" * 100)
        words = watched(receiver)
        words.after[access] = lambda: sender.show(2, b"new" * 200)  # type: ignore[dict-item, return-value]
        assert receiver.take(1) in (b"old" * 100, None)
        assert not words.after
        assert receiver.take(2) in (b"new" * 200, None)

    @pytest.mark.parametrize("access", range(1, 4))
    def test_none_is_taken_while_it_is_written(self, memory: memoryview, access: int) -> None:
        sender, receiver = SharedFrame(memory), SharedFrame(memory)
        sender.show(1, b"old" * 100)
        taken: list[bytes | None] = []
        words = watched(sender)
        words.after[access] = lambda: taken.extend([receiver.take(1), receiver.take(2)])
        sender.show(2, b"new" * 200)
        assert taken[0] is None
        assert taken[1] == (b"new" * 200 if access == 3 else None)


@attrs.define
class Ends:
    """A sender and a receiver called by hand, which never sleep on their own."""

    left: Channel
    right: Channel
    received: list[Any] = attrs.field(factory=list)

    def take(self) -> None:
        """The receiver is awake, and looks."""
        self._keep(self.right._take(0.0))

    def doze(self) -> None:
        """It falls asleep."""
        self._keep(self.right._doze())

    def notify(self) -> bool:
        """It was asleep, and is woken if there is something to read: it does so, and falls asleep again."""
        before = len(self.received)
        self._keep(self.right._inbox.read(self.right._sock))
        is_woken = len(self.received) > before
        if is_woken:
            self.doze()
        return is_woken

    def _keep(self, received: list[Received]) -> None:
        for message, descriptors in received:
            self.received.append((message, len(descriptors)))
            close_all(descriptors)


@pytest.fixture
def ends() -> Generator[Ends, None, None]:
    yield from make_ends()


def make_ends() -> Generator[Ends, None, None]:
    page = SharedPage.create()
    left, right = (Channel(sock) for sock in socket.socketpair())
    left.share(*page.frames)
    right.share(*reversed(page.frames))
    try:
        yield Ends(left, right)
    finally:
        left.close()
        right.close()
        page.close()


class TestChannel:
    def test_a_lone_frame_to_an_awake_peer_makes_no_system_call(
        self, ends: Ends, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ends.take()
        with monkeypatch.context() as patch:
            patch.setattr(_frames, "_transmit", lambda *_: pytest.fail("it was sent"))
            for number in range(3):
                ends.left.send(("posted", number), now=True)
                ends.take()
                ends.left.send(("sent", number), now=True)
                ends.take()
        assert [message for message, _ in ends.received] == [
            (how, number) for number in range(3) for how in ("posted", "sent")
        ]
        # A second one after an unread one, many together, and to a sleeper: all are sent.
        ends.left.send(("first",), now=True)
        ends.left.send(("second",), now=True)
        ends.doze()
        assert not ends.left._outbox._held
        ends.left.send(("third",), now=True)
        assert ends.notify()
        assert [message[0] for message, _ in ends.received[6:]] == ["first", "second", "third"]

    @pytest.mark.parametrize("how", ["large", "descriptor", "later"])
    def test_others_are_sent_after_it(self, ends: Ends, how: str) -> None:
        ends.take()
        ends.left.send(("shown",), now=True)
        if how == "large":
            message: tuple[object, ...] = ("x" * LARGEST,)
            ends.left.send(message, now=True)
        elif how == "descriptor":
            message = ("file",)
            descriptor = os.memfd_create("test")
            ends.left.send(message, (descriptor,), now=True)
            os.close(descriptor)
        else:
            message = ("later",)
            ends.left.send(message)
        assert ends.left._outbox._flush(8)
        for _ in range(3):
            ends.take()
        assert [message for message, _ in ends.received] == [("shown",), message]

    def test_the_last_words_of_a_peer(self, ends: Ends) -> None:
        ends.take()
        ends.left.send(("last words",), now=True)
        ends.left.close()
        # Who reads the socket first finds them all the same.
        assert ends.notify()
        assert ends.received == [(("last words",), 0)]
        ends.take()
        assert len(ends.received) == 1

    @pytest.mark.parametrize("access", [1, 2])
    def test_a_frame_is_shown_while_its_receiver_falls_asleep(self, ends: Ends, access: int) -> None:
        ends.take()
        seen = ends.right._inbox.seen
        assert seen is not None
        watched(seen).after[access] = lambda: ends.left.send(("shown",), now=True)
        ends.doze()
        ends.notify()
        assert ends.received == [(("shown",), 0)]

    def test_nonsense_is_the_end(self, ends: Ends) -> None:
        ends.take()
        assert ends.left._outbox._show(b"\x80\x05no pickle")
        ends.take()
        assert ends.right._inbox.is_at_end
        assert isinstance(ends.right._inbox.error, pickle.UnpicklingError)

    def test_a_missing_frame_is_the_end(self, ends: Ends) -> None:
        ends.left._outbox._frames += 1
        ends.left.send(("later",), now=True)
        ends.take()
        assert not ends.received
        assert isinstance(ends.right._inbox.error, ValueError)
        assert "missing" in str(ends.right._inbox.error)

    @settings(deadline=None, max_examples=300)
    @given(st.lists(st.sampled_from([*SAYS, "flush", "take", "doze", "notify"]), max_size=60))
    def test_any_interleaving_of_both_ends(self, steps: list[str]) -> None:
        with closing(make_ends()) as making:
            ends = next(making)
            expected: list[Any] = []
            is_awake = False
            for step in steps:
                if step in SAYS:
                    text, descriptors, how = SAYS[step]
                    how(ends.left, (text, len(expected)))
                    expected.append(((text, len(expected)), descriptors))
                elif step == "flush":
                    ends.left._outbox._flush(8)
                elif step == "take":
                    ends.take()
                    is_awake = True
                elif is_awake:
                    ends.doze()
                    is_awake = False
                else:
                    ends.notify()
            # It sleeps, and only what is sent wakes it.
            ends.doze()
            while not ends.left._outbox._flush(8) or ends.notify():
                pass
            assert ends.received == expected

    def test_two_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Questions to a peer that sleeps at unknown times."""
        count, sent = 3000, 0
        transmit = _frames._transmit

        def counted(*arguments: Any) -> int:
            nonlocal sent
            sent += 1
            return transmit(*arguments)

        page = SharedPage.create()
        ours, theirs = socket.socketpair()
        # No fork of this process, which may have imported what takes a fork badly.
        descriptors = (theirs.fileno(), page.descriptor)
        command = [sys.executable, str(PEER), *map(str, descriptors), str(count)]
        child = subprocess.Popen(command, pass_fds=descriptors)
        theirs.close()
        channel = Channel(ours)
        channel.share(*page.frames)
        monkeypatch.setattr(_frames, "_transmit", counted)
        try:
            for number in range(count):
                channel.send(("ask", number), now=True)
                # It answers through its socket.
                assert select.select([ours], [], [], 30)[0]
                assert ours.recv(16) == b"%015d\n" % number
        finally:
            child.kill()
            child.wait()
            channel.close()
            page.close()
        # Both ways had ended.
        assert 0 < sent < count


async def test_the_end_of_an_awake_peer() -> None:
    with closing(make_ends()) as making:
        ends = next(making)
        ends.take()
        ends.left.send(("last words",), now=True)
        ends.left.close()
        assert await ends.right.receive() == [(("last words",), ())]
        with pytest.raises(EndOfChannel):
            await ends.right.receive()


def test_ctrl_c_leaves_no_barrier_behind(memory: memoryview) -> None:
    """The lock of a barrier that nobody gives back would stop the program at the next."""
    frame = SharedFrame(memory)
    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(200):
            with suppress(KeyboardInterrupt):
                # Once: none arrives unexpectedly.
                signal.setitimer(signal.ITIMER_REAL, 2e-5)
                while True:
                    frame.sleep()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not _protocol._LOCK.locked()
