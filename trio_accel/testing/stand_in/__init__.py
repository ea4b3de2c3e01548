"""A simulated CUDA driver with NVRTC, cuBLAS, cuFFT, cuSPARSE and cuDSS: CUDA programs run without a GPU.

`python -m trio_accel.testing.stand_in program.py` runs a program on it. The libraries are compiled once, by
gcc and g++, from the sources next to this file. These variables configure the simulation:

- `STAND_IN_DEVICES`: how many devices the machine has (2); `CUDA_VISIBLE_DEVICES` chooses among them.
- `STAND_IN_MEMORY`: the size of each in bytes (8 GiB), as far as one process sees it.
- `STAND_IN_VERSION`: the driver's version (13000).
- `STAND_IN_COMPUTE_MODE`: 0, 2 (no contexts) or 3 (one process).
- `STAND_IN_PEERS`: which devices reach one another, a row for each, such as `-0-/0-1/-1-`: a digit is the
  performance rank of the link, and 0 is a link with native atomics; without it none do.
- `STAND_IN_INIT_ERROR`: the result of `cuInit`.
- `STAND_IN_FAULT_DELAY`: milliseconds from a fault of a kernel to its error (5).
- `STAND_IN_LOG`: 1 prints each call to the driver.
- `STAND_IN_DIR`: folder for compiled kernels and for the locks of exclusive devices.

The driver exports functions for tests, to be called by `ctypes`: `stand_in_fail(stream, code)` ends a context
when the stream gets there, `stand_in_poison(device, code)` at once, and `stand_in_calls(name)` counts calls.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs

from ...backends.base.kit.code_cache import remove_stale
from ...backends.cpu import compiled
from ...backends.cuda.manifest import STAND_IN

__all__ = ["BuildError", "StandIn", "build", "is_available"]

_SUFFIXES = (".c", ".cpp", ".cu", ".h")
_SOURCES = [path for path in sorted(Path(__file__).parent.iterdir()) if path.suffix in _SUFFIXES]
# The CPU backend compiles CUDA's source by the same headers.
_HEADERS = [Path(compiled.__file__).with_name(name) for name in ("kernels.h", "special.h")]
# gcc takes each source as the language of its name.
_COMMAND = ("gcc", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared")
# The options with which it compiles kernels.
_KERNELS = ("-std=c++17", "-O1", "-w", "-fPIC", "-fno-semantic-interposition", "-ffp-contract=off")
# Programs import these instead of cuda-cccl.
_SORT = [Path(__file__).with_name(name) for name in ("compute.py", "radix_sort.cu")]
# The library of each source, by name prefix. All others may call the driver.
_LIBRARIES = {
    "driver": "libcuda.so.1",
    "nvrtc": "libnvrtc.so.13",
    "cublas": "libcublas.so.13",
    "cublaslt": "libcublasLt.so.13",
    "cufft": "libcufft.so.12",
    "nvjitlink": "libnvJitLink.so.13",
    "cusparse": "libcusparse.so.12",
    "cudss": "libcudss.so.0",
}


class BuildError(Exception):
    """A source of the libraries does not compile, or the compiler is missing; the text names the reason."""


@attrs.frozen
class StandIn:
    """The built libraries.

    Attributes:
        folder: The folder of the libraries.
        libraries: Their paths, the driver first.
    """

    folder: Path
    libraries: tuple[Path, ...]

    def environment(self) -> dict[str, str]:
        """Return variables by which a program finds these libraries before any installed ones.

        Caches of programs are kept separate, because programs compiled here cannot run on a device.
        """
        return {
            STAND_IN: str(self.folder),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "LD_PRELOAD": ":".join(map(str, self.libraries)),
            "STAND_IN_DIR": str(self.folder),
            "PYTHONPATH": os.pathsep.join([str(self.folder / "python"), os.environ.get("PYTHONPATH", "")]),
        }


def is_available() -> bool:
    """Return whether this machine has the necessary compilers."""
    return sys.platform == "linux" and all(map(shutil.which, ("gcc", "g++")))


def build(folder: Path | None = None) -> StandIn:
    """Build the libraries if necessary, and return their location.

    Args:
        folder: The folder for builds, each in a subfolder named by the hash of its sources; by default below
            the system's folder for temporary files. Several processes may build at once.

    Raises:
        BuildError: A source does not compile, the compiler is missing, or the folder belongs to another user.
    """
    if not is_available():
        raise BuildError(
            "the stand-in driver is compiled on Linux, with gcc and g++; install both, in Debian and Ubuntu "
            "by: apt install gcc g++"
        )
    root = folder or Path(tempfile.gettempdir()) / f"trio-accel-stand-in-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Others can make a folder of this name first, and this process loads the libraries in it.
    if root.lstat().st_uid != os.getuid():
        raise BuildError(f"the folder {root} belongs to another user; set TMPDIR to a folder of your own")
    digest = hashlib.sha256()
    # This file counts as a source, because it determines the commands and the contents of the folder.
    for path in (Path(__file__), *_SOURCES, *_HEADERS, _SORT[0]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    target = root / digest.hexdigest()[:16]
    # Its compiler of kernels makes a folder for each, which stays if the process is killed.
    remove_stale(target, r"compile-\w+")
    if not target.exists():
        _build_into(target)
    return StandIn(target, tuple(target / name for name in _LIBRARIES.values()))


def _build_into(target: Path) -> None:
    remove_stale(target.parent, r"build-\w+")
    # Built aside and renamed: other processes see a whole build. The second of two throws its own away.
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix="build-"))
    try:
        for path in _HEADERS:
            shutil.copy(path, aside)
        described = aside / "python" / "cuda_cccl-0.dist-info" / "METADATA"
        for folder in (described.parent, aside / "python" / "cuda"):
            folder.mkdir(parents=True)
        described.write_text("Metadata-Version: 2.1\nName: cuda-cccl\nVersion: 0\n")
        for path in _SORT:
            shutil.copy(path, aside / "python" / "cuda")
        # Precompile the header, because it takes most of a small kernel's compile time.
        header = str(aside / _HEADERS[0].name)
        header_command = ("g++", "-x", "c++-header", *_KERNELS, header, "-o", f"{header}.gch")
        driver, *commands = (_library(aside, stem, name) for stem, name in _LIBRARIES.items())
        # All are linked with the driver.
        _run(driver)
        _run(*commands, header_command)
        try:
            aside.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _library(folder: Path, stem: str, name: str) -> tuple[str, ...]:
    """Return the command that builds one of the libraries."""
    sources = [str(path) for path in _SOURCES if re.fullmatch(rf"{stem}(_.*)?\.c(pp)?", path.name)]
    driver = _LIBRARIES["driver"]
    linked = (*((str(folder / driver),) if name != driver else ()), "-lstdc++", "-ldl", "-lm")
    options = ", ".join(f'"{option}"' for option in _KERNELS)
    flags = (f"-DKERNEL_OPTIONS={options}", f"-Wl,-soname,{name}", "-o", str(folder / name))
    return (*_COMMAND, *sources, *linked, *flags)


def _run(*commands: Sequence[str]) -> None:
    """Run compilers at the same time."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # noqa: S603
        for command in commands
    ]
    said = [process.communicate()[1] for process in running]
    for command, process, text in zip(commands, running, said, strict=True):
        if process.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{text}")
