"""Find PyTorch's devices: a program of its own, because PyTorch takes seconds and may open drivers.

It is run by its path, so it imports nothing but the standard library, PyTorch and a module of its folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

VARIABLE = "TRIO_ACCEL_TORCH"
EXPORT = "TRIO_ACCEL_TORCH_EXPORT"
KINDS = ("cpu", "cuda", "xpu", "mps")
OLDEST = (2, 6)


def find() -> dict[str, Any]:
    """Return the version of PyTorch and its devices, the best first, or the problem with it."""
    wanted = os.environ.get(VARIABLE) or None
    if wanted is not None and wanted not in KINDS:
        return {"problem": f"{VARIABLE} must be one of {', '.join(KINDS)}, got {wanted!r}"}
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a broken installation raises whatever it likes
        return {"problem": f"PyTorch cannot be imported, install it again: {type(error).__name__}: {error}"}
    version = torch.__version__
    if tuple(map(int, version.split("+")[0].split(".")[:2])) < OLDEST:
        return {"problem": f"PyTorch {version} is too old, install {OLDEST[0]}.{OLDEST[1]} or later"}
    devices = [device for device in _devices(torch) if wanted in (None, device["kind"])]
    if os.environ.get(EXPORT) == "no":
        for device in devices:
            device["ends_with_process"] = f"{EXPORT} is no"
    if not devices:
        return {"problem": f"PyTorch {version} has no device of the kind {wanted!r}, which {VARIABLE} names"}
    return {"version": version, "devices": devices}


def _devices(torch: Any) -> list[dict[str, Any]]:
    amd = getattr(torch.version, "hip", None) is not None
    cards = [_card("cuda", number, torch.cuda) for number in range(torch.cuda.device_count())]
    others = [_card("xpu", number, torch.xpu) for number in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        total = torch.mps.recommended_max_memory()
        others.append({"kind": "mps", "number": 0, "name": "Apple's GPU", "memory": total, "units": 1})
        others[-1]["ends_with_process"] = "PyTorch exports no memory of such devices"
    processor = {"kind": "cpu", "number": 0, "name": "", "memory": 0, "units": 0, "ends_with_process": ""}
    return [*cards, *others, processor] if amd else [*others, *cards, processor]


def _card(kind: str, number: int, module: Any) -> dict[str, Any]:
    told = module.get_device_properties(number)
    units = getattr(told, "multi_processor_count", 0) or getattr(told, "max_compute_units", 1)
    # Run by its path, this file is in no package.
    exported = importlib.import_module(f"{__package__}._exported" if __package__ else "_exported")
    return {
        "kind": kind,
        "number": number,
        "name": told.name,
        "memory": told.total_memory,
        "units": units,
        "ends_with_process": exported.why_not(f"{kind}:{number}"),
    }


if __name__ == "__main__":
    # What PyTorch prints while it is imported goes elsewhere.
    answer, sys.stdout = sys.stdout, sys.stderr
    json.dump(find(), answer)
