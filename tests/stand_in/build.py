"""Builds the stand-in CUDA driver and libraries, and runs programs on them.

`python tests/stand_in/build.py -- COMMAND` runs a command on the stand-in, for example
`python -m pytest tests/backends`. These variables say what it simulates:

- `STAND_IN_DEVICES`: how many devices the machine has (2); `CUDA_VISIBLE_DEVICES` chooses among them.
- `STAND_IN_MEMORY`: the size of each in bytes (8 GiB), as far as one process sees it.
- `STAND_IN_VERSION`: the driver's version (13000).
- `STAND_IN_COMPUTE_MODE`: 0, 2 (no contexts) or 3 (one process).
- `STAND_IN_INIT_ERROR`: what `cuInit` returns.
- `STAND_IN_FAULT_DELAY`: milliseconds from a fault of a kernel to its error (5).
- `STAND_IN_LOG`: 1 prints each call to the driver.
- `STAND_IN_DIR`: folder for compiled kernels and for the locks of exclusive devices.

The driver exports functions for tests, to be called by `ctypes`: `stand_in_fail(stream, code)` ends a context
when the stream gets there, `stand_in_poison(device, code)` at once, and `stand_in_calls(name)` counts calls.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent

_C = ("gcc", "-std=gnu11")
_CXX = ("g++", "-std=c++17")
_FLAGS = (
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-parameter",  # signatures are the vendor's
    "-O2",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)

# What a library is called, and the stem of its sources: `STEM.c`, `STEM.cpp` and `STEM_*.c` or `.cpp`. The
# first one is the driver, which all others may call.
_LIBRARIES = (
    ("libcuda.so.1", "driver"),
    ("libnvrtc.so.13", "nvrtc"),
    ("libcublas.so.13", "cublas"),
    ("libcublasLt.so.13", "cublaslt"),
    ("libcufft.so.12", "cufft"),
    ("libnvJitLink.so.13", "nvjitlink"),
    ("libcusparse.so.12", "cusparse"),
)


class BuildError(Exception):
    """A source of the stand-in does not compile, or there is no compiler; the text says which."""


@dataclass(frozen=True)
class StandIn:
    """Stand-in libraries that are built.

    Attributes:
        folder: Where the libraries are.
        libraries: Their paths, the driver first.
    """

    folder: Path
    libraries: tuple[Path, ...]

    def environment(self) -> dict[str, str]:
        """Variables under which a program finds the stand-in before anything that is installed.

        Caches of programs are kept apart, for what the stand-in compiles runs on no device.
        """
        return {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "LD_PRELOAD": ":".join(str(library) for library in self.libraries),
            "STAND_IN_DIR": str(self.folder),
        }


def is_available() -> bool:
    """Whether this machine has the compilers that the stand-in needs."""
    return sys.platform == "linux" and all(shutil.which(command[0]) for command in (_C, _CXX))


def build(folder: Path | None = None) -> StandIn:
    """Builds what is not built yet, and says where it is.

    Args:
        folder: Where builds are kept, each in a folder named by the hash of its sources; by default below the
            system's folder for temporary files. Several processes may build at once.

    Raises:
        BuildError: A source does not compile, or there is no compiler.
    """
    root = folder or Path(tempfile.gettempdir()) / f"trio-accel-stand-in-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = root / _digest()
    present = [(soname, sources) for soname, stem in _LIBRARIES if (sources := _sources(stem))]
    built = StandIn(folder=target, libraries=tuple(target / soname for soname, _ in present))
    if not target.exists():
        _build_into(target, present)
    return built


def environment() -> dict[str, str]:
    """Builds the stand-in and gives the variables for running a program on it."""
    return build().environment()


def _sources(stem: str) -> list[Path]:
    patterns = (f"{stem}.c", f"{stem}.cpp", f"{stem}_*.c", f"{stem}_*.cpp")
    return sorted(path for pattern in patterns for path in _HERE.glob(pattern))


def _digest() -> str:
    digest = hashlib.sha256(repr((_C, _CXX, _FLAGS, _LIBRARIES)).encode())
    for path in sorted(path for pattern in ("*.c", "*.cpp", "*.h") for path in _HERE.glob(pattern)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build_into(target: Path, libraries: list[tuple[str, list[Path]]]) -> None:
    # Built aside and renamed, so that nobody sees half a build; whoever comes second throws theirs away.
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix="build-"))
    try:
        for header in _HERE.glob("*.h"):
            shutil.copy(header, aside)
        for soname, sources in libraries:
            _build_library(aside, soname, sources)
        try:
            aside.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _build_library(folder: Path, soname: str, sources: list[Path]) -> None:
    command = _CXX if any(source.suffix == ".cpp" for source in sources) else _C
    driver = _LIBRARIES[0][0]
    calls = [] if soname == driver else [str(folder / driver)]
    _run(
        *command,
        *_FLAGS,
        "-shared",
        f"-Wl,-soname,{soname}",
        *map(str, sources),
        *calls,
        "-ldl",
        "-lm",
        "-o",
        str(folder / soname),
    )


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError(f"the stand-in driver needs {command[0]}, which is not installed") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr}")


def main() -> None:
    """Prints the variables, or runs the command behind `--` with them."""
    variables = environment()
    if "--" not in sys.argv:
        print("\n".join(f"{name}={value}" for name, value in variables.items()))
        return
    command = sys.argv[sys.argv.index("--") + 1 :]
    os.execvpe(command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    main()
