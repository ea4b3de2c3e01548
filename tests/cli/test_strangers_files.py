"""Files of strangers: whatever they hold, the command ends with one line, and takes little memory."""

from __future__ import annotations

import gzip
import resource
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Refused = Callable[..., str]
Start = Callable[..., "subprocess.Popen[str]"]

BANNER = b"%%MatrixMarket matrix coordinate real general\n"
MIB = 1 << 20
# The program itself takes about half of it.
MOST_MEMORY = 1024 * MIB


def bomb(head: bytes, line: bytes, mebibytes: int) -> bytes:
    """A compressed file of some hundred kilobytes at most."""
    part = gzip.compress(line * (MIB // len(line)))
    return gzip.compress(head, mtime=0) + mebibytes * part


def wav(rate: int, channels: int, data: bytes) -> bytes:
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels, channels, 8)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "one long comment.mtx.gz": (
        lambda: bomb(BANNER, b"%", 4096),
        "is too long: more than 256 MiB of text",
    ),
    "many comments.mtx.gz": (
        lambda: bomb(BANNER, b"% x\n", 4096),
        "is too long: more than 256 MiB of text",
    ),
    "many entries.mtx.gz": (lambda: bomb(BANNER + b"2 2 2\n", b"1 1 1\n", 4096), "more than 256 MiB of text"),
    "one long entry.mtx.gz": (lambda: bomb(BANNER + b"2 2 2\n", b"1", 4096), "more than 256 MiB of text"),
    "one long number.mtx.gz": (
        lambda: bomb(BANNER + b"2 2 2\n1 1 ", b"1", 1),
        "is not a valid Matrix Market file: ",
    ),
    "many rows.mtx": (
        lambda: BANNER + b"5000000 5000000 1\n1 1 1\n",
        "is not positive definite (diagonal entry 2 is 0)",
    ),
    "too many rows.mtx": (
        lambda: BANNER + b"99999999 99999999 1\n1 1 1\n",
        "at most 5000000 rows and columns",
    ),
    "many promised.mtx": (lambda: BANNER + b"9 9 1000000000000\n1 1 1\n", "1000000000000 entries, at most"),
    "cut.mtx": (lambda: BANNER + b"2 2 2\n1 1 4\n2 2 ", "is not a valid Matrix Market file: "),
    "binary.mtx": (
        lambda: BANNER + b"2 2 2\n" + bytes(range(256)) * 4096,
        "is not a valid Matrix Market file: ",
    ),
    "4 GHz.wav": (lambda: wav(4_000_000_000, 1, bytes(33 * MIB)), "from 1 to 1000000 are read"),
    "65535 channels.wav": (lambda: wav(48_000, 65535, bytes(65535 * 500)), "at most 256 are read"),
}


def command(path: Path) -> list[str]:
    return (
        ["demo", "spectrum", "--audio", str(path)]
        if path.suffix == ".wav"
        else ["demo", "solve", "--matrix", str(path)]
    )


@pytest.mark.parametrize("name", FILES)
def test_it_is_refused_in_little_memory(start: Start, tmp_path: Path, name: str) -> None:
    make, reason = FILES[name]
    path = tmp_path / name
    path.write_bytes(make())

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))

    process = start(*command(path), preexec_fn=limit_memory)
    out, err = process.communicate(timeout=50)
    assert (process.returncode, out) == (2, "")
    assert err.startswith(f"trio-accel: {path} ")
    assert reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\0" * 100,
        b"%%MatrixMarket",
        BANNER[:-1],
        BANNER[:20] + b"\r\n",
        BANNER.replace(b"\n", b"\r\n") + b"2 2",
        BANNER + b"2 2 2",
        BANNER + b"-2 -2 2\n1 1 1\n2 2 1\n",
        BANNER + b"2 2 -2\n1 1 1\n2 2 1\n",
        BANNER + b"2 2 2\n1 1 1\n3 3 1\n",
        BANNER + b"2 2 2\n1 1 1\n0 0 1\n",
        BANNER + b"2 2 2\n1 1 1\n2 2 nan\n",
        BANNER + b"2 2 2\n1 1 1\n2 2 -inf",
        BANNER + b"2 2 2\n1 1 1\n2 2 1\n2 2 1\n",
        BANNER + b"2 2 2\n1 1 1\n\xff\xfe\n",
        gzip.compress(BANNER, mtime=0),
        gzip.compress(BANNER + b"2 2 2\n1 1 1\n2 2 1\n", mtime=0) + b"behind",
        gzip.compress(BANNER + b"2 2 2\n1 1 1\n2 2 1\n", mtime=0)[:-3],
    ],
)
def test_a_damaged_matrix_is_one_line(refused: Refused, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.mtx"
    path.write_bytes(content)
    assert refused("demo", "solve", "--matrix", path).startswith(f"{path} ")
