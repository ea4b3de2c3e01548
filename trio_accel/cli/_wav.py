"""WAV files: RIFF, RIFX and RF64 with PCM of any width up to 64 bits or IEEE float, checked byte by byte.

``scipy.io.wavfile`` is not used here: it returns the samples that are there when a file is truncated, and
answers a damaged header with errors of its own making (``UnboundLocalError``, ``ZeroDivisionError``).

Format: Microsoft/IBM "Multimedia Programming Interface and Data Specifications 1.0" (RIFF, WAVE),
``WAVE_FORMAT_EXTENSIBLE`` for the sub-format, EBU Tech 3306 for RF64.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from trio_accel.cli._run import InputError, read_input

__all__ = ["MOST_CHANNELS", "MOST_FRAMES", "MOST_RATE", "Recording", "Stft", "parse_wav", "read_recording"]

MOST_RATE = 1_000_000
"""Samples per second of the fastest recording that is read."""

MOST_CHANNELS = 256
"""Channels of the widest recording that is read."""

MOST_FRAMES = 1 << 26
"""Samples per channel of the longest recording that is read: 25 minutes at 44.1 kHz."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_ENCODINGS = {
    2: "ADPCM",
    6: "A-law",
    7: "mu-law",
    0x11: "IMA ADPCM",
    0x31: "GSM 6.10",
    0x55: "MP3",
    0xFF: "AAC",
}
# Samples of all channels that are decoded at once: float64 takes more memory than the file itself.
_DECODED = 1 << 20
_WINDOW_SECONDS = 0.032
_LARGEST_COLUMNS = 2000
# The largest bounds the picture: 2000 columns of 4097 levels.
_SMALLEST_WINDOW, _LARGEST_WINDOW = 16, 8192
_CARRIED = "sense_and_sensibility_01.wav"
_FORMS = {b"RIFF": "<", b"RIFX": ">", b"RF64": "<"}


@attrs.frozen(kw_only=True)
class Recording:
    """Samples of one channel, full scale at 1.0.

    Attributes:
        name: The file's name.
        rate: Samples per second.
        channels: Channels in the file; more than one were mixed down to their mean.
        encoding: Type of the file's samples, e.g. ``"16-bit PCM"``.
        samples: ``(n,)`` float32, read-only.
    """

    name: str
    rate: int
    channels: int
    encoding: str
    samples: NDArray[np.float32] = attrs.field(eq=False, repr=False)

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.samples.size / self.rate


@attrs.frozen(kw_only=True)
class Stft:
    """How a recording is cut into frames: a Hann window that is a power of two long, three quarters overlap.

    Attributes:
        window: Samples of one frame.
        hop: Samples from one frame to the next.
        frames: Number of frames; the last ones are padded with silence.
        mean_of: Neighbouring frames whose power is averaged into one column of the picture.
    """

    window: int
    hop: int
    frames: int
    mean_of: int

    @classmethod
    def for_recording(cls, recording: Recording) -> Stft:
        """Frames of about 32 ms; any rate may be in a file, so their number of samples has bounds."""
        window = 2 ** round(math.log2(recording.rate * _WINDOW_SECONDS))
        window = min(max(window, _SMALLEST_WINDOW), _LARGEST_WINDOW)
        hop = window // 4
        frames = 1 + math.ceil(max(0, recording.samples.size - window) / hop)
        return cls(window=window, hop=hop, frames=frames, mean_of=math.ceil(frames / _LARGEST_COLUMNS))


@attrs.frozen(kw_only=True)
class _Format:
    code: int
    channels: int
    rate: int
    block: int
    bits: int

    @property
    def width(self) -> int:
        """Bytes of one sample of one channel."""
        return self.block // self.channels

    @property
    def encoding(self) -> str:
        return f"{self.bits}-bit {'float' if self.code == _FLOAT else 'PCM'}"


def read_recording(path: Path | None) -> Recording:
    """Return the user's recording, or the carried one for ``None``. Blocking.

    Raises:
        InputError: The file is missing, unreadable, not a WAV file or beyond a limit.
    """
    return parse_wav(*read_input(path, _CARRIED, lambda head: head[:4] in _FORMS))


def parse_wav(name: str, content: bytes) -> Recording:
    """Read the samples of a WAV file's content, mixed down to one channel.

    Args:
        name: The file's name in messages.
        content: The whole file.

    Raises:
        InputError: It is no WAV file, truncated, empty, beyond a limit, or holds an encoding other than PCM
            and float.
    """
    order = _FORMS.get(content[:4])
    if order is None or (len(content) >= 12 and content[8:12] != b"WAVE"):
        raise InputError(f"{name} is not a WAV file: it does not begin with RIFF ... WAVE")
    form, data = _chunks(name, content, order)
    count = len(data) // form.block
    if count == 0:
        raise InputError(f"{name} holds no samples")
    if count > MOST_FRAMES:
        raise InputError(f"{name} is too long: {count} samples per channel, at most {MOST_FRAMES}")
    mixed = np.empty(count, np.float32)
    step = max(1, _DECODED // form.channels)
    for first in range(0, count, step):
        part = data[first * form.block : min(first + step, count) * form.block]
        mixed[first : first + step] = _mixed(name, _decode(part, form, order).reshape(-1, form.channels))
    mixed.setflags(write=False)
    return Recording(name=name, rate=form.rate, channels=form.channels, encoding=form.encoding, samples=mixed)


def _mixed(name: str, samples: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the mean of the channels."""
    if not np.isfinite(samples).all():
        raise InputError(f"{name} holds samples that are not finite numbers")
    with np.errstate(over="ignore"):
        mixed: NDArray[np.float32] = samples.mean(axis=1).astype(np.float32)
    if not np.isfinite(mixed).all():
        raise InputError(f"{name} holds samples too large for float32")
    return mixed


def _chunks(name: str, content: bytes, order: str) -> tuple[_Format, memoryview]:
    """Return the format and the sample bytes; whatever other chunks there are is skipped."""
    form: _Format | None = None
    long_size: int | None = None
    at = 12
    while at + 8 <= len(content):
        tag, size = content[at : at + 4], struct.unpack_from(order + "I", content, at + 4)[0]
        at += 8
        if tag == b"data":
            if form is None:
                raise InputError(f"{name} is not a usable WAV file: its samples come before its format")
            size = long_size if long_size is not None and size == 0xFFFFFFFF else size
            there = len(content) - at
            if there < size:
                raise InputError(
                    f"{name} is truncated: its header promises {size} bytes of samples, it holds {there}"
                )
            return form, memoryview(content)[at : at + size]
        body = content[at : at + size]
        if len(body) < size:
            break
        if tag == b"fmt ":
            form = _parse_format(name, body, order)
        elif tag == b"ds64" and size >= 16:
            long_size = int(struct.unpack_from("<Q", body, 8)[0])
        # Chunks are padded to even sizes; the padding byte is not counted.
        at += size + size % 2
    raise InputError(f"{name} is truncated: it ends before its samples begin")


def _parse_format(name: str, body: bytes, order: str) -> _Format:
    if len(body) < 16:
        raise InputError(
            f"{name} is not a usable WAV file: its format chunk has {len(body)} bytes, at least 16 needed"
        )
    code, channels, rate, _, block, bits = struct.unpack_from(order + "HHIIHH", body)
    if code == _EXTENSIBLE and len(body) >= 28:
        # The sub-format is a GUID; its first four bytes hold the code of the encoding.
        code = struct.unpack_from(order + "I", body, 24)[0] & 0xFFFF
    if code not in (_PCM, _FLOAT):
        kind = _ENCODINGS.get(code, f"encoding 0x{code:04x}")
        raise InputError(f"{name} holds {kind}; only PCM and IEEE float WAV files can be read")
    if channels == 0 or rate == 0 or block == 0 or block % channels:
        raise InputError(
            f"{name} is not a usable WAV file: {channels} channels, {rate} samples per second, "
            f"blocks of {block} bytes"
        )
    if rate > MOST_RATE:
        raise InputError(f"{name} claims {rate} samples per second; at most {MOST_RATE} are read")
    if channels > MOST_CHANNELS:
        raise InputError(f"{name} claims {channels} channels; at most {MOST_CHANNELS} are read")
    form = _Format(code=code, channels=channels, rate=rate, block=block, bits=bits)
    is_known = bits in (32, 64) if code == _FLOAT else 1 <= bits <= 64
    if not is_known or form.width > 8 or bits > 8 * form.width or (code == _FLOAT and bits != 8 * form.width):
        raise InputError(f"{name} holds {form.encoding} in {form.width} bytes, which cannot be read")
    return form


def _decode(data: memoryview, form: _Format, order: str) -> NDArray[np.float64]:
    """Samples as float64 with full scale at 1.0; PCM narrower than its container is left-justified in it."""
    if form.code == _FLOAT:
        return np.frombuffer(data, np.dtype(f"{order}f{form.width}")).astype(np.float64)
    if form.width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float64) - 128.0) / 128.0
    padded = 4 if form.width == 3 else (form.width if form.width in (2, 4, 8) else 8)
    raw = np.frombuffer(data, np.uint8).reshape(-1, form.width)
    # The most significant bytes are what counts: missing low bytes are zero.
    wide = np.zeros((raw.shape[0], padded), np.uint8)
    if order == "<":
        wide[:, padded - form.width :] = raw
    else:
        wide[:, : form.width] = raw
    return wide.view(np.dtype(f"{order}i{padded}")).ravel().astype(np.float64) / 2.0 ** (8 * padded - 1)
