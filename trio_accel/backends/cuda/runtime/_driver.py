"""What the driver says: the one table of its codes."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from ...base import AccelError, ContextPoisonedError, DriverError, NotSupportedError

__all__ = ["CudaMemoryError", "describe", "error_of", "is_damage", "is_sticky"]

_STICKY = frozenset(
    {
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_UNKNOWN",
    }
)
"""Codes after which a context is dead: every later call in it fails with the same one."""

_DAMAGING = frozenset({"CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_CONTAINED"})
"""Those that say that memory of the device is broken, or may be."""


class CudaMemoryError(MemoryError):
    """The driver has not so much memory; the caller knows how much it asked for."""


def is_sticky(code: int) -> bool:
    """Whether a context that reported this is dead."""
    return code != 0 and name_of(code) in _STICKY


def is_damage(code: int) -> bool:
    """Whether this says that memory of the device is broken, or may be."""
    return name_of(code) in _DAMAGING


def name_of(code: int) -> str:
    """The driver's name of a code."""
    try:
        return str(driver.CUresult(code).name)
    except ValueError:
        # A driver that is newer than its bindings.
        return f"CUDA_ERROR_{int(code)}"


def describe(code: int) -> str:
    """Name and the driver's own words."""
    status, text = driver.cuGetErrorString(driver.CUresult(code))
    return name_of(code) if status or not text else f"{name_of(code)}: {text.decode()}"


def error_of(code: int, device: str | None = None) -> AccelError | CudaMemoryError:
    """Make the error for a code that is none of success."""
    name = name_of(code)
    if name in _STICKY:
        return ContextPoisonedError(
            f"the context is lost: {describe(code)}", device=device, is_memory_damaged=name in _DAMAGING
        )
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return CudaMemoryError(describe(code))
    if name == "CUDA_ERROR_NOT_SUPPORTED":
        return NotSupportedError(f"the driver: {describe(code)}", device=device, backend="cuda")
    return DriverError(f"the driver refused: {describe(code)}", code=name, device=device)


def check(result: tuple[Any, ...]) -> Any:
    """Take a call's result apart, where no context is concerned.

    Raises:
        AccelError: The call failed.
    """
    if result[0]:
        raise error_of(result[0])
    return result[1] if len(result) == 2 else result[1:]
