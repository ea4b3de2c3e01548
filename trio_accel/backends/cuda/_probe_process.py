"""The program that asks the driver which devices there are, and prints the answer as JSON.

Run by its path, in an isolated interpreter: a driver that hangs, crashes or keeps threads does so there,
and the program that wants to know may still fork. A worker process asks its own driver, by `probe`.
"""

from __future__ import annotations

import ctypes
import json

_ATTRIBUTES = {
    "multiprocessors": 16,
    "compute_mode": 20,
    "major": 75,
    "minor": 76,
    "has_virtual_memory": 102,
    "has_descriptors": 103,
}
_MISSING = -1
_EXCLUSIVE = 3
# Older drivers lack functions that are called here.
_OLDEST = 12000


def probe(*, tries_contexts: bool) -> dict[str, object]:
    """Ask for everything; stops at what goes wrong first.

    Args:
        tries_contexts: Make a context, for a moment, on devices that take one process at a time:
            nothing else tells whether another has it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": "load", "detail": str(error)}
    code = driver.cuInit(0)
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    count = ctypes.c_int()
    if not code:
        code = driver.cuDeviceGetCount(ctypes.byref(count))
    answer: dict[str, object] = {"version": version.value, "devices": []}
    if code:
        answer |= {"error": "driver", "detail": _name(driver, code)}
    elif version.value >= _OLDEST:
        answer["devices"] = [_device(driver, index, tries_contexts) for index in range(count.value)]
    return answer


def _device(driver: ctypes.CDLL, index: int, tries_contexts: bool) -> dict[str, object]:
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), device)
    uuid = ctypes.create_string_buffer(16)
    driver.cuDeviceGetUuid(uuid, device)
    total = ctypes.c_size_t()
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    facts: dict[str, object] = {
        "name": name.value.decode(errors="replace"),
        "uuid": uuid.raw.hex(),
        "total_memory": total.value,
        "context": None,
    }
    for fact, number in _ATTRIBUTES.items():
        value = ctypes.c_int(_MISSING)
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        facts[fact] = value.value
    if tries_contexts and facts["compute_mode"] == _EXCLUSIVE:
        facts["context"] = _try_context(driver, device)
    return facts


def _try_context(driver: ctypes.CDLL, device: ctypes.c_int) -> str | None:
    """What a context is refused with; None if there was one."""
    context = ctypes.c_void_p()
    code = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if code:
        return _name(driver, code)
    driver.cuDevicePrimaryCtxRelease_v2(device)
    return None


def _name(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or f"error {code}".encode()).decode()


if __name__ == "__main__":
    print(json.dumps(probe(tries_contexts=True)))  # noqa: T201  # that is what it is for
