"""The actor that serves Fourier transforms."""

from __future__ import annotations

from ..devices import LibraryActor

__all__ = ["FftActor"]


class FftActor(LibraryActor):
    """Serves Fourier transforms, on a stream of its own.

    CPU backend: SciPy's pocketfft. CUDA: cuFFT.
    """

    library = "fft"
