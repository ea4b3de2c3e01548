"""``trio-accel info``: devices, their libraries, and the versions of what they run on."""

from __future__ import annotations

import json
import os
import platform
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

import attrs
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import trio_accel as ta
from trio_accel.backends import describe
from trio_accel.cli._errors import printable
from trio_accel.cli._results import as_json as to_json
from trio_accel.cli._run import in_thread, run_async
from trio_accel.cli._screen import make_console, print_line
from trio_accel.cli._tables import facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from trio_accel.backends.base import BackendReport, DeviceReport, Software

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
class DeviceEntry:
    """A device that can be used.

    Attributes:
        name: What ``open_device`` takes.
        backend: Its backend.
        description: The product.
        total_memory: Bytes.
        compute_units: Processor cores or multiprocessors.
        libraries: Libraries of its backend that it has.
        properties: What else its backend knows of it.
    """

    name: str
    backend: str
    description: str
    total_memory: int
    compute_units: int
    libraries: Sequence[str]
    properties: Mapping[str, str]


@attrs.frozen(kw_only=True)
class Unusable:
    """A device that is there and cannot be used.

    Attributes:
        name: What ``open_device`` would take.
        description: The product.
        problem: Why not, and what to do about it.
    """

    name: str
    description: str
    problem: str


@attrs.frozen(kw_only=True)
class BackendEntry:
    """A kind of device.

    Attributes:
        name: Its name.
        problem: Why it has no device that can be used, ``None`` if it has one.
        software: The driver and the vendor's libraries, also those that are missing.
        unusable: Its devices that cannot be used.
    """

    name: str
    problem: str | None
    software: Sequence[Software]
    unusable: Sequence[Unusable]


@attrs.frozen(kw_only=True)
class InfoReport:
    """The whole report.

    Attributes:
        version: Of trio_accel.
        devices: Those that can be used, the best first.
        backends: All of them, the best first.
        accelerator: Why there is no accelerator, ``None`` if there is one.
        versions: Of Python and the installed packages; ``None`` for one that is not installed.
        blas: NumPy's BLAS library.
    """

    version: str
    devices: Sequence[DeviceEntry]
    backends: Sequence[BackendEntry]
    accelerator: str | None
    versions: Mapping[str, str | None]
    blas: str


def show_info(*, as_json: bool) -> int:
    """Print the report; the exit code is 0 with and without an accelerator."""
    return run_async(partial(_show, as_json))


async def _show(is_json: bool) -> int:
    found = await in_thread(describe)
    devices = [_device(device) for backend in found for device in backend.devices if device.problem is None]
    problems = [backend.problem for backend in found if backend.problem is not None]
    has_accelerator = any(device.backend != "cpu" for device in devices)
    report = InfoReport(
        version=ta.__version__,
        devices=devices,
        backends=[_backend(backend) for backend in found],
        accelerator=None if has_accelerator else "; ".join(problems),
        versions=_versions(),
        blas=_numpy_blas(),
    )
    if is_json:
        print(json.dumps({"command": "info", **_fields(report)}, allow_nan=False, indent=2))
    else:
        _print(make_console(), report)
    return 0


def _device(report: DeviceReport) -> DeviceEntry:
    info = report.info
    return DeviceEntry(
        name=info.name,
        backend=info.backend,
        description=info.description,
        total_memory=info.total_memory,
        compute_units=info.compute_units,
        libraries=report.libraries,
        properties=dict(report.properties),
    )


def _backend(report: BackendReport) -> BackendEntry:
    unusable = [
        Unusable(name=device.info.name, description=device.info.description, problem=device.problem)
        for device in report.devices
        if device.problem is not None
    ]
    return BackendEntry(name=report.name, problem=report.problem, software=report.software, unusable=unusable)


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
        is_folded = heading in {"product", "libraries"}
        table.add_column(heading, no_wrap=not is_folded, overflow="fold")
    for device in report.devices:
        memory = f"{device.total_memory / 2**30:.1f} GiB"
        libraries = ", ".join(device.libraries)
        table.add_row(device.name, escape(device.description), str(device.compute_units), memory, libraries)
    console.print(table)
    for backend in report.backends:
        _print_backend(
            console, backend, [device for device in report.devices if device.backend == backend.name]
        )
    if report.accelerator is not None:
        console.print()
        print_line(console, f"[yellow]no accelerator: {escape(printable(report.accelerator))}[/]")
    console.print()
    rows = [(name, version or "not installed") for name, version in report.versions.items()]
    rows.insert(1 + list(report.versions).index("numpy"), ("NumPy's BLAS", report.blas))
    console.print(facts(iter(rows)))


def _print_backend(console: Console, backend: BackendEntry, devices: Sequence[DeviceEntry]) -> None:
    rows = [
        (device.name, ", ".join(f"{name} {value}" for name, value in device.properties.items()))
        for device in devices
        if device.properties
    ]
    if rows:
        console.print()
        console.print(facts(iter(rows)))
    # What there is no driver for is missing anyway.
    if any(software.source is not None for software in backend.software):
        if not rows:
            console.print()
        console.print(_software_table(backend))
    if backend.problem is None:
        for device in backend.unusable:
            console.print()
            text = escape(printable(f"{device.name} cannot be used: {device.problem}"))
            print_line(console, f"[yellow]{text}[/]")


def _software_table(backend: BackendEntry) -> Table:
    """One row for each; a folder only where it is another than in the row above."""
    table = Table.grid(padding=(0, 2))
    for is_whole in (True, True, True, False):
        table.add_column(no_wrap=is_whole, overflow="fold")
    shown = ""
    for one in backend.software:
        name = one.name + (f" ({', '.join(one.needed_by)})" if one.needed_by else "")
        folder = "" if one.path is None else os.path.dirname(one.path)
        # What keeps the whole backend from working is said below.
        problem = None if one.problem == backend.problem else one.problem
        note = problem or ("" if folder == shown else folder)
        shown = folder or shown
        style = "yellow" if one.problem else ""
        cells = (name, one.version or "", one.source or "missing", note)
        table.add_row(*(escape(printable(cell)) for cell in cells), style=style)
    return table
