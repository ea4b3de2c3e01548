"""The program that asks the driver for its devices, or how they are linked, or looks for CUDA's libraries.

It is run by its path in a process of its own, so it imports nothing but the standard library; it prints JSON.
A driver that hangs, crashes or keeps threads does so there, and the calling program may still fork. Libraries
that are large, or crash when they are loaded, stay out of the application. A worker process queries its own
driver, by `probe`, and loads its own libraries, by `look`. `driver_in_use` is loaded by the path of this
file; see `AccelBackend.driver_check`.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

_ATTRIBUTES = {
    "multiprocessors": 16,
    "compute_mode": 20,
    "major": 75,
    "minor": 76,
    "has_virtual_memory": 102,
    "has_descriptors": 103,
}
_MISSING = -1
_BINDINGS = ("cuda", "cuda.bindings", "cuda.pathfinder")
_EXCLUSIVE = 3
# Older drivers lack functions called here.
_OLDEST = 12000
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_FILES = "/proc/self/fd"
_PARTS = 3
_RANK, _ATOMICS = 1, 3  # of CUdevice_P2PAttribute
_USES_HOST_PAGE_TABLES = 100  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES


def driver_in_use() -> str | None:
    """Return the text that this process has initialised CUDA; None if it has not."""
    if _has_device_open() or _is_initialised():
        return "initialises CUDA, which a fork could not use then"
    return None


def _has_device_open() -> bool:
    for descriptor in os.listdir(_FILES):
        try:
            if os.readlink(f"{_FILES}/{descriptor}").startswith("/dev/nvidia"):
                return True
        except FileNotFoundError:
            # The descriptor of the listing itself is closed by now.
            continue
    return False


def _is_initialised() -> bool:
    """Query each loaded driver, because it may keep no file open."""
    with open("/proc/self/maps", "rb") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip() for line in maps if b"/libcuda.so" in line}
    for path in paths:
        # This loads nothing.
        driver = ctypes.CDLL(os.fsdecode(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED:
            return True
    return False


def probe(*, tries_contexts: bool) -> dict[str, object]:
    """Query everything; stop at the first failure.

    Args:
        tries_contexts: Make a context, for a moment, on devices that take one process at a time, because
            nothing else shows whether another process has it.
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
    """Return the error of making a context; None if it was made."""
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


def query_libraries(versions: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """Look for the bindings, and use them to look for every library.

    Args:
        versions: For each library the function that returns its version, and its signature: one part of the
            version at a time, a pair of parts, or one number.
    """
    try:
        # The import that every other module of the backend begins with; it loads nothing of the driver.
        importlib.import_module("cuda.bindings.driver")
        version = str(importlib.import_module("cuda.bindings").__version__)
        pathfinder = importlib.import_module("cuda.pathfinder")
    except Exception as error:  # noqa: BLE001  # a broken installation may raise anything
        is_missing = isinstance(error, ModuleNotFoundError) and error.name in _BINDINGS
        return {"error": f"{type(error).__name__}: {error}", "is_missing": is_missing}
    return {
        "bindings": version,
        "found": {name: _find(pathfinder, name, *how) for name, how in versions.items()},
    }


def _find(pathfinder: ModuleType, name: str, function: object, asked: object) -> dict[str, object] | None:
    try:
        with warnings.catch_warnings():
            # Its warnings do no harm here, and must not fail where warnings are errors.
            warnings.simplefilter("ignore")
            library = pathfinder.load_nvidia_dynamic_lib(name)
    except pathfinder.DynamicLibNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001  # a damaged file, or one for another system
        return {"error": " ".join(str(error).split())}
    path = str(library.abs_path)
    return {
        "path": path,
        "source": library.found_via,
        "version": _version(path, str(function), asked),
    }


def _version(path: str, function: str, asked: object) -> list[int] | None:  # of JSON
    """Return the library's own version; None without one."""
    try:
        call = getattr(ctypes.CDLL(path), function)
    except (OSError, AttributeError):
        return None
    if asked == "number":
        number = call()
        return [number // 10000, number // 100 % 100, number % 100]
    numbers = [ctypes.c_int() for _ in range(_PARTS if asked == "part" else 2)]
    if asked == "part":
        codes = [call(part, ctypes.byref(number)) for part, number in enumerate(numbers)]
    else:
        codes = [call(*map(ctypes.byref, numbers))]
    return None if any(codes) else [number.value for number in numbers]


def ask_links(count: int) -> dict[str, object]:
    """Ask the driver how GPUs reach one another; makes no context.

    Args:
        count: How many GPUs there are.

    Returns:
        Of each GPU whether it shares page tables with the processor (``shares_page_tables``), and of each
        pair in which both reach the other its numbers, rank and native atomics (``peers``); or an ``error``.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuInit(0)
    if code:
        return {"error": f"cuInit failed with error {code}"}

    def query(function: str, *args: int | None) -> int | None:
        value = ctypes.c_int()
        failed = getattr(driver, function)(ctypes.byref(value), *args)
        return None if failed else value.value

    devices = [query("cuDeviceGet", index) for index in range(count)]
    peers: list[object] = []
    for pair in itertools.combinations(range(count), 2):
        both = [devices[index] for index in pair]
        if all(query("cuDeviceCanAccessPeer", *direction) == 1 for direction in (both, both[::-1])):
            rank = query("cuDeviceGetP2PAttribute", _RANK, *both)
            peers.append((pair, rank, query("cuDeviceGetP2PAttribute", _ATOMICS, *both) == 1))
    shares = [query("cuDeviceGetAttribute", _USES_HOST_PAGE_TABLES, device) == 1 for device in devices]
    return {"shares_page_tables": shares, "peers": peers}


if __name__ == "__main__":
    _function, _path, _arguments = json.load(sys.stdin)
    # The application's path may have folders unknown to the environment.
    sys.path[:] = _path or sys.path
    _functions: dict[str, Callable[..., object]] = {
        "probe": probe,
        "query_libraries": query_libraries,
        "ask_links": ask_links,
    }
    print(json.dumps(_functions[_function](**_arguments)))  # noqa: T201  # that is what it is for
