"""``trio-accel info``: devices, their libraries, and the versions of the software below them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import trio_accel as ta
from trio_accel.backends import describe
from trio_accel.backends.base import BackendReport, DeviceReport
from trio_accel.cli._console import as_json, facts, make_console, print_line
from trio_accel.cli._run import in_thread, printable, run_async
from trio_accel.devices import describe_workers

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


def show_info(*, is_json: bool) -> int:
    """Print the report; the exit code is 0 with and without an accelerator."""
    return run_async(partial(_show, is_json))


async def _show(is_json: bool) -> int:
    reports, topology = await in_thread(describe), await in_thread(ta.topology)
    workers = await describe_workers()
    versions, blas = _versions(), _numpy_blas()
    devices = [device for backend in reports for device in _devices(backend, usable=True)]
    has_accelerator = any(device.info.is_accelerator for device in devices)
    problems = [backend.problem for backend in reports if backend.problem is not None]
    accelerator = None if has_accelerator else "; ".join(problems)
    if is_json:
        document: dict[str, object] = {
            "command": "info",
            "version": ta.__version__,
            "devices": list(map(_device, devices)),
            "links": list(map(as_json, topology.links)),
            "islands": topology.islands(),
            "backends": [_backend(backend) for backend in reports],
            "accelerator": accelerator,
            "workers": workers,
            "versions": versions,
            "blas": blas,
        }
        print(json.dumps(document, allow_nan=False, indent=2))
    else:
        _print(make_console(), reports, topology, accelerator, {"workers": workers, **versions}, blas)
    return 0


def _devices(backend: BackendReport, *, usable: bool) -> list[DeviceReport]:
    return [device for device in backend.devices if (device.problem is None) == usable]


def _device(report: DeviceReport) -> dict[str, object]:
    fields = ("name", "backend", "description", "total_memory", "compute_units")
    return {
        **{field: getattr(report.info, field) for field in fields},
        "libraries": report.libraries,
        "properties": dict(report.properties),
    }


def _backend(report: BackendReport) -> dict[str, object]:
    return {
        "name": report.name,
        "problem": report.problem,
        "software": list(map(as_json, report.software)),
        "unusable": [
            {"name": device.info.name, "description": device.info.description, "problem": device.problem}
            for device in _devices(report, usable=False)
        ],
    }


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


def _print(
    console: Console,
    reports: Sequence[BackendReport],
    topology: ta.Topology,
    accelerator: str | None,
    versions: Mapping[str, str | None],
    blas: str,
) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("device", "product", "units", "memory", "libraries"):
        is_folded = heading in {"product", "libraries"}
        table.add_column(heading, no_wrap=not is_folded, overflow="fold")
    for device in [device for backend in reports for device in _devices(backend, usable=True)]:
        info, libraries = device.info, ", ".join(device.libraries)
        memory = f"{info.total_memory / 2**30:.1f} GiB"
        table.add_row(info.name, escape(info.description), str(info.compute_units), memory, libraries)
    parts: list[RenderableType] = [table, *([_topology_table(topology)] if topology.links else [])]
    for backend in reports:
        parts += _parts_of(backend)
    if accelerator is not None:
        parts.append(f"[yellow]no accelerator: {escape(printable(accelerator))}[/]")
    rows = [(name, version or "not installed") for name, version in versions.items()]
    rows.insert(1 + list(versions).index("numpy"), ("NumPy's BLAS", blas))
    console.print(Text(f"trio-accel {ta.__version__}", style="bold"))
    for part in [*parts, facts(rows)]:
        console.print()
        print_line(console, part)


def _topology_table(topology: ta.Topology) -> Table:
    """Return a table of the ways between devices, followed by the number of each device's island."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("reaches", *(info.name for info in topology.devices), "island"):
        table.add_column(heading, overflow="fold")
    numbers = {name: number for number, group in enumerate(topology.islands()) for name in group}
    for first, cells in zip(topology.devices, topology.table(), strict=True):
        table.add_row(first.name, *cells, str(numbers[first.name]))
    return table


def _parts_of(backend: BackendReport) -> Iterator[RenderableType]:
    rows = [
        (device.info.name, ", ".join(f"{name} {value}" for name, value in device.properties))
        for device in _devices(backend, usable=True)
        if device.properties
    ]
    tables = [facts(rows)] if rows else []
    # Libraries without a driver are missing anyway.
    if any(software.source is not None for software in backend.software):
        tables.append(_software_table(backend))
    if tables:
        yield Group(*tables)
    if backend.problem is None:
        for device in _devices(backend, usable=False):
            text = escape(printable(f"{device.info.name} cannot be used: {device.problem}"))
            yield f"[yellow]{text}[/]"


def _software_table(backend: BackendReport) -> Table:
    """Return a table with one row each; a folder is shown only if it differs from the previous row."""
    table = Table.grid(padding=(0, 2))
    for is_whole in (True, True, True, False):
        table.add_column(no_wrap=is_whole, overflow="fold")
    shown = ""
    for entry in backend.software:
        name = entry.name + (f" ({', '.join(entry.needed_by)})" if entry.needed_by else "")
        folder = "" if entry.path is None else os.path.dirname(entry.path)
        # Problems of the whole backend are printed below.
        problem = None if entry.problem == backend.problem else entry.problem
        note = problem or ("" if folder == shown else folder)
        shown = folder or shown
        style = "yellow" if entry.problem else ""
        cells = (name, entry.version or "", entry.source or "missing", note)
        table.add_row(*(escape(printable(cell)) for cell in cells), style=style)
    return table
