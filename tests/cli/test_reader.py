from __future__ import annotations

import gzip
import io
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import trio
from scipy.io import mmread, mmwrite, wavfile
from scipy.sparse import coo_array, csr_array

from trio_accel.cli import _reader, _run

DATA = Path(__file__).parent / "data"
SCIPY_FILES = Path(scipy.io.__file__).parent / "tests" / "data"
BANNER = b"%%MatrixMarket matrix coordinate real general\n"
GOOD = BANNER + b"% a comment\n2 2 3\n1 1 4\n2 2 5\n1 2 0.5\n"
SINE = np.sin(np.arange(100) / 7.0)


def csr_of(content: bytes) -> csr_array[np.float64]:
    found: dict[str, Any] = _reader.read_matrix(content)
    return csr_array((found["data"], found["indices"], found["indptr"]), shape=found["shape"])


def dense(content: bytes) -> list[list[float]]:
    matrix: list[list[float]] = csr_of(content).toarray().tolist()
    return matrix


def wav(samples: np.ndarray, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    wavfile.write(file, rate, samples)
    return file.getvalue()


def chunks(channels: int = 1, rate: int = 8000, bits: int = 16, data: bytes = b"\0" * 8) -> bytes:
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block, block, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


async def test_a_file_is_read_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x.mtx"
    path.write_bytes(gzip.compress(GOOD))
    name, found = await _run.read_apart("Matrix Market", path, "", (b"\x1f\x8b",))
    assert (name, str(found["kind"]), str(found["title"])) == (
        str(path),
        "coordinate real general",
        "a comment",
    )
    csr = csr_array((found["data"], found["indices"], found["indptr"]), shape=found["shape"])
    assert csr.toarray().tolist() == [[4, 0.5], [0, 5]]


def test_channels_are_mixed_down() -> None:
    stereo = np.stack([np.full(10, 1000, np.int16), np.full(10, 3000, np.int16)], axis=1)
    found: dict[str, Any] = _reader.read_recording(wav(stereo))
    assert (found["rate"], found["channels"], found["encoding"]) == (8000, 2, "16-bit PCM")
    assert found["samples"].tolist() == [np.float32(2000 / 32768)] * 10


async def read_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    """Read a file by a program in place of the reader."""
    path, own = tmp_path / "x.wav", trio.run_process
    path.write_bytes(wav(SINE))

    async def run_process(command: list[str], **options: Any) -> Any:
        return await own([sys.executable, "-c", program, *command[3:]], **options)

    monkeypatch.setattr("trio.run_process", run_process)
    await _run.read_apart("WAV", path, "", (b"riff",))


async def test_a_file_that_crashes_its_reader_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(_run.InputError, match=r"x\.wav cannot be read: SciPy's reader ended with code -9$"):
        await read_by(monkeypatch, tmp_path, "import os; os.kill(os.getpid(), 9)")


async def test_a_file_that_holds_its_reader_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_run, "READ_SECONDS", 0.01)
    with pytest.raises(_run.InputError, match=r"x\.wav is too slow to read: 0\.01 seconds were not enough$"):
        await read_by(monkeypatch, tmp_path, "import signal; signal.pause()")


def test_symmetric_storage_has_both_triangles() -> None:
    text = b"%%MatrixMarket matrix coordinate real symmetric\n2 2 2\n1 1 4\n2 1 1\n"
    assert dense(text) == [[4, 1], [1, 0]]


def test_duplicates_are_summed() -> None:
    assert dense(BANNER + b"1 1 3\n1 1 4\n1 1 0.5\n1 1 -1\n") == [[3.5]]


@pytest.mark.parametrize("end", [b"", b"\n", b" ", b"\r", b"\r\n", b"\n\n  \n\t", b"\r\n\r\n"])
def test_the_last_line_may_end_in_any_way(end: bytes) -> None:
    assert dense(GOOD.removesuffix(b"\n") + end) == [[4, 0.5], [0, 5]]
    array = b"%%MatrixMarket matrix array real general\n2 2\n1\n2\n3\n4"
    assert dense(array + end) == [[1, 3], [2, 4]]


def test_the_name_in_a_header_of_the_suitesparse_collection(data: Path) -> None:
    assert _reader.read_matrix((data / "LFAT5.mtx").read_bytes())["title"] == "Oberwolfach/LFAT5"


@pytest.mark.parametrize("field", ["real", "integer", "unsigned-integer", "pattern"])
@pytest.mark.parametrize("symmetry", ["general", "symmetric"])
@pytest.mark.parametrize("layout", ["coordinate", "array"])
def test_what_scipy_writes_is_read_as_float64(layout: str, symmetry: str, field: str) -> None:
    if (layout, field) == ("array", "pattern"):
        pytest.skip("the format has no such files")
    generator = np.random.default_rng(3)
    matrix = np.round(generator.standard_normal((30, 30)) * 1e6) * (generator.random((30, 30)) < 0.2)
    if symmetry == "symmetric":
        matrix = matrix + matrix.T
    if field == "real":
        matrix /= 7.0
    words: dict[str, Any] = {"field": field, "symmetry": symmetry}
    kind = {"integer": np.int64, "unsigned-integer": np.uint64}.get(field, np.float64)
    matrix = (np.abs(matrix) if field == "unsigned-integer" else matrix).astype(kind)
    file = io.BytesIO()
    mmwrite(file, coo_array(matrix) if layout == "coordinate" else matrix, **words)
    assert _reader.read_matrix(file.getvalue())["kind"] == f"{layout} {field} {symmetry}"
    wanted = (matrix != 0) if field == "pattern" else matrix
    assert dense(file.getvalue()) == wanted.astype(np.float64).tolist()


@pytest.mark.parametrize(
    "name", sorted({path.name for path in DATA.glob("*.mtx*")} - {"GD99_cc.mtx", "plskz362.mtx"})
)
def test_files_that_others_made(data: Path, name: str) -> None:
    ours = csr_of((data / name).read_bytes())
    difference = ours - csr_array(mmread(data / name, spmatrix=False))
    assert ours.nnz > 0
    assert abs(difference).max() == 0


@pytest.mark.parametrize(
    ("samples", "encoding", "step"),
    [
        (np.round(SINE * 127 + 128).astype(np.uint8), "8-bit PCM", 2**-7),
        (np.round(SINE * 32767).astype(np.int16), "16-bit PCM", 2**-15),
        (np.round(SINE * (2**31 - 1)).astype(np.int32), "32-bit PCM", 2**-23),
        (SINE.astype(np.float32), "32-bit float", 2**-23),
        (SINE.astype(np.float64), "64-bit float", 2**-23),
    ],
)
def test_samples_have_full_scale_one(samples: np.ndarray, encoding: str, step: float) -> None:
    found: dict[str, Any] = _reader.read_recording(wav(samples))
    assert (found["encoding"], found["rate"], found["channels"]) == (encoding, 8000, 1)
    assert np.abs(found["samples"] - SINE).max() <= 1.5 * step


def test_24_bits() -> None:
    values = np.array([0, 1, -1, 2**23 - 1, -(2**23), 123456, -654321])
    data = b"".join(int(value).to_bytes(3, "little", signed=True) for value in values)
    found: dict[str, Any] = _reader.read_recording(chunks(bits=24, data=data))
    assert found["encoding"] == "24-bit PCM"
    assert found["samples"].tolist() == (values / 2**23).astype(np.float32).tolist()


@pytest.mark.skipif(not SCIPY_FILES.is_dir(), reason="this SciPy came without its tests")
@pytest.mark.parametrize(
    ("name", "channels", "encoding"),
    [
        ("test-8000Hz-le-2ch-1byteu.wav", 2, "8-bit PCM"),
        ("test-44100Hz-le-1ch-4bytes-rf64.wav", 1, "32-bit PCM"),
        ("test-44100Hz-2ch-32bit-float-be.wav", 2, "32-bit float"),
        ("test-48000Hz-2ch-64bit-float-le-wavex.wav", 2, "64-bit float"),
        ("test-8000Hz-be-3ch-5S-24bit.wav", 3, "24-bit PCM"),
        ("test-8000Hz-le-4ch-9S-12bit.wav", 4, "12-bit PCM"),
    ],
)
def test_files_of_scipys_test_suite(name: str, channels: int, encoding: str) -> None:
    found: dict[str, Any] = _reader.read_recording((SCIPY_FILES / name).read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rate, samples = wavfile.read(SCIPY_FILES / name)
    values = samples.reshape(len(samples), -1).astype(np.float64)
    if samples.dtype == np.uint8:
        values = (values - 128) / 128
    elif samples.dtype.kind == "i":
        values /= -float(np.iinfo(samples.dtype).min)
    assert (found["rate"], found["channels"], found["encoding"]) == (rate, channels, encoding)
    assert np.abs(found["samples"] - values.mean(axis=1)).max() <= 2**-24


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (chunks(data=b""), "holds no samples"),
        (chunks(rate=1_000_001), "claims 1000001 samples per second; from 1 to 1000000 are read"),
        (chunks(channels=257, bits=8, data=bytes(257)), "claims 257 channels; at most 256 are read"),
        (wav(np.array([np.nan, 1.0], np.float32)), "holds samples that are not finite numbers of float32"),
        (wav(np.array([1e300, 1.0])), "holds samples that are not finite numbers of float32"),
    ],
)
def test_recordings_that_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(_reader.RefusedError) as caught:
        _reader.read_recording(content)
    assert str(caught.value) == reason


def test_limits_of_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reader, "MOST_FRAMES", 99)
    with pytest.raises(_reader.RefusedError, match=r"^is too long: 100 samples per channel, at most 99$"):
        _reader.read_recording(wav(SINE))
    monkeypatch.setattr(_reader, "MOST_TEXT", 1 << 20)
    assert dense(BANNER + b"%\n" * 1000 + GOOD.split(b"\n", 2)[2]) == [[4, 0.5], [0, 5]]
    for content in (GOOD + b"\n" * (1 << 20), gzip.compress(GOOD) + gzip.compress(b"\n" * (1 << 20))):
        with pytest.raises(_reader.RefusedError, match=r"^is too long: more than 1 MiB of text$"):
            _reader.read_matrix(content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"%%MatrixMarket matrix coordinate complex general\n1 1 1\n1 1 1 0\n", "holds a complex matrix"),
        (b"%%MatrixMarket matrix coordinate real skew-symmetric\n1 1 0\n", "is skew-symmetric, so not"),
        (BANNER + b"1 1 1\n1 1 nan\n", "holds entries that are not finite numbers"),
        (BANNER + b"1 1 1\n1 1 1e999\n", "holds entries that are not finite numbers"),
        (BANNER + b"0 0 0\n", "holds an empty matrix, 0 × 0"),
        (BANNER + b"3 5000001 1\n1 1 1\n", "is too large: 3 × 5000001, at most 5000000 rows and columns"),
        (BANNER + b"3 3 1000000000000\n1 1 1\n", "is too large: 1000000000000 entries, at most 5000000"),
        (b"%%MatrixMarket matrix array real general\n3000 3000\n1\n", "is too large: 9000000 entries"),
        (b"%%MatrixMarket matrix coordinate real symmetric\n2 3 1\n2 3 1\n", "is not square (2 × 3), though"),
        (b"\x1f\x8b", "is truncated: the gzip stream ends early"),
        (gzip.compress(GOOD, mtime=0)[:-9], "is truncated: the gzip stream ends early"),
        (gzip.compress(GOOD, mtime=0)[:-8] + bytes(8), "is damaged: CRC check failed"),
    ],
)  # fmt: skip
def test_matrices_that_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(_reader.RefusedError) as caught:
        _reader.read_matrix(content)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    "content",
    [
        BANNER,
        BANNER[:-1],
        BANNER + b"2 x 1\n1 1 1\n",
        BANNER + b"2 2 1\n" + bytes(range(256)),
        BANNER + b"2 2 3\n1 1 1\n2 2 1\n",
        BANNER + b"2 2 1\n1 1 1\n2 2 1\n",
        BANNER + b"2 2 1\n0 1 1\n",
        BANNER + b"2 2 1\n1 3 1\n",
        BANNER + b"2 2 1\n1 1\n",
        BANNER + b"2 2 1\n1 1 one\n",
        # A number that is cut: the parser finds a line's end behind it.
        BANNER + b"2 2 2\n1 1 4\n2 2",
        BANNER + b"2 2 2\n1 1 4\n2 2 -",
    ],
)
def test_matrices_that_are_damaged(content: bytes) -> None:
    with pytest.raises((ValueError, OverflowError)):
        _reader.read_matrix(content)


def test_every_truncation_is_noticed(data: Path) -> None:
    recording = wav(np.arange(40, dtype=np.int16))
    for length in range(12, len(recording)):
        with pytest.raises((ValueError, struct.error, UnboundLocalError, wavfile.WavFileWarning)):
            _reader.read_recording(recording[:length])
    lines = (data / "LFAT5.mtx").read_bytes().splitlines(keepends=True)
    for count in range(len(lines)):
        with pytest.raises(ValueError, match=r"header|Truncated|Not a Matrix Market file"):
            _reader.read_matrix(b"".join(lines[:count]))
