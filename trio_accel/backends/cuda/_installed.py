"""The installed CUDA libraries, and the backend's libraries that can use them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from ..base import Software, Strs
from ..base.kit.modules import search_path
from . import _probe_process
from ._probe import ChildError, ask
from .manifest import FRONT_END, LIBRARIES, STAND_IN, VENDOR, VERSIONS, SharedLibrary

_SOURCES = {
    "site-packages": "wheel",
    "conda": "conda",
    "system-search": "system",
    "was-already-loaded-from-elsewhere": "loaded before",
}
# CUDA 13 ends with the compute capabilities below this one.
_OLDEST_FOR_13 = (7, 5)


@attrs.frozen(kw_only=True)
class Installed:
    """Findings on this machine.

    Attributes:
        bindings: Version of cuda-bindings; None if it cannot be imported.
        software: The libraries of CUDA, including missing ones.
        reason: Why no device can be used, and the remedy; None if devices can be used.
    """

    bindings: str | None
    software: tuple[Software, ...] = ()
    reason: str | None = None

    @property
    def libraries(self) -> Strs:
        """Libraries of the backend that can be used, sorted."""
        needing = {name for software in self.software if not software.problem for name in software.needed_by}
        standalone = {
            name for name, library in LIBRARIES.items() if not library.needs and library.has_package
        }
        return tuple(sorted(name for name in standalone | needing if self.problem(name) is None))

    def problem(self, library: str) -> str | None:
        """Return why a library of the backend cannot be used, or None."""
        needed = VENDOR.get(LIBRARIES[library].needs)
        problems = (
            f"library {library!r} needs {software.name}, which {software.problem}"
            for software in self.software
            if needed is not None and software.name == needed.title and software.problem
        )
        return next(problems, None)

    def refusal(self, name: str, capability: tuple[int, int]) -> str | None:
        """Return why a device cannot be used with these libraries; None if it can."""
        compiler = next((software for software in self.software if not software.needed_by), None)
        is_13 = compiler is not None and (compiler.version or "").startswith("13.")
        if not is_13 or capability >= _OLDEST_FOR_13:
            return None
        return (
            f"the {name} has compute capability {capability[0]}.{capability[1]}, which CUDA 13 does not "
            "know any longer: pip install '.[cuda12]' in a checkout"
        )


def extra_for(version: tuple[int, int]) -> str:
    """Return the command that installs what a driver of this CUDA version runs."""
    return f"pip install '.[{'cuda12' if version < (13, 0) else 'cuda13'}]' in a checkout"


@functools.cache
def installed(version: tuple[int, int], *, is_worker: bool = False) -> Installed:
    """Look for CUDA's libraries; blocks. The result is cached.

    Args:
        version: CUDA version of the driver.
        is_worker: This process serves a device and may load the libraries; other processes use a child
            process.
    """
    if is_worker:
        return _understood(_probe_process.query_libraries(VERSIONS), version)
    try:
        answer = ask("query_libraries", {"versions": VERSIONS}, search_path())
    except ChildError as error:
        return Installed(
            bindings=None,
            reason=f"a process that loaded CUDA's libraries {error}; install them anew: {extra_for(version)}",
        )
    return _understood(answer, version)


def _understood(answer: Mapping[str, Any], version: tuple[int, int]) -> Installed:
    if "error" in answer:
        return Installed(bindings=None, reason=_no_bindings(answer, version))
    bindings = str(answer["bindings"])
    software = tuple(
        _software(name, vendor, answer["found"][name], version) for name, vendor in VENDOR.items()
    )
    reason = _bindings_too_new(bindings, version)
    if reason is None and all(entry.source is None for entry in software):
        reason = f"the NVIDIA driver is there, but CUDA's libraries are not installed: {extra_for(version)}"
    elif reason is None and software[0].problem is not None:
        reason = f"NVRTC, by which kernels are compiled, {software[0].problem}"
    if any(entry.name == "cuDNN" and entry.problem is None for entry in software):
        software = (*software, _front_end(version))
    return Installed(bindings=bindings, software=software, reason=reason)


def _front_end(version: tuple[int, int]) -> Software:
    """Describe the front end of cuDNN; without it, convolutions and attention take kernels of our own."""
    software = Software(name="cuDNN front end", needed_by=("dnn",))
    try:
        installed_version = metadata.version("nvidia-cudnn-frontend")
    except metadata.PackageNotFoundError:
        installed_version, state = None, "is not installed"
    else:
        state = f"is not of {FRONT_END[0]}.{FRONT_END[1]}"
    is_known = installed_version is not None and tuple(installed_version.split(".")[:2]) == tuple(
        map(str, FRONT_END)
    )
    problem = (
        f"{state}, so convolutions and attention take up to 10 and 37 times as long: {extra_for(version)}"
    )
    return attrs.evolve(
        software,
        version=installed_version,
        source=installed_version and "wheel",
        problem=None if is_known else problem,
    )


def _no_bindings(answer: Mapping[str, Any], version: tuple[int, int]) -> str:
    if answer["is_missing"]:
        return f"cuda-bindings is not installed: {extra_for(version)}"
    return (
        f"cuda-bindings cannot be imported ({answer['error']}); reinstall it: "
        "pip install --force-reinstall --no-deps cuda-bindings cuda-pathfinder"
    )


def _bindings_too_new(bindings: str, version: tuple[int, int]) -> str | None:
    major = int(bindings.partition(".")[0])
    if version[0] >= major:
        return None
    return (
        f"the NVIDIA driver is for CUDA {version[0]}.{version[1]}, and cuda-bindings {bindings} needs one "
        f"for CUDA {major}: {extra_for(version)}, or install a newer driver"
    )


def _software(
    name: str, vendor: SharedLibrary, finding: Mapping[str, Any] | None, version: tuple[int, int]
) -> Software:
    needed_by = tuple(ours for ours, library in LIBRARIES.items() if name in (library.needs, library.uses))
    software = Software(name=vendor.title, needed_by=needed_by)
    folder = os.environ.get(STAND_IN)
    # NVIDIA's own libraries may also be installed, and would call the stand-in as a real driver.
    if folder and (finding is None or Path(finding.get("path", "")).parent != Path(folder)):
        return attrs.evolve(software, problem="the stand-in driver does not have")
    if finding is None:
        return attrs.evolve(software, problem=f"is not installed: {extra_for(version)}")
    if "error" in finding:
        problem = f"cannot be loaded ({finding['error']}); reinstall it: {extra_for(version)}"
        return attrs.evolve(software, source="damaged", problem=problem)
    numbers = finding["version"]
    return attrs.evolve(
        software,
        version=".".join(map(str, numbers)) if numbers else None,
        source=_SOURCES.get(finding["source"], finding["source"]),
        path=finding["path"],
        problem=_too_new(vendor, numbers, version),
    )


def _too_new(vendor: SharedLibrary, numbers: list[int] | None, version: tuple[int, int]) -> str | None:
    """Return why a library is too new for the driver, or None; later minor versions of its CUDA work."""
    if not numbers or vendor.major_offset is None:
        return None
    major = numbers[0] + vendor.major_offset
    if major <= version[0]:
        return None
    return (
        f"is for CUDA {major}, and the NVIDIA driver for CUDA {version[0]}.{version[1]}: "
        f"{extra_for(version)}, or install a newer driver"
    )
