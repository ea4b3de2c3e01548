"""Another machine than this one: other answers of Python and of the kernel's tables.

With the environment variable `TRIO_ACCEL_TEST_MACHINE` the tests, and the programs that they start, see the
processor, cores, memory and system of that machine. Python imports a module of this name at its start: a
program needs this folder on its path, and no change.
"""

from __future__ import annotations

import builtins
import io
import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

VARIABLE = "TRIO_ACCEL_TEST_MACHINE"
"""Names the machine."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Machine(NamedTuple):
    """Properties of the machine that tests must not depend on."""

    processor: str
    cores: int
    memory: int
    system: str
    release: str
    distribution: str


MACHINES = {
    "small": Machine("VIA", 1, 2 << 30, "Linux", "5.4", "Alpine Linux 3.20"),
    "cloud": Machine("Intel(R) Xeon(R) Processor", 2, 16 << 30, "Linux", "6.8.0-45-generic", "Ubuntu 24.04"),
    "large": Machine(
        "AMD Ryzen Threadripper PRO 7995WX 96-Cores (engineering sample) @ 5.10 GHz",
        64,
        512 << 30,
        "Linux",
        "5.14.0-427.13.1.el9_4.x86_64+rt",
        "Red Hat Enterprise Linux 9.4 (Plow)",
    ),
}
"""By name."""


def become(name: str) -> None:
    """Have this process, from now on, see that machine in place of its own."""
    machine = MACHINES[name]
    _fake_files(machine)
    _fake_cores(machine)
    _fake_memory(machine)
    # Not `platform.uname`, because copying its answer starts a program to find the processor.
    _, _, _, version, architecture = os.uname()
    uname = platform.uname_result(machine.system, "machine", machine.release, version, architecture)
    vars(uname)["processor"] = machine.processor
    platform.uname = lambda: uname
    platform.processor = lambda: machine.processor


def _fake_files(machine: Machine) -> None:
    free, name = machine.memory // 2048, machine.distribution
    core = f"model name\t: {machine.processor}\n\n"
    tables = {
        "/proc/cpuinfo": "".join(f"processor\t: {number}\n{core}" for number in range(machine.cores)),
        "/proc/meminfo": f"MemTotal: {2 * free} kB\nMemFree: {free} kB\nMemAvailable: {free} kB\n",
        "/proc/self/cgroup": "0::/\n",  # no container limits it
        "/etc/os-release": f'PRETTY_NAME="{name}"\nID={name.split()[0].lower()}\n',
    }
    really_open: Callable[..., Any] = io.open

    def open_table(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        # `Path` hands itself over; descriptors are numbers.
        text = None if isinstance(file, int) else tables.get(os.fspath(file))
        if text is None:
            return really_open(file, mode, *more, **options)
        return io.BytesIO(text.encode()) if "b" in mode else io.StringIO(text)

    builtins.open = io.open = open_table


def _fake_cores(machine: Machine) -> None:
    everywhere = set(range(machine.cores))
    bound: dict[int, set[int]] = {}

    def bind(pid: int, cores: Any) -> None:
        # This machine's cores may be others: its tables under /proc/self name them still.
        bound[pid or os.getpid()] = everywhere & set(cores) or everywhere

    os.cpu_count = lambda: machine.cores
    os.sched_getaffinity = lambda pid: set(bound.get(pid or os.getpid(), everywhere))
    os.sched_setaffinity = bind
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        os.process_cpu_count = lambda: len(os.sched_getaffinity(0))


def _fake_memory(machine: Machine) -> None:
    really_ask = os.sysconf
    told = {
        "SC_PHYS_PAGES": machine.memory // _PAGE,
        "SC_AVPHYS_PAGES": machine.memory // 2 // _PAGE,
        "SC_NPROCESSORS_ONLN": machine.cores,
        "SC_NPROCESSORS_CONF": machine.cores,
    }
    os.sysconf = lambda name: told[name] if name in told else really_ask(name)


if VARIABLE in os.environ:
    become(os.environ[VARIABLE])
