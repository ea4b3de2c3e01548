"""Matrix Market files: read by SciPy, with every way in which a file can be wrong said in one line.

Format: Boisvert, Pozo, Remington, "The Matrix Market Exchange Formats", NISTIR 5935 (1996).
"""

from __future__ import annotations

import gzip
import io
import zlib
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trio_accel.cli._errors import InputError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Matrix", "is_matrix", "parse_matrix"]

_LAYOUTS = ("coordinate", "array")
_FIELDS = ("real", "integer", "unsigned-integer", "pattern", "complex", "double")
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")
_LARGEST = 2**31 - 1
# So many rows without an entry may be there: what is wrong with them is said better later.
_FREE_ROWS = 1_000_000
_GZIP = b"\x1f\x8b"
_BANNER = b"%%matrixmarket"


@attrs.frozen(kw_only=True)
class Matrix:
    """A real sparse matrix from a file.

    Attributes:
        name: The file's name.
        kind: Layout, field and storage as the file names them, e.g. ``"coordinate real symmetric"``.
        title: What the comments at the head of the file call it, or an empty string.
        csr: float64, duplicates summed, column indices sorted.
    """

    name: str
    kind: str
    title: str
    csr: csr_array[np.float64] = attrs.field(eq=False, repr=False)


def is_matrix(head: bytes) -> bool:
    """Whether a file that begins like this can be a Matrix Market file, plain or compressed."""
    return head.startswith(_GZIP) or head.lower().startswith(_BANNER)


def parse_matrix(name: str, content: bytes) -> Matrix:
    """The real matrix in the content of a Matrix Market file, plain or gzip-compressed.

    Args:
        name: What to call the file in messages.
        content: The whole file.

    Raises:
        InputError: It is not a Matrix Market file, truncated, inconsistent, complex, empty or not finite.
    """
    text = _decompressed(name, content)
    kind, title = _header(name, text)
    csr = _read(name, kind, text)
    if not np.isfinite(csr.data).all():
        raise InputError(f"{name} holds entries that are not finite numbers")
    return Matrix(name=name, kind=kind, title=title, csr=csr)


def _decompressed(name: str, content: bytes) -> bytes:
    if not content.startswith(_GZIP):
        if name.endswith(".gz"):
            raise InputError(f"{name} is not gzip-compressed, though its name ends in .gz")
        return content
    try:
        return gzip.decompress(content)
    except EOFError:
        raise InputError(f"{name} is truncated: the gzip stream ends early") from None
    except (OSError, zlib.error) as error:
        raise InputError(f"{name} is damaged: {error}") from error


def _header(name: str, text: bytes) -> tuple[str, str]:
    """Kind and title; a complex or skew-symmetric matrix is refused before its body is read."""
    line, _, rest = text.partition(b"\n")
    words = line.decode("latin-1").lower().split()
    if not words or words[0] != _BANNER.decode():
        raise InputError(
            f"{name} is not a Matrix Market file: its first line does not begin with %%MatrixMarket"
        )
    allowed = (("matrix",), _LAYOUTS, _FIELDS, _SYMMETRIES)
    if len(words) != 5 or any(word not in names for word, names in zip(words[1:], allowed, strict=True)):
        raise InputError(f"{name} has a wrong Matrix Market header: {line.decode('latin-1').strip()[:100]!r}")
    _, _, layout, field, symmetry = words
    if field == "complex" or symmetry == "hermitian":
        raise InputError(f"{name} holds a complex matrix: only real ones are solved here")
    if symmetry == "skew-symmetric":
        raise InputError(
            f"{name} is skew-symmetric, so not positive definite: conjugate gradients cannot solve it"
        )
    return f"{layout} {field} {symmetry}", _title(rest)


def _title(rest: bytes) -> str:
    """The comment that names the matrix as in the SuiteSparse collection, else the first with a letter."""
    first = ""
    for line in rest[:4000].decode("utf-8", "replace").splitlines():
        if not line.startswith("%"):
            break
        text = line.strip("% \t-")
        if text.startswith("name:"):
            return text.removeprefix("name:").strip()
        first = first or (text if any(char.isalpha() for char in text) else "")
    return first


def _read(name: str, kind: str, text: bytes) -> csr_array[np.float64]:
    from scipy.io import mminfo, mmread
    from scipy.sparse import coo_array, csr_array

    banner = f"%%MatrixMarket matrix {kind}\n".encode()
    if not text.startswith(banner):
        # SciPy knows the banner in one spelling only; the format leaves the case open.
        text = banner + text.partition(b"\n")[2]
    try:
        rows, columns, entries = mminfo(io.BytesIO(text))[:3]
        _check_size(name, rows, columns, entries, len(text))
        coo = coo_array(mmread(io.BytesIO(text), spmatrix=False)).astype(np.float64)
        # Rows take memory as well as entries, and a few bytes can declare any number of them.
        if coo.nnz < max(rows, columns) > _FREE_ROWS:
            raise InputError(
                f"{name} holds {coo.nnz} entries, too few for a positive definite matrix of "
                f"{rows} × {columns}: conjugate gradients cannot solve it"
            )
        csr = csr_array(coo)
    except MemoryError:
        raise InputError(f"{name} does not fit into memory") from None
    except (ValueError, OverflowError, TypeError, IndexError) as error:
        reason = str(error).rstrip(".")
        raise InputError(
            f"{name} is not a valid Matrix Market file: {reason[:1].lower() + reason[1:]}"
        ) from error
    csr.sum_duplicates()
    csr.sort_indices()
    return csr


def _check_size(name: str, rows: int, columns: int, entries: int, length: int) -> None:
    """Hold what a header declares against the file, before memory is asked for."""
    if max(rows, columns) > _LARGEST:
        raise InputError(f"{name} is too large: {rows} × {columns}, at most {_LARGEST} rows and columns")
    if 0 in (rows, columns):
        raise InputError(f"{name} holds an empty matrix, {rows} × {columns}")
    # An entry takes two bytes at least: a digit and the end of its line.
    if 2 * entries > length:
        raise InputError(
            f"{name} is truncated: its header promises {entries} entries, it has {length} bytes in all"
        )
