"""``demo spectrum``: the spectrogram of a recording through the FFT actor, checked and drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

import trio_accel as ta
from trio_accel.cli import _plot
from trio_accel.cli._errors import InputError
from trio_accel.cli._inputs import check_output, describe_os_error, read_recording
from trio_accel.cli._results import Bench, Check, StepResult, count_of
from trio_accel.cli._run import in_thread
from trio_accel.cli._wav import Stft

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trio_accel.cli._wav import Recording

__all__ = ["SpectrumData", "SpectrumStep"]

# Of all frames that are transformed at once: 512 of the usual 512 samples.
_BATCH_SAMPLES = 1 << 18
_TOLERANCE = 1e-5
_FLOOR_DB = -200.0


@attrs.frozen(kw_only=True)
class SpectrumData:
    """The recording and what became of it.

    Attributes:
        audio: Name of the file.
        encoding: What it holds.
        rate: Samples per second.
        channels: Channels in the file.
        duration: Seconds.
        frames: Frames transformed.
        window: Samples per frame.
        hop: Samples from frame to frame.
        peak_frequency: Hertz of the strongest component from the third bin on, ``None`` for silence.
        peak_time: When it sounds, in seconds, ``None`` for silence.
        peak_level: Its level in dB relative to a sine at full scale, ``None`` for silence.
        picture: Path of the PNG, ``None`` if none was written.
    """

    audio: str
    encoding: str
    rate: int
    channels: int
    duration: float
    frames: int
    window: int
    hop: int
    peak_frequency: float | None
    peak_time: float | None
    peak_level: float | None
    picture: str | None


@attrs.define(kw_only=True, eq=False)
class _Tally:
    """Squared differences and squares, summed over batches."""

    difference: float = 0.0
    reference: float = 0.0

    def add(self, ours: NDArray[np.complex128], reference: NDArray[np.complex128]) -> None:
        self.difference += float(np.sum(np.abs(ours - reference) ** 2))
        self.reference += float(np.sum(np.abs(reference) ** 2))

    @property
    def relative(self) -> float:
        """Relative error in the 2-norm; of nothing at all, the absolute one."""
        return (
            math.sqrt(self.difference / self.reference)
            if self.reference > 0.0
            else math.sqrt(self.difference)
        )


@attrs.define(kw_only=True, eq=False)
class SpectrumStep:
    """The step, with its options.

    Attributes:
        audio: WAV file, ``None`` for the carried recording.
        output: Where the PNG goes.
        is_picture_required: Whether it is an error that no picture can be drawn or written; not in the tour.
    """

    name: str = attrs.field(default="spectrum", init=False)
    audio: Path | None = None
    output: Path = Path("spectrogram.png")
    is_picture_required: bool = True
    _recording: Recording | None = attrs.field(default=None, init=False)
    _no_picture: str | None = attrs.field(default=None, init=False)

    async def prepare(self) -> None:
        """Read the recording; see that the picture can be drawn and written."""
        try:
            _plot.require_matplotlib()
            check_output(self.output)
        except InputError as error:
            if self.is_picture_required:
                raise
            self._no_picture = str(error)
        self._recording = await in_thread(read_recording, self.audio)

    async def run(self, bench: Bench) -> StepResult:
        """Frames to the device in batches, spectra back, compared with SciPy in float64."""
        recording = self._recording
        assert recording is not None
        stft = Stft.for_recording(recording)
        forward, backward = _Tally(), _Tally()
        columns: list[NDArray[np.float64]] = []
        batch = stft.mean_of * max(1, _BATCH_SAMPLES // (stft.window * stft.mean_of))
        for first in range(0, stft.frames, batch):
            bench.progress.update(first, stft.frames, f"frame {first} of {stft.frames}")
            frames = await in_thread(_frames, recording, stft, first, min(first + batch, stft.frames))
            spectra, again = await _transform(bench.device, frames)
            columns.append(await in_thread(_compare, frames, spectra, again, forward, backward, stft.mean_of))
        power = np.concatenate(columns)
        notes: list[str] = []
        if recording.channels > 1:
            notes.append(f"{recording.channels} channels mixed down to their mean")
        picture = await self._write_picture(bench, recording, stft, power, notes)
        data = _summarize(recording, stft, power, picture)
        if data.peak_level is None:
            notes.append("the recording is silent")
        return StepResult(
            name=self.name,
            summary=f"{count_of(stft.frames, 'frame')} of {stft.window} samples, "
            f"{recording.seconds:.2f} s at {recording.rate / 1000:g} kHz",
            checks=[
                Check(name="rfft of every frame, relative error", value=forward.relative, limit=_TOLERANCE),
                Check(name="irfft gives the frames back", value=backward.relative, limit=_TOLERANCE),
            ],
            notes=notes,
            data=data,
        )

    async def _write_picture(
        self, bench: Bench, recording: Recording, stft: Stft, power: NDArray[np.float64], notes: list[str]
    ) -> Path | None:
        if self._no_picture is not None:
            notes.append(f"picture not written: {self._no_picture}")
            return None
        bench.progress.update(stft.frames, stft.frames, f"drawing {self.output}")
        levels = _decibels(power)
        png = await in_thread(_plot.draw_spectrogram, recording, stft, levels)
        try:
            self.output.write_bytes(png)
        except OSError as error:
            reason = f"cannot write {self.output}: {describe_os_error(error)}"
            if self.is_picture_required:
                raise InputError(reason) from error
            notes.append(f"picture not written: {reason}")
            return None
        return self.output


async def _transform(
    device: ta.Device, frames: NDArray[np.float32]
) -> tuple[NDArray[np.complex128], NDArray[np.complex128]]:
    """Spectra of ``frames`` (one frame per row) and the frames that the inverse transform gives back."""
    signal = await device.put(frames)
    spectra = await ta.fft.rfft(signal)
    again = await ta.fft.irfft(spectra, n=frames.shape[1])
    host = (
        np.asarray(await spectra.to_host(), np.complex128),
        np.asarray(await again.to_host(), np.complex128),
    )
    for ref in (signal, spectra, again):
        ref.release()
    return host


def _frames(recording: Recording, stft: Stft, first: int, last: int) -> NDArray[np.float32]:
    """Windowed frames ``first`` to ``last``, one per row, float32."""
    begin, end = first * stft.hop, (last - 1) * stft.hop + stft.window
    part = recording.samples[begin:end]
    part = np.pad(part, (0, end - begin - part.size))
    views = np.lib.stride_tricks.sliding_window_view(part, stft.window)[:: stft.hop]
    return (views * _hann(stft.window)).astype(np.float32)


def _hann(size: int) -> NDArray[np.float64]:
    """The periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(size) / size)


def _compare(
    frames: NDArray[np.float32],
    spectra: NDArray[np.complex128],
    again: NDArray[np.complex128],
    forward: _Tally,
    backward: _Tally,
    mean_of: int,
) -> NDArray[np.float64]:
    """Adds the errors to the tallies; returns columns of power relative to a sine at full scale."""
    import scipy.fft

    reference = scipy.fft.rfft(frames.astype(np.float64), axis=-1)
    forward.add(spectra, np.asarray(reference, np.complex128))
    backward.add(again, frames.astype(np.complex128))
    amplitude: NDArray[np.float64] = np.abs(spectra) * 2.0 / _hann(frames.shape[1]).sum()
    starts = np.arange(0, frames.shape[0], mean_of, dtype=np.intp)
    counts = np.diff(np.append(starts, frames.shape[0]))
    means: NDArray[np.float64] = np.add.reduceat(amplitude**2, starts, axis=0) / counts[:, np.newaxis]
    return means


def _decibels(power: NDArray[np.float64]) -> NDArray[np.float64]:
    levels: NDArray[np.float64] = 10.0 * np.log10(np.maximum(power, 10.0 ** (_FLOOR_DB / 10.0)))
    return levels


def _summarize(
    recording: Recording, stft: Stft, power: NDArray[np.float64], picture: Path | None
) -> SpectrumData:
    # A constant offset is no tone; the Hann window spreads it over the first two bins.
    column, row = np.unravel_index(int(np.argmax(power[:, 2:])), power[:, 2:].shape)
    row += 2
    peak = float(power[column, row])
    is_silent = peak <= 0.0
    centre = (int(column) * stft.mean_of + (stft.mean_of - 1) / 2) * stft.hop + stft.window / 2
    return SpectrumData(
        audio=recording.name,
        encoding=recording.encoding,
        rate=recording.rate,
        channels=recording.channels,
        duration=recording.seconds,
        frames=stft.frames,
        window=stft.window,
        hop=stft.hop,
        peak_frequency=None if is_silent else int(row) * recording.rate / stft.window,
        peak_time=None if is_silent else centre / recording.rate,
        peak_level=None if is_silent else 10.0 * math.log10(peak),
        picture=None if picture is None else str(picture),
    )
