from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
from scipy.io import mmread, mmwrite
from scipy.sparse import coo_array, csr_array

from trio_accel.cli._matrix_market import parse_matrix
from trio_accel.cli._run import InputError

DATA = Path(__file__).parent / "data"
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
    banner = b"%%MatrixMarket matrix coordinate integer general\n1 1 1\n"
    assert dense(banner + b"1 1 7\n") == [[7]]
    assert dense(banner + b"1 1 99999999999999999999\n") == [[1e20]]


def test_arrays_are_column_by_column() -> None:
    assert dense(b"%%MatrixMarket matrix array real general\n2 2\n1\n2\n3\n4\n") == [[1, 3], [2, 4]]
    assert dense(b"%%MatrixMarket matrix array real symmetric\n2 2\n1\n2\n3\n") == [[1, 2], [2, 3]]


def test_the_header_may_be_in_any_case() -> None:
    assert dense(GOOD.replace(BANNER, BANNER.upper())) == [[4, 0.5], [0, 5]]


def test_lines_may_end_as_on_windows() -> None:
    assert dense(GOOD.replace(b"\n", b"\r\n")) == [[4, 0.5], [0, 5]]


@pytest.mark.parametrize("end", [b"", b"\n", b" ", b"\r", b"\r\n", b"\n\n  \n\t", b"\r\n\r\n"])
def test_the_last_line_may_end_in_any_way(end: bytes) -> None:
    assert dense(GOOD.removesuffix(b"\n") + end) == [[4, 0.5], [0, 5]]
    array = b"%%MatrixMarket matrix array real general\n2 2\n1\n2\n3\n4"
    assert dense(array + end) == [[1, 3], [2, 4]]


def test_blocks_of_lines_may_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in range(len(GOOD) - 20, len(GOOD) + 2):
        # The head must be in the first block.
        monkeypatch.setattr("trio_accel.cli._matrix_market.BLOCK", size)
        assert dense(GOOD) == [[4, 0.5], [0, 5]]
        assert dense(gzip.compress(GOOD[:-1])) == [[4, 0.5], [0, 5]]
    with pytest.raises(InputError, match=r"line 6 must hold a row .*, not '1 2 x'"):
        parse_matrix("x.mtx", GOOD.replace(b"0.5", b"x"))


def test_the_text_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_accel.cli._matrix_market.MOST_TEXT", 2 << 20)
    assert dense(GOOD + b"\n" * (1 << 20)) == [[4, 0.5], [0, 5]]
    with pytest.raises(InputError, match=r"^x\.mtx is too long: more than 2 MiB of text$"):
        parse_matrix("x.mtx", GOOD + gzip.decompress(gzip.compress(b"\n" * (2 << 20))))
    with pytest.raises(InputError, match=r"^x\.mtx is too long: more than 2 MiB of text$"):
        parse_matrix("x.mtx", gzip.compress(GOOD) + gzip.compress(b"\n" * (2 << 20)))


def test_the_name_in_a_header_of_the_suitesparse_collection(data: Path) -> None:
    assert parse_matrix("LFAT5.mtx", (data / "LFAT5.mtx").read_bytes()).title == "Oberwolfach/LFAT5"


@pytest.mark.parametrize("field", ["real", "integer", "unsigned-integer", "pattern"])
@pytest.mark.parametrize("symmetry", ["general", "symmetric"])
@pytest.mark.parametrize("layout", ["coordinate", "array"])
def test_what_scipy_writes_reads_as_scipy_reads_it(layout: str, symmetry: str, field: str) -> None:
    if (layout, field) == ("array", "pattern"):
        pytest.skip("the format has no such files")
    generator = np.random.default_rng(3)
    matrix = np.round(generator.standard_normal((30, 30)) * 1e6) * (generator.random((30, 30)) < 0.2)
    if symmetry == "symmetric":
        matrix = matrix + matrix.T
    if field == "real":
        matrix /= 7.0
    kind = {"integer": np.int64, "unsigned-integer": np.uint64}.get(field, np.float64)
    matrix = (np.abs(matrix) if field == "unsigned-integer" else matrix).astype(kind)
    file = io.BytesIO()
    written = coo_array(matrix) if layout == "coordinate" else matrix
    mmwrite(file, written, field=field, symmetry=symmetry)
    assert f"{layout} {field} {symmetry}".encode() in file.getvalue()
    expected = mmread(io.BytesIO(file.getvalue()), spmatrix=False)
    expected = expected if layout == "array" else expected.toarray()
    assert np.count_nonzero(expected) > 100
    assert parse_matrix("x.mtx", file.getvalue()).csr.toarray().tolist() == expected.astype(float).tolist()


@pytest.mark.parametrize(
    "name", sorted({path.name for path in DATA.glob("*.mtx*")} - {"GD99_cc.mtx", "plskz362.mtx"})
)
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
        (b"%%MatrixMarket matrix array pattern general\n1 1\n", "wrong Matrix Market header"),
        (BANNER, "is not a valid Matrix Market file: there is no line with the size of the matrix"),
        (BANNER[:-1], "there is no line with the size of the matrix in the first 1 MiB"),
        (BANNER + b"% 2 2 1", "there is no line with the size of the matrix"),
        (
            BANNER + b"2 x 1\n1 1 1\n",
            "line 2 must hold the numbers of rows, columns and entries, not '2 x 1'",
        ),
        (BANNER + b"-2 2 1\n1 1 1\n", "line 2 must hold the numbers of rows, columns and entries"),
        (BANNER + b"2 2", "line 2 must hold the numbers of rows, columns and entries, not '2 2'"),
        (BANNER + b"2 2 2.0\n1 1 1\n2 2 1\n", "line 2 must hold the numbers of"),
        (BANNER + b"2 2 1\n" + bytes(range(256)), "line 3 must hold a row from 1 to 2"),
        (BANNER + b"2 2 1\n" + bytes(5000), "line 3 must hold a row from 1 to 2"),
        (BANNER + bytes(5000), "line 2 must hold the numbers of"),
        (
            BANNER + b"2 2 3\n1 1 1\n2 2 1\n",
            "is truncated: its header promises 3 entries, it holds 2",
        ),
        (BANNER + b"2 2 1\n1 1 1\n2 2 1\n", "it holds more entries than the 1 that its header promises"),
        (
            BANNER + b"2 2 1\n\n0 1 1\n",
            "line 4 must hold a row from 1 to 2, a column from 1 to 2 and a number, not '0 1 1'",
        ),
        (BANNER + b"2 2 1\n1 3 1\n", "line 3 must hold a row from 1 to 2, a column from 1 to 2 and"),
        (BANNER + b"2 2 2\n1 1 1\n-1 1 1\n", "line 4 must hold a row from 1 to 2, a column from 1 to 2 and"),
        (BANNER + b"2 2 1\n1.0 1 1\n", "line 3 must hold a row"),
        (BANNER + b"2 2 1\n1 1\n", "line 3 must hold a row"),
        (BANNER + b"2 2 2\n1 1 1 2\n2 2\n", "line 3 must hold a row"),
        (BANNER + b"2 2 2\n1 1 1 2 2 2\n", "line 3 must hold a row"),
        (BANNER + b"2 2 2\n1 1 4\n% a comment\n2 2 5\n", "line 4 must hold a row"),
        (BANNER + b"2 2 1\n1 1 one\n", "line 3 must hold a row"),
        (BANNER + b"2 2 1\n1 1 1_0\n", "line 3 must hold a row"),
        (BANNER + b"2 2 1\n1 1 " + b"9" * 5000 + b"x\n", "line 3 must hold a row"),
        # Cut in the middle of a number, where SciPy's reader goes on behind the end of the file.
        (BANNER + b"2 2 2\n1 1 4\n2 2", "line 4 must hold a row"),
        (BANNER + b"2 2 2\n1 1 4\n2 2 ", "line 4 must hold a row"),
        (BANNER + b"2 2 2\n1 1 4\n2 2 5e", "line 4 must hold a row"),
        (BANNER + b"2 2 2\n1 1 4\n2 2 -", "line 4 must hold a row"),
        (
            b"%%MatrixMarket matrix coordinate pattern general\n2 2 1\n3 2\n",
            "line 3 must hold a row from 1 to 2 and a column from 1 to 2, not '3 2'",
        ),
        (
            b"%%MatrixMarket matrix coordinate integer general\n1 1 1\n1 1 1.5\n",
            "line 3 must hold a row from 1 to 1, a column from 1 to 1 and a whole number, not '1 1 1.5'",
        ),
        (BANNER + b"1 1 1\n1 1 nan\n", "holds entries that are not finite numbers"),
        (BANNER + b"1 1 1\n1 1 1e999\n", "holds entries that are not finite numbers"),
        (BANNER + b"0 0 0\n", "holds an empty matrix, 0 × 0"),
        (BANNER + b"3 0 0\n", "holds an empty matrix, 3 × 0"),
        (BANNER + b"200000000000000 2 1\n1 1 1\n", "is too large"),
        (
            b"%%MatrixMarket matrix array real general\n2 2\n1\n2\n3\n",
            "is truncated: its header promises 4 entries, it holds 3",
        ),
        (
            b"%%MatrixMarket matrix array real general\n2 2\n1 2\n3 4\n",
            "line 3 must hold a number, not '1 2'",
        ),
        (
            b"%%MatrixMarket matrix array real general\n1 1\n1\n2\n",
            "it holds more entries than the 1 that its header promises",
        ),
        (
            BANNER + b"2000000000 2000000000 1\n1 1 1\n",
            "is too large: 2000000000 × 2000000000, at most 5000000 rows and columns",
        ),
        (BANNER + b"3 5000001 1\n1 1 1\n", "is too large: 3 × 5000001, at most 5000000 rows and columns"),
        (BANNER + b"1 1 " + b"9" * 5000 + b"\n1 1 1\n", "entries, at most 5000000"),
        (BANNER + b"3 3 5000001\n1 1 1\n", "is too large: 5000001 entries, at most 5000000"),
        (
            b"%%MatrixMarket matrix array real general\n3000 3000\n1\n2\n",
            "is too large: 9000000 entries, at most 5000000",
        ),
        (
            b"%%MatrixMarket matrix coordinate real symmetric\n2 3 1\n2 3 1\n",
            "is not square (2 × 3), though its header says symmetric",
        ),
        (
            GOOD + b"1" * (3 << 20),
            "is no text file: line 7 has more than 1 MiB",
        ),
        (BANNER + b"% x\n" * (1 << 18) + b"1 1 1\n1 1 1\n", "there is no line with the size of the matrix"),
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
