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
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

import attrs
import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

import trio_accel as ta
from trio_accel.cli._board import Bench, Check, Step, StepResult, facts, relative_error
from trio_accel.cli._run import InputError, check_output, describe_os_error, in_thread

_AUDIO = "sense_and_sensibility_01.wav"
# Samples of a frame, 32 ms, and from frame to frame.
_WINDOW, _HOP = 512, 128
_TOLERANCE = 1e-5
_FLOOR_DB = -200.0
_DYNAMIC_RANGE_DB = 80.0


@attrs.frozen(kw_only=True)
class SpectrumData:
    """The recording and its spectrum.

    Attributes:
        audio: Name of the file.
        rate: Samples per second.
        duration: Seconds.
        frames: Frames transformed.
        window: Samples per frame.
        hop: Samples from frame to frame.
        peak_frequency: Hertz of the strongest component.
        peak_time: When it sounds, in seconds.
        peak_level: Its level in dB relative to a sine at full scale.
        picture: Path of the PNG, ``None`` if none was written.
    """

    audio: str
    rate: int
    duration: float
    frames: int
    window: int
    hop: int
    peak_frequency: float
    peak_time: float
    peak_level: float
    picture: str | None

    def figures(self) -> RenderableType:
        """See `StepData`."""
        return facts(self._facts())

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "recording", f"{self.audio}: {self.duration:.2f} s, {self.rate / 1000:g} kHz, mono, 16-bit PCM"
        yield "frames", f"{self.frames} of {self.window} samples (Hann window), every {self.hop} samples"
        level = f"{self.peak_level:.1f} dB re full scale"
        yield "loudest", f"{self.peak_frequency:.0f} Hz at {self.peak_time:.2f} s, {level}"
        if self.picture is not None:
            yield "picture", self.picture


@attrs.define(kw_only=True, eq=False)
class SpectrumStep(Step):
    """The step, with its options.

    Attributes:
        output: Where the PNG goes.
        is_picture_required: Whether it is an error that no picture can be drawn or written; not in the tour.
    """

    name: ClassVar[str] = "spectrum"
    output: Path = Path("spectrogram.png")
    is_picture_required: bool = True
    _no_picture: str | None = attrs.field(default=None, init=False)

    async def prepare(self) -> None:
        """See that the picture can be drawn and written."""
        try:
            _require_matplotlib()
            check_output(self.output)
        except InputError as error:
            if self.is_picture_required:
                raise
            self._no_picture = str(error)
        await super().prepare()

    async def run(self, bench: Bench) -> StepResult:
        """Frames to the device, spectra back, compared with SciPy in float64."""
        rate, samples = await in_thread(_read)
        frames = _frames(samples)
        spectra, again = await _transform(bench.device, frames)
        checks, power = await in_thread(_compare, frames, spectra, again)
        notes: list[str] = []
        picture = await self._write_picture(bench, rate, power, notes)
        column, row = np.unravel_index(int(np.argmax(power)), power.shape)
        data = SpectrumData(
            audio=_AUDIO,
            rate=rate,
            duration=samples.size / rate,
            frames=len(frames),
            window=_WINDOW,
            hop=_HOP,
            peak_frequency=int(row) * rate / _WINDOW,
            peak_time=(int(column) * _HOP + _WINDOW / 2) / rate,
            peak_level=10.0 * math.log10(float(power[column, row])),
            picture=None if picture is None else str(picture),
        )
        told = f"{len(frames)} frames of {_WINDOW} samples, {data.duration:.2f} s at {rate / 1000:g} kHz"
        return StepResult(summary=told, checks=checks, notes=notes, data=data)

    async def _write_picture(
        self, bench: Bench, rate: int, power: NDArray[np.float64], notes: list[str]
    ) -> Path | None:
        if self._no_picture is not None:
            notes.append(f"picture not written: {self._no_picture}")
            return None
        bench.progress.update(1, 1, f"drawing {self.output}")
        levels: NDArray[np.float64] = 10.0 * np.log10(np.maximum(power, 10.0 ** (_FLOOR_DB / 10.0)))
        png = await in_thread(_draw_spectrogram, rate, levels)
        try:
            self.output.write_bytes(png)
        except OSError as error:
            reason = f"cannot write {self.output}: {describe_os_error(error)}"
            if self.is_picture_required:
                raise InputError(reason) from error
            notes.append(f"picture not written: {reason}")
            return None
        return self.output


def _read() -> tuple[int, NDArray[np.float32]]:
    """Read the recording that comes with the package: samples per second, and samples. Blocking."""
    from scipy.io import wavfile

    with (files("trio_accel.cli") / "data" / _AUDIO).open("rb") as file:
        rate, samples = wavfile.read(file)
    return int(rate), np.asarray(samples, np.float32) / 2**15


async def _transform(
    device: ta.Device, frames: NDArray[np.float32]
) -> tuple[NDArray[np.complex128], NDArray[np.complex128]]:
    """Spectra of ``frames`` (one frame per row) and the frames that the inverse transform gives back."""
    spectra = await ta.fft.rfft(await device.put(frames))
    again = await ta.fft.irfft(spectra, n=frames.shape[1])
    return (
        np.asarray(await spectra.to_host(), np.complex128),
        np.asarray(await again.to_host(), np.complex128),
    )


def _frames(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Windowed frames, one per row; the last ones are padded with silence."""
    count = 1 + math.ceil((samples.size - _WINDOW) / _HOP)
    part = np.pad(samples, (0, (count - 1) * _HOP + _WINDOW - samples.size))
    views = np.lib.stride_tricks.sliding_window_view(part, _WINDOW)[::_HOP]
    return (views * _hann()).astype(np.float32)


def _hann() -> NDArray[np.float64]:
    """Return the periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(_WINDOW) / _WINDOW)


def _compare(
    frames: NDArray[np.float32], spectra: NDArray[np.complex128], again: NDArray[np.complex128]
) -> tuple[list[Check], NDArray[np.float64]]:
    """Compare with SciPy in float64: checks, and the power relative to a sine at full scale. Blocking."""
    import scipy.fft

    pairs = {
        "rfft of every frame, relative error": (spectra, scipy.fft.rfft(frames.astype(np.float64), axis=-1)),
        "irfft gives the frames back": (again, frames),
    }
    checks = [Check(name=name, value=relative_error(*pair), limit=_TOLERANCE) for name, pair in pairs.items()]
    return checks, (np.abs(spectra) * 2.0 / _hann().sum()) ** 2


def _require_matplotlib() -> None:
    """See that the plot extra is there, without importing it.

    Raises:
        InputError: It is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("a spectrogram needs Matplotlib: pip install '.[plot]' in a checkout")


def _draw_spectrogram(rate: int, levels: NDArray[np.float64]) -> bytes:
    """Draw a PNG of 1400 × 700 pixels: time in seconds, frequency in kHz, level in dB as colour. Blocking.

    Args:
        rate: Samples per second.
        levels: ``(frames, window // 2 + 1)``, dB relative to a sine at full scale.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 5.0), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # The scale begins at the loudest component: a quiet recording is as readable as a loud one.
    top = 5.0 * math.ceil(float(levels.max()) / 5.0)
    # A column stands for the middle of its frame; a row for the middle of its bin.
    column, row = _HOP / rate, rate / _WINDOW / 1000.0
    start = (_WINDOW - _HOP) / 2 / rate
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
    axes.set_ylim(0.0, rate / 2000.0)
    # The first window is centred a little after the start: that strip has the colour of silence.
    axes.set_facecolor(image.get_cmap()(0.0))
    axes.set_xlim(0.0, extent[1])
    axes.set_xlabel("time (s)")
    axes.set_ylabel("frequency (kHz)")
    axes.set_title(f"{_AUDIO}\nHann window of {_WINDOW} samples, hop {_HOP}", fontsize="medium")
    figure.colorbar(image, ax=axes, label="level (dB re full scale)", extend="min", pad=0.015)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": "trio_accel"})
    return picture.getvalue()
