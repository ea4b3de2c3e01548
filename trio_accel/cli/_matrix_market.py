"""Matrix Market files, plain or compressed, read by blocks of lines and within limits.

``scipy.io.mmread`` is not used here: its native parser reads beyond the end of a file that is cut in the
middle of a number, and crashes the program. A file of a few bytes can have it ask for any memory. SciPy 1.17
takes an entry of ``5ex0`` for 5.

Format: Boisvert, Pozo, Remington, "The Matrix Market Exchange Formats", NISTIR 5935 (1996).
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from trio_accel.cli._run import InputError, read_input

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["MOST_ENTRIES", "MOST_ROWS", "Matrix", "parse_matrix", "read_matrix"]

BLOCK = 1 << 20
"""Bytes that are read and handed out at once."""

GZIP = b"\x1f\x8b"
"""How a compressed file begins."""

MOST_TEXT = 256 << 20
"""Bytes of the longest text, decompressed, that is read."""

MOST_ROWS = 5_000_000
"""Rows, and columns, of the largest matrix that is read."""

MOST_ENTRIES = 5_000_000
"""Entries of the largest file that is read; symmetric storage stands for nearly twice as many."""

_LAYOUTS = ("coordinate", "array")
_FIELDS = ("real", "integer", "unsigned-integer", "pattern", "complex", "double")
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")
_BANNER = b"%%matrixmarket"
# A number with more digits is beyond every limit, and slow to convert.
_MOST_DIGITS = 18
_SHOWN = 60
_CARRIED = "bcsstk16.mtx.gz"


@attrs.frozen(kw_only=True)
class Matrix:
    """A real sparse matrix from a file.

    Attributes:
        name: The file's name.
        kind: Layout, field and storage as the file names them, e.g. ``"coordinate real symmetric"``.
        title: Its title in the comments at the head of the file, or an empty string.
        csr: float64, duplicates summed, column indices sorted.
    """

    name: str
    kind: str
    title: str
    csr: csr_array[np.float64] = attrs.field(eq=False, repr=False)


@attrs.frozen(kw_only=True)
class _Header:
    """Head of a file: all before the first entry.

    Attributes:
        lines: Lines that it takes.
        layout: ``"coordinate"``, or ``"array"`` for all entries column by column, without indices.
        field: Type of the entries.
        symmetry: ``"general"``, or ``"symmetric"`` for one triangle.
        title: The matrix' title in the comments.
        shape: Rows and columns.
        entries: Entries that follow, one to a line.
    """

    lines: int
    layout: str
    field: str
    symmetry: str
    title: str
    shape: tuple[int, int]
    entries: int

    @property
    def types(self) -> Sequence[Callable[[bytes], float]]:
        """Name the words of an entry."""
        indices = [int, int] if self.layout == "coordinate" else []
        values = [] if self.field == "pattern" else [int if "integer" in self.field else float]
        return [*indices, *values]

    @property
    def entry(self) -> str:
        """Name the necessary content of a line."""
        rows, columns = self.shape
        value = "a whole number" if "integer" in self.field else "a number"
        if self.layout == "array":
            return value
        row, column = f"a row from 1 to {rows}", f"a column from 1 to {columns}"
        return f"{row} and {column}" if self.field == "pattern" else f"{row}, {column} and {value}"


def read_matrix(path: Path | None) -> Matrix:
    """Return the user's matrix, or the carried one for ``None``. Blocking.

    Raises:
        InputError: The file is missing, unreadable, not a Matrix Market file or beyond a limit.
    """
    return parse_matrix(*read_input(path, _CARRIED, _is_matrix))


def _is_matrix(head: bytes) -> bool:
    """Tell whether a file that begins like this can be a Matrix Market file, plain or compressed."""
    return head.startswith(GZIP) or head.lower().startswith(_BANNER)


def parse_matrix(name: str, content: bytes) -> Matrix:
    """Read the real matrix in the content of a Matrix Market file, plain or gzip-compressed. Blocking.

    Args:
        name: The file's name in messages.
        content: The whole file.

    Raises:
        InputError: It is not a Matrix Market file, truncated, inconsistent, complex, empty, not finite or
            beyond a limit; the message says what the limit is.
    """
    try:
        blocks = _blocks_of_lines(name, content)
        nothing: list[bytes] = []
        head = next(blocks, nothing)
        header = _header(name, head)
        csr = _csr(header, _entries(name, header, chain([head[header.lines :]], blocks)))
    except MemoryError:
        raise InputError(f"{name} does not fit into memory") from None
    if not np.isfinite(csr.data).all():
        raise InputError(f"{name} holds entries that are not finite numbers")
    kind = f"{header.layout} {header.field} {header.symmetry}"
    return Matrix(name=name, kind=kind, title=header.title, csr=csr)


def _header(name: str, lines: Sequence[bytes]) -> _Header:
    """Everything up to the line with the sizes; what cannot be solved is refused before any entry is read."""
    layout, field, symmetry = _kind(name, lines[0] if lines else b"")
    number = next(
        (number for number, line in enumerate(lines) if line.strip() and not line.startswith(b"%")), None
    )
    if number is None:
        raise _invalid(name, f"there is no line with the size of the matrix in the first {BLOCK >> 20} MiB")
    words = lines[number].split()
    sizes_of = "rows, columns and entries" if layout == "coordinate" else "rows and columns"
    if len(words) != len(sizes_of.replace(" and", "").split()) or not all(word.isdigit() for word in words):
        raise _invalid(name, _wrong_line(number + 1, f"the numbers of {sizes_of}", lines[number]))
    sizes = [int(word[:_MOST_DIGITS]) for word in words]
    shape = (sizes[0], sizes[1])
    entries = sizes[2] if layout == "coordinate" else _stored(shape, symmetry)
    _check_size(name, shape, symmetry, entries)
    return _Header(
        lines=number + 1,
        layout=layout,
        field=field,
        symmetry=symmetry,
        title=_title(lines[1:number]),
        shape=shape,
        entries=entries,
    )


def _kind(name: str, line: bytes) -> tuple[str, str, str]:
    """Layout, field and storage; a complex or skew-symmetric matrix is refused."""
    words = line.decode("latin-1").lower().split()
    if not words or words[0] != _BANNER.decode():
        raise InputError(
            f"{name} is not a Matrix Market file: its first line does not begin with %%MatrixMarket"
        )
    allowed = (("matrix",), _LAYOUTS, _FIELDS, _SYMMETRIES)
    is_known = len(words) == 5 and all(word in known for word, known in zip(words[1:], allowed, strict=True))
    if not is_known or words[2:4] == ["array", "pattern"]:
        raise InputError(f"{name} has a wrong Matrix Market header: {line.decode('latin-1').strip()[:100]!r}")
    _, _, layout, field, symmetry = words
    if field == "complex" or symmetry == "hermitian":
        raise InputError(f"{name} holds a complex matrix: only real ones are solved here")
    if symmetry == "skew-symmetric":
        raise InputError(
            f"{name} is skew-symmetric, so not positive definite: conjugate gradients cannot solve it"
        )
    return layout, field, symmetry


def _title(comments: Sequence[bytes]) -> str:
    """The comment that names the matrix as in the SuiteSparse collection, else the first with a letter."""
    texts = [line[:1000].decode("utf-8", "replace").strip("% \t\r-") for line in comments[:100]]
    named = (text.removeprefix("name:").strip() for text in texts if text.startswith("name:"))
    lettered = (text for text in texts if any(char.isalpha() for char in text))
    return next(chain(named, lettered), "")


def _stored(shape: tuple[int, int], symmetry: str) -> int:
    """Entries of a dense matrix in a file."""
    rows, columns = shape
    return rows * (rows + 1) // 2 if symmetry == "symmetric" else rows * columns


def _check_size(name: str, shape: tuple[int, int], symmetry: str, entries: int) -> None:
    """Hold what a header declares against the limits."""
    rows, columns = shape
    if 0 in shape:
        raise InputError(f"{name} holds an empty matrix, {rows} × {columns}")
    if max(shape) > MOST_ROWS:
        raise InputError(f"{name} is too large: {rows} × {columns}, at most {MOST_ROWS} rows and columns")
    if entries > MOST_ENTRIES:
        raise InputError(f"{name} is too large: {entries} entries, at most {MOST_ENTRIES}")
    if symmetry == "symmetric" and rows != columns:
        raise InputError(f"{name} is not square ({rows} × {columns}), though its header says symmetric")


def _entries(name: str, header: _Header, blocks: Iterable[Sequence[bytes]]) -> NDArray[np.float64]:
    """Return all entries: as many rows, and as many columns as an entry has words."""
    parts: list[NDArray[np.float64]] = []
    number, count = header.lines + 1, 0
    for block in blocks:
        part = _numbers(header, block)
        if part is None:
            raise _wrong_entry(name, header, number, block)
        parts.append(part)
        number, count = number + len(block), count + len(part)
        if count > header.entries:
            raise _invalid(name, f"it holds more entries than the {header.entries} that its header promises")
    if count < header.entries:
        raise InputError(
            f"{name} is truncated: its header promises {header.entries} entries, it holds {count}"
        )
    return np.concatenate(parts)


def _numbers(header: _Header, lines: Sequence[bytes]) -> NDArray[np.float64] | None:
    """Return the entries in some lines, ``None`` if one of these is wrong."""
    entries = [words for line in lines if (words := line.split())]
    if not entries:
        return np.empty((0, len(header.types)))
    try:
        columns = list(zip(*entries, strict=True))
        values = [list(map(convert, column)) for convert, column in zip(header.types, columns, strict=True)]
        table = np.array(values, np.float64).T
    except (ValueError, OverflowError):
        return None
    # Python's numbers may have underscores, those of a file may not.
    is_right = not any(b"_" in line for line in lines)
    if header.layout == "coordinate":
        is_right = is_right and bool(((table[:, :2] >= 1) & (table[:, :2] <= header.shape)).all())
    return table if is_right else None


def _wrong_entry(name: str, header: _Header, first: int, lines: Sequence[bytes]) -> InputError:
    """Describe the error of the first wrong line."""
    wrong = ((number, line) for number, line in enumerate(lines, first) if _numbers(header, [line]) is None)
    number, line = next(wrong)
    return _invalid(name, _wrong_line(number, header.entry, line))


def _wrong_line(number: int, wanted: str, line: bytes) -> str:
    return f"line {number} must hold {wanted}, not {line.decode('latin-1').strip()[:_SHOWN]!r}"


def _invalid(name: str, reason: str) -> InputError:
    return InputError(f"{name} is not a valid Matrix Market file: {reason}")


def _csr(header: _Header, entries: NDArray[np.float64]) -> csr_array[np.float64]:
    from scipy.sparse import csr_array

    if header.layout == "array":
        return csr_array(_dense(header, entries[:, 0]))
    values = entries[:, 2] if entries.shape[1] == 3 else np.ones(len(entries))
    rows, columns = entries[:, :2].astype(np.int32).T - np.int32(1)
    if header.symmetry == "symmetric":
        # The other triangle.
        other = rows != columns
        rows, columns = np.append(rows, columns[other]), np.append(columns, rows[other])
        values = np.append(values, values[other])
    csr = csr_array((values, (rows, columns)), shape=header.shape)
    csr.sum_duplicates()
    csr.sort_indices()
    return csr


def _dense(header: _Header, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a matrix that is stored column by column; of a symmetric one only the lower triangle is."""
    if header.symmetry != "symmetric":
        return values.reshape(header.shape[::-1]).T
    dense = np.zeros(header.shape)
    # The lower triangle by columns is the upper one by rows.
    columns, rows = np.triu_indices(header.shape[0])
    dense[rows, columns] = dense[columns, rows] = values
    return dense


def _blocks_of_lines(name: str, content: bytes) -> Iterator[list[bytes]]:
    """Yield whole lines without their ends, those in `BLOCK` bytes at a time. Blocking.

    Args:
        name: The file's name in messages.
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
