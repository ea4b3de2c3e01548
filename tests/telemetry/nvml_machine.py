"""A stand-in for `pynvml`, as far as it is called: the machine in it is made of plain values."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import cast

import attrs
import pytest

CODES = {
    "NVML_ERROR_UNINITIALIZED": 1,
    "NVML_ERROR_NOT_SUPPORTED": 3,
    "NVML_ERROR_NO_PERMISSION": 4,
    "NVML_ERROR_DRIVER_NOT_LOADED": 9,
    "NVML_ERROR_TIMEOUT": 10,
    "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
    "NVML_ERROR_FUNCTION_NOT_FOUND": 13,
    "NVML_ERROR_GPU_IS_LOST": 15,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": 18,
    "NVML_ERROR_UNKNOWN": 999,
}


class NVMLError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name.removeprefix("NVML_ERROR_").replace("_", " ").capitalize())
        self.value = CODES[name]


class NVMLLibraryMismatchError(Exception):
    pass


@attrs.define
class Gpu:
    """What functions return, by the end of their name; an exception is raised."""

    values: dict[str, object]
    # Numbers of errors that have come and nobody has fetched; and whether it reports them.
    xids: deque[int] = attrs.field(factory=deque[int])
    reports: bool = True

    @property
    def handle(self) -> Gpu:
        return self


def gpu(number: int, **changes: object) -> Gpu:
    """A GPU that tells everything."""
    values: dict[str, object] = {
        "UUID": uuid_of(number),
        "Name": "NVIDIA H200",
        "PciInfo": SimpleNamespace(busId=f"00000000:{0x17 + number:02X}:00.0"),
        "MemoryInfo": SimpleNamespace(used=3 << 30, total=141 << 30),
        "UtilizationRates": SimpleNamespace(gpu=87, memory=41),
        "PowerUsage": 412_500,
        "EnforcedPowerLimit": 700_000,
        "Temperature": 61,
        "TotalEccErrors": {0: 5, 1: 2},
        "MigMode": [0, 0],
        "ComputeRunningProcesses": [],
    }
    assert changes.keys() <= values.keys()
    return Gpu({**values, **changes})


def uuid_of(number: int) -> str:
    return f"GPU-{number:08x}-1111-2222-3333-0123456789ab"


@attrs.define(eq=False)
class Machine:
    """What the library finds, and what was done with it.

    Attributes:
        wait: Called by every function, with its name; may hang.
        users: Who has opened the library and not closed it.
        sets: Event sets that are not freed.
        most: The most calls that there were at once.
    """

    gpus: list[Gpu | Exception]
    opening: Exception | None = None
    wait: Callable[[str], object] = lambda _: None
    users: int = 0
    sets: int = 0
    calls: int = 0
    most: int = 0
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def called(self, name: str, function: Callable[..., object], *args: object) -> object:
        with self.lock:
            self.calls += 1
            self.most = max(self.most, self.calls)
        try:
            self.wait(name)
            if name != "nvmlInit" and not self.users:
                raise NVMLError("NVML_ERROR_UNINITIALIZED")
            return function(*args)
        finally:
            with self.lock:
                self.calls -= 1

    def init(self) -> None:
        if self.opening is not None:
            raise self.opening
        self.users += 1

    def shutdown(self) -> None:
        self.users -= 1

    def handle(self, index: int) -> Gpu:
        found = self.gpus[index]
        if isinstance(found, Exception):
            raise found
        return found

    def create(self) -> list[Gpu]:
        self.sets += 1
        return []

    def register(self, gpu: Gpu, kinds: int, events: list[Gpu]) -> None:
        assert kinds == 8
        if not gpu.reports:
            raise NVMLError("NVML_ERROR_NOT_SUPPORTED")
        events.append(gpu)

    def next_event(self, events: list[Gpu], _: int) -> SimpleNamespace:
        [gpu] = events
        if not gpu.xids:
            raise NVMLError("NVML_ERROR_TIMEOUT")
        return SimpleNamespace(eventType=8, eventData=gpu.xids.popleft())

    def free(self, _: list[Gpu]) -> None:
        self.sets -= 1


def value(name: str) -> Callable[..., object]:
    def ask(gpu: Gpu, *args: int) -> object:
        found = gpu.values[name]
        if isinstance(found, Exception):
            raise found
        if name == "TotalEccErrors":
            assert args[1] == 0
            return cast("dict[int, int]", found)[args[0]]
        if name == "Temperature":
            assert args == (0,)
        return found

    return ask


def install(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it imported as `pynvml`."""
    module = ModuleType("pynvml")
    functions: dict[str, Callable[..., object]] = {
        "nvmlInit": machine.init,
        "nvmlShutdown": machine.shutdown,
        "nvmlDeviceGetCount": lambda: len(machine.gpus),
        "nvmlDeviceGetHandleByIndex": machine.handle,
        "nvmlEventSetCreate": machine.create,
        "nvmlDeviceRegisterEvents": machine.register,
        "nvmlEventSetWait_v2": machine.next_event,
        "nvmlEventSetFree": machine.free,
        **{f"nvmlDeviceGet{name}": value(name) for name in gpu(0).values},
    }

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: machine.called(name, function, *args)

    for name, function in functions.items():
        setattr(module, name, counted(name, function))
    for name, code in CODES.items():
        setattr(module, name, code)
    module.NVMLError = NVMLError  # type: ignore[attr-defined]
    module.NVMLLibraryMismatchError = NVMLLibraryMismatchError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
