"""Fourier transforms on a device: messages, functions, and the actor that serves them."""

# fmt: off
# isort: off
from ._functions import (
    fft, fft2, fftn, hfft, hfft2, hfftn, ifft, ifft2, ifftn,
    ihfft, ihfft2, ihfftn, irfft, irfft2, irfftn, rfft, rfft2, rfftn,
)
from ._messages import (
    Fft, FftActor, Fftn, Hfft, Hfftn, Ifft, Ifftn, Ihfft, Ihfftn, Irfft, Irfftn, Rfft, Rfftn,
)

__all__ = [
    "Fft", "FftActor", "Fftn", "Hfft", "Hfftn", "Ifft", "Ifftn", "Ihfft", "Ihfftn", "Irfft", "Irfftn",
    "Rfft", "Rfftn", "fft", "fft2", "fftn", "hfft", "hfft2", "hfftn", "ifft", "ifft2", "ifftn",
    "ihfft", "ihfft2", "ihfftn", "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftn",
]
