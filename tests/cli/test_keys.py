"""Bytes of a terminal as keys, however they are cut into pieces."""

from __future__ import annotations

import os
import pty
import select
import termios

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trio_accel.cli._top import KeyParser, keys_at_once, read_keys

KEYS = {
    b"q": "q",
    b" ": " ",
    b"/": "/",
    "ü".encode(): "ü",
    "漢".encode(): "漢",
    b"\x1b[A": "up",
    b"\x1bOB": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[4~": "end",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x15": "erase",
}
MEANINGLESS = [b"\x1b[1;5A", b"\x1b[15~", b"\x1bx", b"\x01", b"\x1b[?1;2c", b"\x1bOP", b"\x00"]


@pytest.mark.parametrize(("data", "key"), KEYS.items(), ids=KEYS.values())
def test_a_key(data: bytes, key: str) -> None:
    assert KeyParser().feed(data) == [key]


@pytest.mark.parametrize("data", MEANINGLESS)
def test_what_means_nothing_is_left_out(data: bytes) -> None:
    parser = KeyParser()
    assert parser.feed(data + b"q") == ["q"]
    assert not parser.is_in_sequence


@given(st.lists(st.sampled_from([*KEYS, *MEANINGLESS])), st.randoms())
def test_pieces_change_nothing(typed: list[bytes], random: object) -> None:
    data = b"".join(typed)
    cuts = sorted(random.choices(range(len(data) + 1), k=5))  # type: ignore[attr-defined]
    parser, keys = KeyParser(), []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        keys += parser.feed(data[begin:end])
    assert keys + parser.flush() == [KEYS[one] for one in typed if one in KEYS]


@given(st.binary(max_size=200))
def test_no_bytes_are_an_error(data: bytes) -> None:
    parser = KeyParser()
    keys = parser.feed(data) + parser.flush()
    assert all(
        (len(key) == 1 and key.isprintable()) or key in {*KEYS.values(), "escape", "redraw"} for key in keys
    )


def test_the_escape_key_is_known_when_nothing_follows() -> None:
    parser = KeyParser()
    assert parser.feed(b"\x1b") == []
    assert parser.is_in_sequence
    assert parser.flush() == ["escape"]
    assert parser.feed(b"\x1b[") == []
    assert parser.flush() == []


async def test_keys_are_read_as_they_are_typed(autojump_clock: trio.testing.MockClock) -> None:
    controller, terminal = pty.openpty()
    keys: list[str] = []
    before = termios.tcgetattr(terminal)
    try:
        with keys_at_once(terminal) as put_back:
            assert not termios.tcgetattr(terminal)[3] & (termios.ICANON | termios.ECHO)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read_keys, terminal, keys.append)
                for data in (b"q", b"\x1b[A/x", b"\x1b"):
                    os.write(controller, data)
                    # The kernel hands it over in its own time, for which a mock clock would not wait.
                    assert select.select([terminal], [], [], 10)[0]
                    await trio.sleep(1)
                assert keys == ["q", "up", "/", "x", "escape"]
                nursery.cancel_scope.cancel()
            put_back()
            assert termios.tcgetattr(terminal) == before
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(controller)
        os.close(terminal)


async def test_a_terminal_that_goes_ends_the_reading() -> None:
    controller, terminal = pty.openpty()
    os.close(controller)
    with trio.fail_after(5):
        await read_keys(terminal, lambda _: None)
    os.close(terminal)
