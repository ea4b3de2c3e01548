"""Keys of a terminal, read without holding the loop."""

from __future__ import annotations

import codecs
import os
import re
import termios
import tty
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["KeyParser", "keys_at_once", "read_keys"]

# What follows the escape sign sooner than this belongs to it; a person's next key comes later.
_ESCAPE_SECONDS = 0.05
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[@-~]|O[@-~]|[^\[O])")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]*|O)?\Z")
_NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1bOH": "home",
    "\x1bOF": "end",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x15": "erase",  # Ctrl-U
    "\x0c": "redraw",  # Ctrl-L
}


@attrs.define(eq=False)
class KeyParser:
    """Bytes of a terminal as keys: the character that was typed, or a name such as ``"page up"``."""

    _decoder: codecs.IncrementalDecoder = attrs.field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("ignore"), init=False
    )
    _rest: str = attrs.field(default="", init=False)

    @property
    def is_in_sequence(self) -> bool:
        """Whether more may belong to what has come last."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """The keys that ``data`` completes. Sequences without a meaning here are left out."""
        text = self._rest + self._decoder.decode(data)
        self._rest = ""
        keys: list[str] = []
        while text:
            if _UNFINISHED.match(text):
                self._rest = text
                break
            found = _SEQUENCE.match(text)
            key = found[0] if found else text[0]
            text = text[len(key) :]
            name = _NAMES.get(key, key if key.isprintable() else "")
            if name:
                keys.append(name)
        return keys

    def flush(self) -> list[str]:
        """What has come last is all that comes: the escape key, or a sequence that was cut off."""
        is_escape, self._rest = self._rest == "\x1b", ""
        return ["escape"] if is_escape else []


@contextmanager
def keys_at_once(descriptor: int) -> Generator[Callable[[], None]]:
    """Have the terminal hand over each key at once, and show none; as before at the end.

    Yields:
        A function that puts the terminal back at any moment, as often as it is called.
    """
    before = cast("list[int | list[bytes | int]]", termios.tcgetattr(descriptor))

    def put_back() -> None:
        # Not behind the output: a terminal that is stopped takes none.
        termios.tcsetattr(descriptor, termios.TCSANOW, before)

    try:
        # Ctrl-C, Ctrl-Z and Ctrl-\ stay signals.
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield put_back
    finally:
        put_back()


async def read_keys(descriptor: int, press: Callable[[str], None]) -> None:
    """Call ``press`` with each key that is typed, until the terminal is gone."""
    parser = KeyParser()
    while True:
        with trio.move_on_after(_ESCAPE_SECONDS if parser.is_in_sequence else float("inf")) as wait:
            await trio.lowlevel.wait_readable(descriptor)
        if wait.cancelled_caught:
            keys = parser.flush()
        else:
            try:
                data = os.read(descriptor, 1024)
            except OSError:
                return
            if not data:
                return
            keys = parser.feed(data)
        for key in keys:
            press(key)
