"""Reads a stranger's file with SciPy, as a program of its own: what it holds can end this process alone.

Its argument is the kind of file, and its standard input the content. It writes arrays to standard output as
NumPy's ``npz``; or to standard error what is wrong with the file, and ends with code 2.
"""

from __future__ import annotations

import gzip
import io
import resource
import struct
import sys
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_MEMORY = 4 << 30
"""Bytes of address space that reading may take."""

MOST_TEXT = 256 << 20
"""Bytes of the longest text, decompressed, that is read."""

MOST_ROWS = 5_000_000
"""Rows, and columns, of the largest matrix that is read."""

MOST_ENTRIES = 5_000_000
"""Entries of the largest matrix that is read; symmetric storage stands for nearly twice as many."""

MOST_RATE = 1_000_000
"""Samples per second of the fastest recording that is read."""

MOST_CHANNELS = 256
"""Channels of the widest recording that is read."""

MOST_FRAMES = 1 << 26
"""Samples per channel of the longest recording that is read: 25 minutes at 44.1 kHz."""


class RefusedError(Exception):
    """A file that cannot be used; the message goes on behind its name."""


def read_matrix(content: bytes) -> dict[str, object]:
    """Read a real matrix in Matrix Market format, plain or compressed.

    Returns:
        Its `data`, `indices`, `indptr` and `shape` by rows, without duplicates; `kind` and `title`.

    Raises:
        RefusedError: It is beyond a limit, or holds what conjugate gradients cannot solve.
        Exception: As SciPy says that the file is damaged.
    """
    from scipy.io import mminfo, mmread
    from scipy.sparse import csr_array

    text = _plain(content)
    rows, columns, entries, layout, field, symmetry = mminfo(io.BytesIO(text))
    _refuse({
        "holds a complex matrix: only real ones are solved here": field == "complex",
        "is skew-symmetric, so not positive definite: conjugate gradients cannot solve it":
            symmetry == "skew-symmetric",
        f"holds an empty matrix, {rows} × {columns}": 0 in (rows, columns),
        f"is too large: {rows} × {columns}, at most {MOST_ROWS} rows and columns":
            max(rows, columns) > MOST_ROWS,
        f"is too large: {entries} entries, at most {MOST_ENTRIES}": entries > MOST_ENTRIES,
        f"is not square ({rows} × {columns}), though its header says symmetric":
            symmetry == "symmetric" and rows != columns,
    })  # fmt: skip
    found: Any = mmread(io.BytesIO(text), spmatrix=False)
    matrix: Any = csr_array(found, dtype=np.float64)
    matrix.sum_duplicates()
    _refuse({"holds entries that are not finite numbers": not np.isfinite(matrix.data).all()})
    arrays = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, "shape": matrix.shape}
    return {**arrays, "kind": f"{layout} {field} {symmetry}", "title": _title(text)}


def _plain(content: bytes) -> bytes:
    """Decompress a text. It ends with a line's end: SciPy's parser looks for one behind the last number."""
    if content.startswith(b"\x1f\x8b"):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(MOST_TEXT + 1)
        except EOFError:
            raise RefusedError("is truncated: the gzip stream ends early") from None
        except (OSError, zlib.error) as error:
            raise RefusedError(f"is damaged: {error}") from None
    _refuse({f"is too long: more than {MOST_TEXT >> 20} MiB of text": len(content) > MOST_TEXT})
    return content if content.endswith(b"\n") else content + b"\n"


def _title(text: bytes) -> str:
    """Find the comment that names a matrix as in the SuiteSparse collection, else the first with a letter."""
    lines = text[: 1 << 14].split(b"\n")[1:]
    comments = [line.decode("utf-8", "replace").strip("% \t\r-") for line in lines if line.startswith(b"%")]
    named = [comment.removeprefix("name:").strip() for comment in comments if comment.startswith("name:")]
    return next((one for one in named + comments if any(char.isalpha() for char in one)), "")


def read_recording(content: bytes) -> dict[str, object]:
    """Read a WAV file, mixed down to one channel.

    Returns:
        Its `rate`, `channels`, `encoding`, and `samples` of float32 with full scale at 1.0.

    Raises:
        RefusedError: It is truncated, empty or beyond a limit.
        Exception: As SciPy says that the file is damaged, or has an encoding that cannot be read.
    """
    from scipy.io import wavfile

    with warnings.catch_warnings():
        # Other chunks than those of samples are skipped, but the samples must be whole.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "Reached EOF prematurely")
        rate, samples = wavfile.read(io.BytesIO(content))
    count, channels = len(samples), samples[:1].size
    _refuse({
        "holds no samples": not count,
        f"claims {rate} samples per second; from 1 to {MOST_RATE} are read": not 0 < rate <= MOST_RATE,
        f"claims {channels} channels; at most {MOST_CHANNELS} are read": channels > MOST_CHANNELS,
        f"is too long: {count} samples per channel, at most {MOST_FRAMES}": count > MOST_FRAMES,
    })  # fmt: skip
    mixed = _mixed(samples.reshape(count, channels))
    _refuse({"holds samples that are not finite numbers of float32": not np.isfinite(mixed).all()})
    order = ">" if content.startswith(b"RIFX") else "<"
    (bits,) = struct.unpack_from(f"{order}H", content, content.index(b"fmt ") + 22)
    encoding = f"{bits}-bit {'float' if samples.dtype.kind == 'f' else 'PCM'}"
    return {"rate": rate, "channels": channels, "encoding": encoding, "samples": mixed}


def _mixed(samples: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return the mean of the channels. SciPy has whole numbers justified to the left, bytes around 128."""
    middle, full = (128.0 if samples.dtype == np.uint8 else 0.0), 1.0
    if samples.dtype.kind != "f":
        full = 2.0 ** (8 * samples.dtype.itemsize - 1)
    with np.errstate(over="ignore"):
        means = (samples.mean(axis=1, dtype=np.float64) - middle) / full
        mixed: NDArray[np.float32] = means.astype(np.float32)
    return mixed


def _refuse(reasons: Mapping[str, bool]) -> None:
    """Raise the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise RefusedError(reason)


READERS = {"Matrix Market": read_matrix, "WAV": read_recording}


def main(kind: str) -> int:
    """Read standard input, and write what it holds."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MOST_MEMORY if hard == resource.RLIM_INFINITY else min(hard, MOST_MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        found = READERS[kind](sys.stdin.buffer.read())
    except RefusedError as error:
        reason = str(error)
    except MemoryError:
        reason = "does not fit into memory"
    except Exception as error:  # noqa: BLE001  SciPy answers a damaged file with errors of any class
        told = error if isinstance(error, (ValueError, OverflowError)) else "its parts do not fit together"
        reason = f"is not a valid {kind} file: {told}"
    else:
        np.savez(
            sys.stdout.buffer, allow_pickle=False, **{name: np.asarray(one) for name, one in found.items()}
        )
        return 0
    print(reason, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
