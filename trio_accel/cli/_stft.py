"""How a recording is cut into frames."""

from __future__ import annotations

import math

import attrs

from trio_accel.cli._wav import Recording

__all__ = ["Stft"]

_WINDOW_SECONDS = 0.032
_LARGEST_COLUMNS = 2000
# The largest bounds the picture: 2000 columns of 4097 levels.
_SMALLEST_WINDOW, _LARGEST_WINDOW = 16, 8192


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
