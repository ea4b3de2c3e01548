"""The spectrogram as a PNG. Matplotlib is an extra: imported on use, without pyplot, without a display."""

# Matplotlib leaves the types of its keyword arguments open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib.util
import io
import math
from pathlib import PurePath
from typing import TYPE_CHECKING

from trio_accel.cli._errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trio_accel.cli._wav import Recording, Stft

__all__ = ["draw_spectrogram", "require_matplotlib"]

_DYNAMIC_RANGE_DB = 80.0


def require_matplotlib() -> None:
    """See that the plot extra is there, without importing it.

    Raises:
        InputError: It is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("a spectrogram needs Matplotlib: pip install 'trio-accel[plot]'")


def draw_spectrogram(recording: Recording, stft: Stft, levels: NDArray[np.float64]) -> bytes:
    """A PNG of 1400 × 700 pixels: time in seconds, frequency in kHz, level in dB as colour. Blocking.

    Args:
        recording: What was transformed.
        stft: How it was cut.
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
        char if char.isprintable() and char < "\u0530" else "?" for char in PurePath(recording.name).name
    )
    if len(name) > 60:
        name = f"{name[:57]}..."
    rate = recording.rate
    window, hop = 1000 * stft.window / rate, 1000 * stft.hop / rate
    frames = f"Hann window of {window:.0f} ms ({stft.window} samples), hop {hop:.0f} ms"
    return f"{name}, {recording.seconds:.2f} s at {rate / 1000:g} kHz\n{frames}"
