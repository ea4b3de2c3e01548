"""The one error that ends a command with a single line and exit code 2."""

from __future__ import annotations

__all__ = ["InputError", "printable"]


class InputError(Exception):
    """Something that the caller gave (a file, an option, a backend name) cannot be used.

    The message is one line that says what was given and what is wrong with it; the command line prints it
    on stderr and ends with exit code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))


def printable(text: str) -> str:
    """``text`` with ``?`` for what is no character to look at: names and files may hold any, ESC too."""
    return "".join(char if char.isprintable() else "?" for char in text)
