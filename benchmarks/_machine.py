"""What the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
import time

import attrs
import numpy as np

import trio_accel as ta

__all__ = ["Machine"]

_ADDITIONS = 500_000
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@attrs.frozen(kw_only=True)
class Machine:
    """A machine and its software, as far as they matter for the numbers.

    Attributes:
        processor: The vendor's name of the processor.
        cores: Cores that this process may use.
        memory: Bytes of memory.
        system: Operating system and release.
        python: Implementation and version.
        blas: Library that NumPy multiplies matrices with.
        versions: Versions of the packages, by name.
        environment: Variables that are set and tell BLAS how many threads to use.
        accelerators: Descriptions of the devices besides the processor.
        load: Load average of the last minute when this was made: what else the machine was doing.
        speed: Additions that a loop of Python made in a second then: what else computed on the host of a
            virtual machine, which tells of it in no other way.
    """

    processor: str
    cores: int
    memory: int
    system: str
    python: str
    blas: str
    versions: dict[str, str]
    environment: dict[str, str]
    accelerators: tuple[str, ...]
    load: float
    speed: float

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine."""
        devices = ta.list_devices()
        processor = next(device for device in devices if device.backend == "cpu")
        accelerators = tuple(device.description for device in devices if device.backend != "cpu")
        packages = ("trio", "numpy", "scipy", *(("cuda-bindings", "nvmath-python") if accelerators else ()))
        return cls(
            processor=processor.description,
            cores=processor.compute_units,
            memory=processor.total_memory,
            system=f"{platform.system()} {platform.release()}",
            python=f"{platform.python_implementation()} {platform.python_version()}",
            blas=_blas(),
            versions={"trio_accel": ta.__version__}
            | {name: importlib.metadata.version(name) for name in packages},
            environment={name: os.environ[name] for name in _THREADS if name in os.environ},
            accelerators=accelerators,
            load=os.getloadavg()[0] if sys.platform != "win32" else float("nan"),
            speed=_speed(),
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        environment = "".join(f", {name}={value}" for name, value in self.environment.items())
        accelerators = "".join(f"{name}; " for name in self.accelerators)
        return (
            f"{accelerators}{self.processor}, {self.cores} cores, {self.memory / 2**30:.1f} GiB, "
            f"{self.system}\n"
            f"{self.python}, {versions}, {self.blas}{environment}; load {self.load:.1f}, "
            f"{self.speed / 1e6:.0f} million additions per second at the start"
        )


def _blas() -> str:
    built_with = np.show_config(mode="dicts").get("Build Dependencies", {})
    library = built_with.get("blas", {})
    return f"{library.get('name', 'unknown BLAS')} {library.get('version', '')}".strip()


def _speed() -> float:
    """Additions that a loop of Python makes in a second; the median of some short times."""
    times: list[float] = []
    for _ in range(9):
        total, started = 0, time.perf_counter()
        for number in range(_ADDITIONS):
            total += number
        times.append(time.perf_counter() - started)
    return _ADDITIONS / statistics.median(times)
