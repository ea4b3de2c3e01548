"""The program that loads CUDA's libraries, and prints where each was found as JSON.

They are searched for as the bindings search for them. Run by its path in a process of its own: what is large,
or crashes when it is loaded, stays out of the application. A worker process loads its own, by `look`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType

_PARTS = 3


def look(versions: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """Look for the bindings, and by them for every library.

    Args:
        versions: By the name of each library the function that tells its version, and whether that is asked
            for one part of it at a time.
    """
    try:
        # What every other module of the backend begins with; it loads nothing of the driver.
        importlib.import_module("cuda.bindings.driver")
        version = str(importlib.import_module("cuda.bindings").__version__)
        pathfinder = importlib.import_module("cuda.pathfinder")
    except Exception as error:  # noqa: BLE001  # a broken installation may raise anything
        return {"error": f"{type(error).__name__}: {error}", "is_missing": _is_missing(error)}
    return {
        "bindings": version,
        "found": {name: _find(pathfinder, name, *how) for name, how in versions.items()},
    }


def _find(
    pathfinder: ModuleType, name: str, function: object, is_in_parts: object
) -> dict[str, object] | None:
    try:
        with warnings.catch_warnings():
            # What it warns of does no harm here, and must not fail where warnings are errors.
            warnings.simplefilter("ignore")
            library = pathfinder.load_nvidia_dynamic_lib(name)
    except pathfinder.DynamicLibNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001  # a damaged file, or one for another system
        return {"error": " ".join(str(error).split())}
    path = str(library.abs_path)
    return {
        "path": path,
        "source": library.found_via,
        "version": _version(path, str(function), bool(is_in_parts)),
    }


def _is_missing(error: Exception) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name in (
        "cuda",
        "cuda.bindings",
        "cuda.pathfinder",
    )


def _version(path: str, function: str, is_in_parts: bool) -> list[int] | None:  # of JSON
    """The library's own word for it; None if it has none."""
    numbers = [ctypes.c_int() for _ in range(_PARTS if is_in_parts else 2)]
    try:
        call = getattr(ctypes.CDLL(path), function)
    except (OSError, AttributeError):
        return None
    if is_in_parts:
        codes = [call(part, ctypes.byref(number)) for part, number in enumerate(numbers)]
    else:
        codes = [call(*map(ctypes.byref, numbers))]
    return None if any(codes) else [number.value for number in numbers]


if __name__ == "__main__":
    # The application's, as it may have folders that the environment does not tell of.
    sys.path[:], _versions = json.load(sys.stdin)
    print(json.dumps(look(_versions)))  # noqa: T201  # that is what it is for
