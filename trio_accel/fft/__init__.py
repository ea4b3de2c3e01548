"""Fourier transforms on a device: messages, functions, and the actor that serves them."""

from ._actor import FftActor
from ._functions import (
    fft2,
    fftn,
    hfft2,
    hfftn,
    ifft2,
    ifftn,
    ihfft2,
    ihfftn,
    irfft2,
    irfftn,
    rfft2,
    rfftn,
)
from ._one_axis import Fft, Hfft, Ifft, Ihfft, Irfft, Rfft, fft, hfft, ifft, ihfft, irfft, rfft
from ._several_axes import Fftn, Hfftn, Ifftn, Ihfftn, Irfftn, Rfftn

__all__ = [
    "Fft",
    "FftActor",
    "Fftn",
    "Hfft",
    "Hfftn",
    "Ifft",
    "Ifftn",
    "Ihfft",
    "Ihfftn",
    "Irfft",
    "Irfftn",
    "Rfft",
    "Rfftn",
    "fft",
    "fft2",
    "fftn",
    "hfft",
    "hfft2",
    "hfftn",
    "ifft",
    "ifft2",
    "ifftn",
    "ihfft",
    "ihfft2",
    "ihfftn",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftn",
]
