"""Record the results of every public function, so that two versions can be compared bit for bit.

    python -m benchmarks.record_functions FOLDER [ROOM...] [--quick] [--compiled never|always] [--texts]
    python -m benchmarks.record_functions --compare BEFORE AFTER

Each function is called with 10 dtypes and 4 layouts; `--quick` takes 3 and 2 of them. `results.json` in the
folder has dtypes, shapes and hashes of bits (any NaN is one NaN), or type and text of an error. `--texts`
stores the generated C++ and CUDA sources of expressions, too. Bits hold for one machine, because functions of
our own have other bits where the processor has no fused multiplication.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import inspect
import json
import os
import re
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel.backends.cpu.compiled import _plans

from ._function_arguments import LAYOUTS, Arguments, Layout, candidates
from ._recorded_texts import RecordedTexts, recorded_texts

ROOMS = ("arrays", "linalg", "fft", "nn", "ndimage", "signal", "spatial")
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int32",
    "uint8",
    "int64",
    "bool",
    "complex128",
    "complex64",
)
_PATIENCE = 120.0
_MAX_DIFFERENCES = 40


@attrs.define(eq=False)
class Recording:
    """The calls of all functions, and their results.

    Attributes:
        results: By function, dtype and layout.
        arguments: By function, so that a comparison shows where a function was called in another way.
        skipped: Functions that no arguments fit, with the last error.
        texts: Files of sources by function, dtype and layout.
    """

    results: dict[str, str] = attrs.field(factory=dict[str, str])
    arguments: dict[str, str] = attrs.field(factory=dict[str, str])
    skipped: dict[str, str] = attrs.field(factory=dict[str, str])
    texts: dict[str, list[str]] = attrs.field(factory=dict[str, list[str]])

    async def add(
        self,
        name: str,
        function: Callable[..., Any],
        device: ta.Device,
        texts: RecordedTexts | None,
        *,
        quick: bool,
    ) -> None:
        """Call a function with each dtype and layout."""
        found = await self._find(name, function, device)
        if found is None:
            return
        self.arguments[name] = re.sub(r" at 0x[0-9a-f]+", "", str(found))
        for dtype in DTYPES[:3] if quick else DTYPES:
            for layout in LAYOUTS[:2] if quick else LAYOUTS:
                key = f"{name}|{dtype}|{layout}"
                if texts is not None:
                    texts.take()
                self.results[key], _ = await outcome(function, found, device, dtype, layout)
                if texts is not None and (files := texts.take()):
                    self.texts[key] = files

    async def _find(self, name: str, function: Callable[..., Any], device: ta.Device) -> Arguments | None:
        self.skipped[name] = "no arguments"
        for dtype in ("float64", "int64"):
            for arguments in candidates(name, function):
                told, is_result = await outcome(function, arguments, device, dtype, "plain")
                if is_result:
                    del self.skipped[name]
                    return arguments
                self.skipped[name] = told
        return None

    def write(self, folder: Path) -> None:
        """Write it to a folder."""
        (folder / "results.json").write_text(
            json.dumps(attrs.asdict(self), indent=0, sort_keys=True), encoding="utf-8"
        )


async def outcome(
    function: Callable[..., Any], arguments: Arguments, device: ta.Device, dtype: str, layout: Layout
) -> tuple[str, bool]:
    """Call a function, and return its result or its error as text, and whether it is a result."""
    try:
        with trio.fail_after(_PATIENCE):
            given, made = await arguments.call(function, device, dtype, layout)
            left = [await described(each) for each in given if isinstance(each, ta.AccelRef)]
            return f"{await described(made)} arguments {zlib.crc32(' '.join(left).encode()):x}", True
    except Exception as error:  # noqa: BLE001  # any refusal is an outcome
        return f"{type(error).__name__}: {error}"[:200], False


async def described(made: Any) -> str:
    """Return dtypes, shapes and hashes of the bits of a result."""
    if isinstance(made, ta.AccelRef):
        array = np.ascontiguousarray(await made.to_host())
        if array.dtype.kind not in "biu":
            array = array.copy()
            parts: Any = array.view(f"f{array.itemsize // 2}") if array.dtype.kind == "c" else array
            parts[np.isnan(parts.astype(float))] = np.nan
        return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    if isinstance(made, (list, tuple)):
        return "[" + " ".join([await described(one) for one in cast("Sequence[Any]", made)]) + "]"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(made))[:80]


def functions(rooms: Sequence[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return the public functions of rooms, with their names."""
    for room in rooms:
        module = getattr(ta, room)
        for name in sorted(dir(module)):
            function = getattr(module, name)
            is_type = inspect.isclass(function) or type(function).__module__ == "typing"
            if not name.startswith("_") and callable(function) and not is_type:
                yield f"{room}.{name}", function


async def record(folder: Path, rooms: Sequence[str], *, quick: bool, texts: bool) -> None:
    """Call all functions, and write the recording."""
    recording, start = Recording(), time.perf_counter()
    options = ta.DeviceOptions(isolation="inline")
    _plans.forget()
    with recorded_texts(folder) if texts else nullcontext() as stored:
        async with ta.open_system("record") as system, system.open_device("cpu:0", options=options) as device:
            for name, function in functions(rooms):
                await recording.add(name, function, device, stored, quick=quick)
    recording.write(folder)
    results = recording.results.values()
    refusals = sum("Error:" in told for told in results)
    print(
        f"{len(recording.arguments)} functions, {len(results)} calls ({len(results) - refusals} results, "
        f"{refusals} refusals), {len(recording.skipped)} functions left out, "
        f"{time.perf_counter() - start:.0f} s"
    )
    for name, reason in sorted(recording.skipped.items()):
        print(f"  left out: {name}: {reason}")


def compare(before: Path, after: Path) -> bool:
    """Print the differences of two recordings, and return whether there are any."""
    one, other = (json.loads((each / "results.json").read_text(encoding="utf-8")) for each in (before, after))
    different = _print_differences("results", one["results"], other["results"])
    _print_differences("arguments", one["arguments"], other["arguments"])
    if one["texts"] and other["texts"]:
        changed = _print_differences("sources", one["texts"], other["texts"])
        pairs = {
            (old, new)
            for key in changed
            for old, new in zip(one["texts"][key], other["texts"].get(key, ()), strict=False)
            if old != new
        }
        for old, new in sorted(pairs)[:_MAX_DIFFERENCES]:
            texts = [
                (folder / "texts" / name).read_text(encoding="utf-8").splitlines()
                for folder, name in ((before, old), (after, new))
            ]
            print(*difflib.unified_diff(texts[0], texts[1], old, new, lineterm="", n=1), sep="\n")
    return bool(different)


def _print_differences(what: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    different = [key for key in before if before[key] != after.get(key)]
    lost = sum(key not in after for key in before)
    print(
        f"{what}: {len(before)} before, {len(after)} after; {lost} are lost, {len(different) - lost} changed"
    )
    for name, count in Counter(key.split("|")[0] for key in different).most_common(_MAX_DIFFERENCES):
        key = next(key for key in different if key.split("|")[0] == name)
        print(
            f"  {name}: {count}, such as {key}: {str(before[key])[:90]} -> {str(after.get(key, 'lost'))[:90]}"
        )
    return different


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.record_functions", description="Record what functions return."
    )
    parser.add_argument("folder", nargs="?", type=Path, help="where the recording is written")
    parser.add_argument(
        "rooms", nargs="*", metavar="ROOM", choices=[[], *ROOMS], help=f"of {', '.join(ROOMS)}"
    )
    parser.add_argument("--quick", action="store_true", help="take three dtypes and two layouts")
    parser.add_argument(
        "--compiled", choices=("auto", "never", "always"), help="whether expressions are compiled"
    )
    parser.add_argument("--texts", action="store_true", help="store the generated sources of expressions")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compare two recordings"
    )
    given = parser.parse_intermixed_args()
    if given.compare:
        sys.exit(compare(*given.compare))
    if given.folder is None:
        parser.error("name a folder, or --compare two of them")
    if given.compiled:
        os.environ["TRIO_ACCEL_CPU_COMPILED"] = given.compiled
    warnings.filterwarnings("ignore")
    given.folder.mkdir(parents=True, exist_ok=True)
    trio.run(lambda: record(given.folder, given.rooms or ROOMS, quick=given.quick, texts=given.texts))


if __name__ == "__main__":
    main()
