from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from scipy.io import mmread
from scipy.sparse import csr_array

from trio_accel.cli._errors import InputError
from trio_accel.cli._matrix_market import parse_matrix

BANNER = b"%%MatrixMarket matrix coordinate real general\n"
GOOD = BANNER + b"% a comment\n2 2 3\n1 1 4\n2 2 5\n1 2 0.5\n"


def dense(content: bytes, name: str = "x.mtx") -> list[list[float]]:
    matrix: list[list[float]] = parse_matrix(name, content).csr.toarray().tolist()
    return matrix


def test_general_coordinates() -> None:
    matrix = parse_matrix("x.mtx", GOOD)
    assert matrix.csr.toarray().tolist() == [[4, 0.5], [0, 5]]
    assert (matrix.kind, matrix.title, matrix.csr.dtype) == (
        "coordinate real general",
        "a comment",
        np.float64,
    )


def test_gzip_is_told_by_content() -> None:
    assert dense(gzip.compress(GOOD)) == dense(GOOD)


def test_symmetric_storage_has_both_triangles() -> None:
    text = b"%%MatrixMarket matrix coordinate real symmetric\n2 2 2\n1 1 4\n2 1 1\n"
    assert dense(text) == [[4, 1], [1, 0]]


def test_duplicates_are_summed() -> None:
    assert dense(BANNER + b"1 1 3\n1 1 4\n1 1 0.5\n1 1 -1\n") == [[3.5]]


def test_pattern_entries_are_ones() -> None:
    assert dense(b"%%MatrixMarket matrix coordinate pattern general\n2 2 2\n1 1\n2 1\n") == [[1, 0], [1, 0]]


def test_integers_become_float64() -> None:
    assert dense(b"%%MatrixMarket matrix coordinate integer general\n1 1 1\n1 1 7\n") == [[7]]


def test_arrays_are_column_by_column() -> None:
    assert dense(b"%%MatrixMarket matrix array real general\n2 2\n1\n2\n3\n4\n") == [[1, 3], [2, 4]]
    assert dense(b"%%MatrixMarket matrix array real symmetric\n2 2\n1\n2\n3\n") == [[1, 2], [2, 3]]


def test_the_header_may_be_in_any_case() -> None:
    assert dense(GOOD.replace(BANNER, BANNER.upper())) == [[4, 0.5], [0, 5]]


def test_lines_may_end_as_on_windows() -> None:
    assert dense(GOOD.replace(b"\n", b"\r\n")) == [[4, 0.5], [0, 5]]


def test_the_name_in_a_header_of_the_suitesparse_collection(data: Path) -> None:
    assert parse_matrix("LFAT5.mtx", (data / "LFAT5.mtx").read_bytes()).title == "Oberwolfach/LFAT5"


@pytest.mark.parametrize("name", ["LFAT5.mtx", "bcsstk01.mtx", "nos5.mtx.gz", "west0067.mtx", "bcspwr01.mtx"])
def test_files_that_others_made_read_as_scipy_reads_them(data: Path, name: str) -> None:
    ours = parse_matrix(name, (data / name).read_bytes()).csr
    difference = ours - csr_array(mmread(data / name, spmatrix=False))
    assert ours.nnz > 0
    assert abs(difference).max() == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"1 2 3\n", "is not a Matrix Market file: its first line does not begin with %%MatrixMarket"),
        (b"\x89PNG\r\n", "is not a Matrix Market file"),
        (
            b"%%MatrixMarket matrix coordinate real\n",
            "wrong Matrix Market header: '%%MatrixMarket matrix coordinate real'",
        ),
        (b"%%MatrixMarket junk coordinate real general\n", "wrong Matrix Market header"),
        (b"%%MatrixMarket matrix coordinate pattern bogus\n", "wrong Matrix Market header"),
        (b"%%MatrixMarket matrix coordinate complex general\n1 1 1\n1 1 1 0\n", "holds a complex matrix"),
        (b"%%MatrixMarket matrix coordinate real skew-symmetric\n1 1 0\n", "is skew-symmetric"),
        (BANNER, "is not a valid Matrix Market file"),
        (BANNER + b"2 x 1\n1 1 1\n", "is not a valid Matrix Market file"),
        (BANNER + b"-2 2 1\n1 1 1\n", "is not a valid Matrix Market file"),
        (
            BANNER + b"2 2 3\n1 1 1\n2 2 1\n",
            "is not a valid Matrix Market file: truncated file. Expected another 1 lines",
        ),
        (BANNER + b"2 2 1\n1 1 1\n2 2 1\n", "is not a valid Matrix Market file: line 4: Too many lines"),
        (BANNER + b"2 2 1\n0 1 1\n", "is not a valid Matrix Market file: line 3: Row index out of bounds"),
        (BANNER + b"2 2 1\n1 3 1\n", "is not a valid Matrix Market file: line 3: Column index out of bounds"),
        (BANNER + b"2 2 1\n1 1\n", "is not a valid Matrix Market file: line 3"),
        (BANNER + b"2 2 1\n1 1 one\n", "is not a valid Matrix Market file: line 3"),
        (BANNER + b"1 1 1\n1 1 nan\n", "holds entries that are not finite numbers"),
        (BANNER + b"1 1 1\n1 1 1e999\n", "holds entries that are not finite numbers"),
        (BANNER + b"0 0 0\n", "holds an empty matrix, 0 × 0"),
        (BANNER + b"3 0 0\n", "holds an empty matrix, 3 × 0"),
        (BANNER + b"200000000000000 2 1\n1 1 1\n", "is too large"),
        (
            b"%%MatrixMarket matrix array real general\n2 2\n1\n2\n3\n",
            "is not a valid Matrix Market file: truncated",
        ),
        (
            b"%%MatrixMarket matrix array real general\n1 1\n1\n2\n",
            "is not a valid Matrix Market file: line 4",
        ),
        (b"%%MatrixMarket matrix coordinate integer general\n1 1 1\n1 1 99999999999999999999\n", "line 3"),
        (
            BANNER + b"2000000000 2000000000 1\n1 1 1\n",
            "holds 1 entries, too few for a positive definite matrix of 2000000000 × 2000000000",
        ),
        (BANNER + b"2000000000 3 1\n1 1 1\n", "too few for a positive definite matrix of 2000000000 × 3"),
        (
            BANNER + b"3 3 2000000000000\n1 1 1\n",
            "is truncated: its header promises 2000000000000 entries",
        ),
        (
            b"%%MatrixMarket matrix array real general\n1000000 1000000\n1\n2\n",
            "is truncated: its header promises 1000000000000 entries",
        ),
        (b"\x1f\x8b", "is truncated: the gzip stream ends early"),
        (gzip.compress(GOOD, mtime=0)[:-9], "is truncated: the gzip stream ends early"),
        (gzip.compress(GOOD, mtime=0)[:-8] + bytes(8), "is damaged: CRC check failed"),
        (b"\x1f\x8b\x08\x00" + bytes(6) + b"\xff" * 20, "is damaged"),
    ],
)
def test_what_is_not_a_usable_matrix(content: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=r"^x\.mtx ") as caught:
        parse_matrix("x.mtx", content)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plain_file_with_a_compressed_name() -> None:
    with pytest.raises(InputError, match=r"is not gzip-compressed, though its name ends in \.gz"):
        parse_matrix("x.mtx.gz", GOOD)


def test_every_truncation_of_a_compressed_file_is_noticed(data: Path) -> None:
    content = gzip.compress((data / "LFAT5.mtx").read_bytes())
    for length in range(2, len(content)):
        with pytest.raises(InputError, match="is truncated"):
            parse_matrix("x.mtx.gz", content[:length])


def test_every_cut_between_lines_is_noticed(data: Path) -> None:
    lines = (data / "LFAT5.mtx").read_bytes().splitlines(keepends=True)
    for count in range(len(lines)):
        with pytest.raises(InputError):
            parse_matrix("x.mtx", b"".join(lines[:count]))
