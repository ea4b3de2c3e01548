"""Text from files of strangers, plain or gzip-compressed: by blocks of lines, and never more than a limit."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import TYPE_CHECKING

from trio_accel.cli._errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BLOCK", "GZIP", "MOST_TEXT", "blocks_of_lines"]

BLOCK = 1 << 20
"""Bytes that are read and handed out at once."""

GZIP = b"\x1f\x8b"
"""How a compressed file begins."""

MOST_TEXT = 256 << 20
"""Bytes of the longest text, decompressed, that is read."""


def blocks_of_lines(name: str, content: bytes) -> Iterator[list[bytes]]:
    """Whole lines without their ends, those in `BLOCK` bytes at a time. Blocking.

    Args:
        name: What to call the file in messages.
        content: The whole file.

    Raises:
        InputError: It is truncated or damaged, longer than `MOST_TEXT` when decompressed, or has a line of
            more than `BLOCK` bytes.
    """
    is_compressed = content.startswith(GZIP)
    if name.endswith(".gz") and not is_compressed:
        raise InputError(f"{name} is not gzip-compressed, though its name ends in .gz")
    file = io.BytesIO(content)
    rest, total, number = b"", 0, 1
    with gzip.GzipFile(fileobj=file) if is_compressed else file as text:
        while part := _read(name, text):
            total += len(part)
            if total > MOST_TEXT:
                raise InputError(f"{name} is too long: more than {MOST_TEXT >> 20} MiB of text")
            # Less than was asked for is all that is left, and the end of the last line may be missing.
            lines = (rest + part).split(b"\n")
            rest = lines.pop() if len(part) == BLOCK else b""
            if len(rest) > BLOCK:
                raise InputError(f"{name} is no text file: line {number} has more than {BLOCK >> 20} MiB")
            number += len(lines)
            yield lines
    if rest:
        yield [rest]


def _read(name: str, text: gzip.GzipFile | io.BytesIO) -> bytes:
    try:
        return text.read(BLOCK)
    except EOFError:
        raise InputError(f"{name} is truncated: the gzip stream ends early") from None
    except (OSError, zlib.error) as error:
        raise InputError(f"{name} is damaged: {error}") from error
