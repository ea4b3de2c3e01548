"""Bridges to other libraries, which run their calls on a device."""

from ._array_api import ArrayApi, array_api
from ._array_api_array import Array
from ._blocking_device import BlockingDevice, blocking
from ._scipy_fft import ScipyFftBackend, scipy_fft

__all__ = [
    "Array",
    "ArrayApi",
    "BlockingDevice",
    "ScipyFftBackend",
    "array_api",
    "blocking",
    "scipy_fft",
]
