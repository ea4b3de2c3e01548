"""Fourier transforms on a device: messages, functions, and the actor that serves them."""

# fmt: off
# isort: off
from ._functions import (
    Fft, Fft2, Fftn, Hfft, Hfft2, Hfftn, Ifft, Ifft2, Ifftn, Ihfft, Ihfft2, Ihfftn, Irfft, Irfft2, Irfftn,
    Rfft, Rfft2, Rfftn, fft, fft2, fftn, hfft, hfft2, hfftn, ifft, ifft2, ifftn, ihfft, ihfft2, ihfftn,
    irfft, irfft2, irfftn, rfft, rfft2, rfftn,
)
from ._plan import FftActor

__all__ = [
    "Fft", "Fft2", "FftActor", "Fftn", "Hfft", "Hfft2", "Hfftn", "Ifft", "Ifft2", "Ifftn", "Ihfft",
    "Ihfft2", "Ihfftn", "Irfft", "Irfft2", "Irfftn", "Rfft", "Rfft2", "Rfftn", "fft", "fft2", "fftn", "hfft",
    "hfft2", "hfftn", "ifft", "ifft2", "ifftn", "ihfft", "ihfft2", "ihfftn", "irfft", "irfft2", "irfftn",
    "rfft", "rfft2", "rfftn",
]
