from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from scipy.io import wavfile

from trio_accel.cli._run import InputError
from trio_accel.cli._wav import parse_wav

SCIPY_FILES = Path(scipy.io.__file__).parent / "tests" / "data"


def wav(samples: np.ndarray, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    wavfile.write(file, rate, samples)
    return file.getvalue()


def chunks(
    code: int = 1, channels: int = 1, rate: int = 8000, bits: int = 16, data: bytes = b"\0" * 8
) -> bytes:
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", code, channels, rate, rate * block, block, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


SINE = np.sin(np.arange(100) / 7.0)


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
    recording = parse_wav("sine.wav", wav(samples))
    assert (recording.encoding, recording.rate, recording.channels) == (encoding, 8000, 1)
    assert recording.seconds == pytest.approx(100 / 8000)
    assert np.abs(recording.samples - SINE).max() <= 1.5 * step


def test_24_bits() -> None:
    values = np.array([0, 1, -1, 2**23 - 1, -(2**23), 123456, -654321])
    data = b"".join(int(value).to_bytes(3, "little", signed=True) for value in values)
    recording = parse_wav("x.wav", chunks(bits=24, data=data))
    assert recording.samples.tolist() == (values / 2**23).astype(np.float32).tolist()


def test_channels_are_mixed_down() -> None:
    stereo = np.stack([np.full(10, 1000, np.int16), np.full(10, 3000, np.int16)], axis=1)
    recording = parse_wav("x.wav", wav(stereo))
    assert recording.channels == 2
    assert recording.samples.tolist() == [np.float32(2000 / 32768)] * 10


def test_many_samples_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    stereo = np.stack([np.arange(1000), 3 * np.arange(1000)], axis=1).astype(np.int16)
    for samples in (1, 7, 250, 2000):
        monkeypatch.setattr("trio_accel.cli._wav._DECODED", samples)
        assert parse_wav("x.wav", wav(stereo)).samples.tolist() == (np.arange(1000) / 2**14).tolist()


def test_a_recording_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_accel.cli._wav.MOST_FRAMES", 99)
    with pytest.raises(InputError, match=r"^x\.wav is too long: 100 samples per channel, at most 99$"):
        parse_wav("x.wav", wav(SINE.astype(np.float32)))


@pytest.mark.skipif(not SCIPY_FILES.is_dir(), reason="this SciPy came without its tests")
@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("test-8000Hz-le-2ch-1byteu.wav", 2),
        ("test-44100Hz-le-1ch-4bytes.wav", 1),
        ("test-44100Hz-le-1ch-4bytes-rf64.wav", 1),
        ("test-44100Hz-2ch-32bit-float-le.wav", 2),
        ("test-44100Hz-2ch-32bit-float-be.wav", 2),
        ("test-48000Hz-2ch-64bit-float-le-wavex.wav", 2),
        ("test-8000Hz-be-3ch-5S-24bit.wav", 3),
        ("test-8000Hz-le-3ch-5S-24bit-rf64.wav", 3),
        ("test-8000Hz-le-3ch-5S-36bit.wav", 3),
        ("test-8000Hz-le-4ch-9S-12bit.wav", 4),
        ("test-8000Hz-le-5ch-9S-5bit.wav", 5),
        ("test-1234Hz-le-1ch-10S-20bit-extra.wav", 1),
    ],
)
def test_files_of_scipys_test_suite_read_as_scipy_reads_them(name: str, channels: int) -> None:
    recording = parse_wav(name, (SCIPY_FILES / name).read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rate, samples = wavfile.read(SCIPY_FILES / name)
    values = samples.reshape(len(samples), -1).astype(np.float64)
    if samples.dtype == np.uint8:
        values = (values - 128) / 128
    elif samples.dtype.kind == "i":
        values /= -float(np.iinfo(samples.dtype).min)
    assert (recording.rate, recording.channels) == (rate, channels)
    assert np.abs(recording.samples - values.mean(axis=1)).max() <= 2**-24


@pytest.mark.skipif(not SCIPY_FILES.is_dir(), reason="this SciPy came without its tests")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "test-44100Hz-le-1ch-4bytes-early-eof.wav",
            "truncated: its header promises 17640 bytes of samples, it holds 944",
        ),
        ("test-44100Hz-le-1ch-4bytes-early-eof-no-data.wav", "truncated: it ends before its samples begin"),
        ("test-44100Hz-le-1ch-4bytes-incomplete-chunk.wav", "truncated: it ends before its samples begin"),
        ("test-8000Hz-le-1ch-1byte-ulaw.wav", "holds mu-law; only PCM and IEEE float"),
        (
            "test-8000Hz-le-3ch-5S-24bit-inconsistent.wav",
            "3 channels, 8000 samples per second, blocks of 4 bytes",
        ),
    ],
)
def test_files_of_scipys_test_suite_that_are_damaged(name: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_wav(name, (SCIPY_FILES / name).read_bytes())
    assert str(caught.value).startswith(name)
    assert reason in str(caught.value)


NOT_WAV = "is not a WAV file"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"R", NOT_WAV),
        (b"\x7fELF" + bytes(100), NOT_WAV),
        (b"RIFF\x10\0\0\0AVI LIST", NOT_WAV),
        (chunks(data=b""), "holds no samples"),
        (chunks(channels=0, bits=16), "0 channels"),
        (chunks(rate=0), "0 samples per second"),
        (chunks(rate=1_000_001), "claims 1000001 samples per second; at most 1000000 are read"),
        (chunks(channels=257, bits=8, data=bytes(257)), "claims 257 channels; at most 256 are read"),
        (chunks(code=0x55), "holds MP3"),
        (chunks(code=0x1234), "holds encoding 0x1234"),
        (chunks(code=3, bits=16), "holds 16-bit float in 2 bytes"),
        (chunks(bits=128, data=bytes(16)), "holds 128-bit PCM in 16 bytes"),
        (b"RIFF\0\0\0\0WAVEdata\x04\0\0\0\0\0\0\0", "its samples come before its format"),
        (b"RIFF\0\0\0\0WAVEfmt \x04\0\0\0\0\0\0\0", "its format chunk has 4 bytes"),
        (wav(np.array([np.nan, 1.0], np.float32)), "samples that are not finite numbers"),
        (wav(np.array([1e300, 1.0])), "samples too large for float32"),
    ],
)
def test_what_is_not_a_usable_wav_file(content: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=r"^x\.wav ") as caught:
        parse_wav("x.wav", content)
    assert reason in str(caught.value)


def test_every_truncation_is_noticed() -> None:
    content = wav(np.arange(40, dtype=np.int16))
    for length in range(len(content)):
        with pytest.raises(InputError):
            parse_wav("x.wav", content[:length])


def test_a_damaged_header_gives_samples_or_an_input_error() -> None:
    content = wav(np.arange(40, dtype=np.int16))
    for position in range(44):
        for value in (0, 1, 0x7F, 0xFF):
            damaged = bytearray(content)
            damaged[position] = value
            try:
                recording = parse_wav("x.wav", bytes(damaged))
            except InputError:
                continue
            assert recording.samples.size > 0
            assert np.isfinite(recording.samples).all()
