"""``demo spectrum``: the spectrogram of a recording through the FFT actor, checked and drawn as a PNG.

Matplotlib is an extra: imported on use, without pyplot, without a display.
"""

# Matplotlib leaves the types of its keyword arguments open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import attrs
import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

import trio_accel as ta
from trio_accel.cli._board import Bench, Check, Step, StepResult, count_of, facts
from trio_accel.cli._run import InputError, check_output, describe_os_error, in_thread, read_apart

_WINDOW_SECONDS = 0.032
_LARGEST_COLUMNS = 2000
# The largest bounds the picture: 2000 columns of 4097 levels.
_SMALLEST_WINDOW, _LARGEST_WINDOW = 16, 8192

# Samples of all frames that are transformed at once: 512 of the usual 512 samples.
_BATCH_SAMPLES = 1 << 18
_TOLERANCE = 1e-5
_FLOOR_DB = -200.0
_DYNAMIC_RANGE_DB = 80.0


@attrs.frozen(kw_only=True)
class SpectrumData:
    """The recording and its spectrum.

    Attributes:
        audio: Name of the file.
        encoding: Type of its samples.
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

    def figures(self) -> RenderableType:
        """See `StepData`."""
        return facts(self._facts())

    def _facts(self) -> Iterator[tuple[str, str]]:
        channels = {1: "mono", 2: "stereo"}.get(self.channels, f"{self.channels} channels")
        yield (
            "recording",
            f"{self.audio}: {self.duration:.2f} s, {self.rate / 1000:g} kHz, {channels}, {self.encoding}",
        )
        yield "frames", f"{self.frames} of {self.window} samples (Hann window), every {self.hop} samples"
        if self.peak_frequency is not None and self.peak_time is not None:
            level = f"{self.peak_level:.1f} dB re full scale"
            yield "loudest", f"{self.peak_frequency:.0f} Hz at {self.peak_time:.2f} s, {level}"
        if self.picture is not None:
            yield "picture", self.picture


@attrs.frozen(kw_only=True)
class Recording:
    """Samples of one channel, full scale at 1.0.

    Attributes:
        name: The file's name.
        rate: Samples per second.
        channels: Channels in the file; more than one were mixed down to their mean.
        encoding: Type of the file's samples, e.g. ``"16-bit PCM"``.
        samples: ``(n,)`` float32.
    """

    name: str
    rate: int
    channels: int
    encoding: str
    samples: NDArray[np.float32] = attrs.field(eq=False, repr=False)

    @classmethod
    async def read(cls, path: Path | None) -> Recording:
        """Read the user's recording, or the carried one for ``None``.

        Raises:
            InputError: See `read_apart`.
        """
        carried = "sense_and_sensibility_01.wav"
        name, found = await read_apart("WAV", path, carried, (b"riff", b"rifx", b"rf64"))
        rate, channels, samples = int(found["rate"]), int(found["channels"]), found["samples"]
        encoding = str(found["encoding"])
        return cls(name=name, rate=rate, channels=channels, encoding=encoding, samples=samples)

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.samples.size / self.rate


@attrs.frozen(kw_only=True)
class Stft:
    """The frames of a recording: a Hann window that is a power of two long, three quarters overlap.

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


@attrs.define(kw_only=True, eq=False)
class _Tally:
    """Squared differences and squares, summed over batches."""

    difference: float = 0.0
    reference: float = 0.0

    def add(self, ours: NDArray[np.complex128], reference: NDArray[np.complex128]) -> None:
        self.difference += float(np.sum(np.abs(ours - reference) ** 2))
        self.reference += float(np.sum(np.abs(reference) ** 2))

    def check(self, name: str) -> Check:
        """Check the relative error in the 2-norm; of nothing at all, the absolute one."""
        error = math.sqrt(self.difference / (self.reference if self.reference > 0.0 else 1.0))
        return Check(name=name, value=error, limit=_TOLERANCE)


@attrs.define(kw_only=True, eq=False)
class _Comparison:
    """Spectra, and the frames that the inverse transform gives back, compared with SciPy in float64.

    Attributes:
        mean_of: Neighbouring frames whose power is averaged into one column.
        columns: Power relative to a sine at full scale.
        spectra: Errors of the spectra.
        frames: Errors of the frames.
    """

    mean_of: int
    columns: list[NDArray[np.float64]] = attrs.field(factory=list["NDArray[np.float64]"])
    spectra: _Tally = attrs.field(factory=_Tally)
    frames: _Tally = attrs.field(factory=_Tally)

    def add(
        self, frames: NDArray[np.float32], spectra: NDArray[np.complex128], again: NDArray[np.complex128]
    ) -> None:
        """Add a batch. Blocking."""
        import scipy.fft

        reference = scipy.fft.rfft(frames.astype(np.float64), axis=-1)
        self.spectra.add(spectra, np.asarray(reference, np.complex128))
        self.frames.add(again, frames.astype(np.complex128))
        amplitude: NDArray[np.float64] = np.abs(spectra) * 2.0 / _hann(frames.shape[1]).sum()
        starts = np.arange(0, frames.shape[0], self.mean_of, dtype=np.intp)
        counts = np.diff(np.append(starts, frames.shape[0]))
        self.columns.append(np.add.reduceat(amplitude**2, starts, axis=0) / counts[:, np.newaxis])


@attrs.define(kw_only=True, eq=False)
class SpectrumStep(Step):
    """The step, with its options.

    Attributes:
        audio: WAV file, ``None`` for the carried recording.
        output: Where the PNG goes.
        is_picture_required: Whether it is an error that no picture can be drawn or written; not in the tour.
    """

    name: ClassVar[str] = "spectrum"
    audio: Path | None = None
    output: Path = Path("spectrogram.png")
    is_picture_required: bool = True
    _recording: Recording = attrs.field(init=False)
    _no_picture: str | None = attrs.field(default=None, init=False)

    async def prepare(self) -> None:
        """Read the recording; see that the picture can be drawn and written."""
        try:
            _require_matplotlib()
            check_output(self.output)
        except InputError as error:
            if self.is_picture_required:
                raise
            self._no_picture = str(error)
        self._recording = await Recording.read(self.audio)

    async def run(self, bench: Bench) -> StepResult:
        """Frames to the device in batches, spectra back, compared with SciPy in float64."""
        recording = self._recording
        stft = Stft.for_recording(recording)
        comparison = _Comparison(mean_of=stft.mean_of)
        batch = stft.mean_of * max(1, _BATCH_SAMPLES // (stft.window * stft.mean_of))
        for first in range(0, stft.frames, batch):
            bench.progress.update(first, stft.frames, f"frame {first} of {stft.frames}")
            frames = await in_thread(_frames, recording, stft, first, min(first + batch, stft.frames))
            spectra, again = await _transform(bench.device, frames)
            await in_thread(comparison.add, frames, spectra, again)
        power = np.concatenate(comparison.columns)
        notes: list[str] = []
        if recording.channels > 1:
            notes.append(f"{recording.channels} channels mixed down to their mean")
        picture = await self._write_picture(bench, recording, stft, power, notes)
        data = _summarize(recording, stft, power, picture)
        if data.peak_level is None:
            notes.append("the recording is silent")
        return StepResult(
            summary=f"{count_of(stft.frames, 'frame')} of {stft.window} samples, "
            f"{recording.seconds:.2f} s at {recording.rate / 1000:g} kHz",
            checks=[
                comparison.spectra.check("rfft of every frame, relative error"),
                comparison.frames.check("irfft gives the frames back"),
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
        levels: NDArray[np.float64] = 10.0 * np.log10(np.maximum(power, 10.0 ** (_FLOOR_DB / 10.0)))
        png = await in_thread(_draw_spectrogram, recording, stft, levels)
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
    """Return the periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(size) / size)


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


def _require_matplotlib() -> None:
    """See that the plot extra is there, without importing it.

    Raises:
        InputError: It is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("a spectrogram needs Matplotlib: pip install '.[plot]' in a checkout")


def _draw_spectrogram(recording: Recording, stft: Stft, levels: NDArray[np.float64]) -> bytes:
    """Draw a PNG of 1400 × 700 pixels: time in seconds, frequency in kHz, level in dB as colour. Blocking.

    Args:
        recording: The transformed recording.
        stft: Its frames and windows.
        levels: ``(columns, window // 2 + 1)``, dB relative to a sine at full scale.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 5.0), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # The scale begins at the loudest component: a quiet recording is as readable as a loud one.
    top = 5.0 * math.ceil(float(levels.max()) / 5.0)
    # A column stands for the middle of its frames; a row for the middle of its bin.
    column = stft.mean_of * stft.hop / recording.rate
    start = (stft.window - stft.hop) / 2 / recording.rate
    row = recording.rate / stft.window / 1000.0
    extent = (start, start + levels.shape[0] * column, -row / 2, (levels.shape[1] - 0.5) * row)
    image = axes.imshow(
        levels.T,
        origin="lower",
        aspect="auto",
        extent=extent,
        cmap="magma",
        vmin=top - _DYNAMIC_RANGE_DB,
        vmax=top,
        interpolation="nearest",
    )
    axes.set_ylim(0.0, recording.rate / 2000.0)
    # The first window is centred a little after the start: that strip has the colour of silence.
    axes.set_facecolor(image.get_cmap()(0.0))
    axes.set_xlim(0.0, extent[1])
    axes.set_xlabel("time (s)")
    axes.set_ylabel("frequency (kHz)")
    axes.set_title(_title(recording, stft), fontsize="medium", parse_math=False)
    figure.colorbar(image, ax=axes, label="level (dB re full scale)", extend="min", pad=0.015)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": "trio_accel"})
    return picture.getvalue()


def _title(recording: Recording, stft: Stft) -> str:
    # Matplotlib's own font has Latin, Greek and Cyrillic letters; it warns of each one that it lacks.
    name = "".join(
        char if char.isprintable() and char < "\u0530" else "?" for char in Path(recording.name).name
    )
    if len(name) > 60:
        name = f"{name[:57]}..."
    rate = recording.rate
    window, hop = 1000 * stft.window / rate, 1000 * stft.hop / rate
    frames = f"Hann window of {window:.0f} ms ({stft.window} samples), hop {hop:.0f} ms"
    return f"{name}, {recording.seconds:.2f} s at {rate / 1000:g} kHz\n{frames}"
