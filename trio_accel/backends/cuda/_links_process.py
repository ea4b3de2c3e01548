"""The program that asks the driver, and NVML where it is installed, how GPUs reach one another; prints JSON.

Run by its path in a process of its own, as `_probe_process`, and for the same reasons. It makes no context.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_RANK, _ATOMICS = 1, 3  # of CUdevice_P2PAttribute
_USES_HOST_PAGE_TABLES = 100  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
_GPU, _SWITCH = 0, 2  # of nvmlIntNvLinkDeviceType_t
_OVER_NVLINK, _OK = 2, 0  # NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK


def ask_driver(count: int) -> dict[str, object]:
    """Ask the driver of each GPU and of each pair.

    Args:
        count: How many GPUs there are.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuInit(0)
    if code:
        return {"error": f"cuInit failed with error {code}"}

    def told(function: str, *args: int | None) -> int | None:
        value = ctypes.c_int()
        failed = getattr(driver, function)(ctypes.byref(value), *args)
        return None if failed else value.value

    devices = [told("cuDeviceGet", index) for index in range(count)]
    pairs: list[dict[str, object]] = []
    for first, device in enumerate(devices):
        for second in range(first + 1, count):
            both = (device, devices[second])
            pairs.append(
                {
                    "devices": (first, second),
                    "access": all(told("cuDeviceCanAccessPeer", *each) == 1 for each in (both, both[::-1])),
                    "rank": told("cuDeviceGetP2PAttribute", _RANK, *both),
                    "atomics": told("cuDeviceGetP2PAttribute", _ATOMICS, *both) == 1,
                }
            )
    shares = [told("cuDeviceGetAttribute", _USES_HOST_PAGE_TABLES, device) == 1 for device in devices]
    return {"shares_page_tables": shares, "pairs": pairs}


def ask_nvml(uuids: Sequence[str | None]) -> dict[str, object] | None:
    """Ask NVML of the same; None where it is not installed, or does not answer.

    Args:
        uuids: The id of each GPU, in the order of their numbers; None where one tells none.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  # not installed, broken, or without a driver
        return None
    gpus = [_told(nvml, "nvmlDeviceGetHandleByUUID", uuid) if uuid else None for uuid in uuids]
    ways = [Counter[object]() if gpu is None else _nvlinks(nvml, gpu) for gpu in gpus]
    places = [None if gpu is None else _place(_told(nvml, "nvmlDeviceGetPciInfo", gpu)) for gpu in gpus]
    pairs: list[dict[str, object]] = []
    for first, gpu in enumerate(gpus):
        for second in range(first + 1, len(gpus)):
            both = (gpu, gpus[second])
            is_known = None not in both
            # Either by links of their own, or by all links to the switches.
            direct = ways[first][places[second]]
            by_switch = min(ways[first][_SWITCH], ways[second][_SWITCH])
            status = _told(nvml, "nvmlDeviceGetP2PStatus", *both, _OVER_NVLINK) if is_known else None
            pairs.append(
                {
                    "nvlinks": direct or by_switch,
                    "over_nvlink": None if status is None else status == _OK,
                    "meets_at": _told(nvml, "nvmlDeviceGetTopologyCommonAncestor", *both)
                    if is_known
                    else None,
                }
            )
    lanes = [None if gpu is None else _told(nvml, "nvmlDeviceGetCurrPcieLinkWidth", gpu) for gpu in gpus]
    return {"lanes": lanes, "pairs": pairs}


def _told(nvml: Any, function: str, *args: object) -> Any:
    # NVML's errors, and functions that this package or this driver does not have.
    with suppress(Exception):
        return getattr(nvml, function)(*args)
    return None


def _nvlinks(nvml: Any, gpu: object) -> Counter[object]:
    """Count the active NVLinks of a GPU by the place of the GPU at the other end, or to switches."""
    found: Counter[object] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _told(nvml, "nvmlDeviceGetNvLinkState", gpu, link) != 1:
            continue
        kind = _told(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link)
        end = _place(_told(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", gpu, link))
        found[end if kind in (None, _GPU) else kind] += 1
    return found


def _place(pci: Any) -> object:
    # A place that is not known is that of no other GPU.
    return object() if pci is None else (pci.domain, pci.bus, pci.device)


if __name__ == "__main__":
    # The application's path, as it may have folders that the environment does not tell of.
    sys.path[:], _uuids = json.load(sys.stdin)
    print(json.dumps({"driver": ask_driver(len(_uuids)), "nvml": ask_nvml(_uuids)}))  # noqa: T201
