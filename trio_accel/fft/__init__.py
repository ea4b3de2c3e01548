"""Fourier transforms on a device: messages, functions, and the actor that serves them."""

from ._actor import FftActor
from ._transforms import Fft, Ifft, Irfft, Rfft, fft, ifft, irfft, rfft

__all__ = ["Fft", "FftActor", "Ifft", "Irfft", "Rfft", "fft", "ifft", "irfft", "rfft"]
