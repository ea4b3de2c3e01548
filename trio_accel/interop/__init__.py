"""Bridges to other libraries: what they call runs on a device."""

from ._scipy_fft import ScipyFftBackend, scipy_fft

__all__ = ["ScipyFftBackend", "scipy_fft"]
