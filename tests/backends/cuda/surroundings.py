"""Folders of libraries that imitate the equipment of a machine with CUDA."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from trio_accel.testing.stand_in import StandIn

_PROPERTY = """
int {name}GetProperty(int part, int *value) {{
    int parts[3] = {{{version}}};
    *value = parts[part];
    return 0;
}}
"""
_NVRTC = """
int {name}Version(int *major, int *minor) {{
    int parts[2] = {{{version}}};
    *major = parts[0];
    *minor = parts[1];
    return 0;
}}
"""
_CUTENSOR = """
unsigned long {name}GetVersion(void) {{
    int parts[3] = {{{version}}};
    return parts[0] * 10000 + parts[1] * 100 + parts[2];
}}
"""

# Name, file and version of CUDA 13.0's libraries; no function of the dependencies is called.
LIBRARIES = {
    "nvrtc": ("libnvrtc.so.13", "13, 0"),
    "cublas": ("libcublas.so.13", "13, 1, 2"),
    "cublasLt": ("libcublasLt.so.13", ""),
    "cufft": ("libcufft.so.12", "12, 0, 1"),
    "cusolver": ("libcusolver.so.12", "12, 0, 4"),
    "cusparse": ("libcusparse.so.12", "12, 6, 3"),
    "cudnn": ("libcudnn.so.9", "9, 19, 0"),
    "cutensor": ("libcutensor.so.2", "2, 5, 0"),
    "nvJitLink": ("libnvJitLink.so.13", ""),
}


def compile_library(path: Path, source: str) -> None:
    """Compile C to a shared library named like its file."""
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{path.name}", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


def make_library(folder: Path, name: str, version: str | None = None) -> Path:
    """Compile a library with only the version of a CUDA library."""
    file, usual = LIBRARIES[name]
    template = {"nvrtc": _NVRTC, "cutensor": _CUTENSOR}.get(name, _PROPERTY)
    path = folder / file
    compile_library(path, template.format(name=name, version=version or usual or "0, 0, 0"))
    return path


class Machine:
    """A folder in the search path of libraries, and the variables that put it there."""

    def __init__(self, folder: Path, stand_in: StandIn, made: Path) -> None:
        self.folder = folder
        self.stand_in = stand_in
        self._made = made

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            "LD_LIBRARY_PATH": str(self.folder),
            "STAND_IN_DIR": str(self.folder),
            # Code compiled here runs on no device, and the other way round.
            "XDG_CACHE_HOME": self.stand_in.environment()["XDG_CACHE_HOME"],
            **variables,
        }

    def add_driver(self) -> None:
        driver = next(path for path in self.stand_in.libraries if path.name == "libcuda.so.1")
        (self.folder / "libcuda.so.1").symlink_to(driver)

    def add(self, names: Iterable[str] = tuple(LIBRARIES)) -> None:
        for name in names:
            path = self.folder / LIBRARIES[name][0]
            path.unlink(missing_ok=True)
            path.symlink_to(self._made / path.name)

    def remove(self, name: str) -> None:
        (self.folder / LIBRARIES[name][0]).unlink()
