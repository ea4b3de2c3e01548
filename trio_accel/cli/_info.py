"""``trio-accel info``: devices, their libraries, and the versions of what they run on."""

from __future__ import annotations

import json
import platform
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

import attrs
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import trio_accel as ta
from trio_accel.cli._results import as_json as to_json
from trio_accel.cli._run import in_thread, run_async
from trio_accel.cli._screen import make_console, print_line
from trio_accel.cli._tables import facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

__all__ = ["show_info"]

_DISTRIBUTIONS = (
    "trio",
    "numpy",
    "scipy",
    "ml-dtypes",
    "cuda-core",
    "cuda-bindings",
    "nvmath-python",
    "matplotlib",
)


@attrs.frozen(kw_only=True)
class DeviceReport:
    """A device and what was found on it.

    Attributes:
        name: What ``open_device`` takes.
        backend: Its backend.
        description: The product.
        total_memory: Bytes.
        compute_units: Processor cores or multiprocessors.
        libraries: Libraries of its backend.
    """

    name: str
    backend: str
    description: str
    total_memory: int
    compute_units: int
    libraries: Sequence[str]


@attrs.frozen(kw_only=True)
class InfoReport:
    """The whole report.

    Attributes:
        version: Of trio_accel.
        devices: The best first.
        accelerator: Why there is no accelerator, ``None`` if there is one.
        versions: Of Python and the installed packages; ``None`` for one that is not installed.
        blas: NumPy's BLAS library.
    """

    version: str
    devices: Sequence[DeviceReport]
    accelerator: str | None
    versions: Mapping[str, str | None]
    blas: str


def show_info(*, as_json: bool) -> int:
    """Print the report; the exit code is 0 with and without an accelerator."""
    return run_async(partial(_show, as_json))


async def _show(is_json: bool) -> int:
    devices = await in_thread(ta.list_devices)
    async with ta.open_system("info") as system:
        reports = [await _report(system, info) for info in devices]
        reason = None
        if all(info.backend == "cpu" for info in devices):
            reason = await _no_accelerator(system)
    report = InfoReport(
        version=ta.__version__, devices=reports, accelerator=reason, versions=_versions(), blas=_numpy_blas()
    )
    if is_json:
        print(json.dumps({"command": "info", **_fields(report)}, allow_nan=False, indent=2))
    else:
        _print(make_console(), report)
    return 0


async def _report(system: ta.System, info: ta.DeviceInfo) -> DeviceReport:
    async with system.open_device(info.name) as device:
        libraries = tuple(device.libraries)
    return DeviceReport(
        name=info.name,
        backend=info.backend,
        description=info.description,
        total_memory=info.total_memory,
        compute_units=info.compute_units,
        libraries=libraries,
    )


async def _no_accelerator(system: ta.System) -> str | None:
    """The reason that the registry gives for having no CUDA device."""
    try:
        async with system.open_device("cuda"):
            return None
    except (ta.AccelError, ValueError) as error:
        return str(error)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _numpy_blas() -> str:
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas['name']} {blas['version']}"


def _fields(report: InfoReport) -> dict[str, object]:
    return {field.name: to_json(getattr(report, field.name)) for field in attrs.fields(InfoReport)}


def _print(console: Console, report: InfoReport) -> None:
    console.print(Text(f"trio-accel {report.version}", style="bold"))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("device", "product", "units", "memory", "libraries"):
        table.add_column(heading)
    for device in report.devices:
        memory = f"{device.total_memory / 2**30:.1f} GiB"
        libraries = ", ".join(device.libraries)
        table.add_row(device.name, device.description, str(device.compute_units), memory, libraries)
    console.print(table)
    if report.accelerator is not None:
        console.print()
        print_line(console, f"[yellow]no accelerator: {escape(report.accelerator)}[/]")
    console.print()
    rows = [(name, version or "not installed") for name, version in report.versions.items()]
    rows.insert(1 + list(report.versions).index("numpy"), ("NumPy's BLAS", report.blas))
    console.print(facts(iter(rows)))
