"""The program that asks the driver which devices there are, and prints the answer as JSON.

Run by its path, in an isolated interpreter: a driver that hangs, crashes or keeps threads does so there,
and the program that wants to know may still fork.
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


def probe() -> dict[str, object]:
    """Ask for everything; stops at what goes wrong first."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": "no driver", "detail": str(error)}
    code = driver.cuInit(0)
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if code:
        return {"error": "cuInit", "code": code, "detail": _name(driver, code), "version": version.value}
    count = ctypes.c_int()
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return {"error": "count", "code": code, "detail": _name(driver, code), "version": version.value}
    return {"version": version.value, "devices": [_device(driver, index) for index in range(count.value)]}


def _device(driver: ctypes.CDLL, index: int) -> dict[str, object]:
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
    }
    for fact, number in _ATTRIBUTES.items():
        value = ctypes.c_int(_MISSING)
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        facts[fact] = value.value
    return facts


def _name(driver: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"an unknown error").decode()


if __name__ == "__main__":
    print(json.dumps(probe()))  # noqa: T201  # that is what it is for
