"""The links of the machine's GPUs to one another, and to the processor."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..base import DeviceInfo, DeviceLink, LinkKind
from ..base.kit.modules import search_path
from ._probe import ChildError, ask

_logger = logging.getLogger("trio_accel.backends")

_PROCESSOR = "cpu:0"
_MEETS_AT = {
    0: "internal",
    10: "single",
    20: "multiple",
    30: "hostbridge",
    40: "node",
    50: "system",
}


def find_links(infos: Sequence[DeviceInfo]) -> tuple[DeviceLink, ...]:
    """Ask the driver and NVML in a child process; blocks. Where that fails, nothing is told.

    Args:
        infos: Descriptions of all GPUs that the driver has, by their number.
    """
    if not infos:
        return ()
    try:
        answer = ask("ask_links", {"uuids": [info.uuid for info in infos]}, search_path())
    except ChildError as error:
        _logger.warning("a process that asked how GPUs reach one another %s", error)
        return ()
    return _understood(infos, answer["driver"], answer["nvml"])


def _understood(
    infos: Sequence[DeviceInfo], driver: Mapping[str, Any], nvml: Mapping[str, Any] | None
) -> tuple[DeviceLink, ...]:
    if "error" in driver:
        _logger.warning("the NVIDIA driver does not tell how GPUs reach one another: %s", driver["error"])
        return ()
    lanes: list[int | None] = nvml["lanes"] if nvml else [None] * len(infos)
    told: list[Mapping[str, Any] | None] = nvml["pairs"] if nvml else [None] * len(driver["pairs"])
    links = [
        _to_host(info, width, shares=shares)
        for info, width, shares in zip(infos, lanes, driver["shares_page_tables"], strict=True)
    ]
    for pair, more in zip(driver["pairs"], told, strict=True):
        first, second = map(int, pair["devices"])
        names = infos[first].name, infos[second].name
        links.append(_between(names, pair, more, (lanes[first], lanes[second])))
    return tuple(links)


def _to_host(info: DeviceInfo, lanes: int | None, *, shares: bool) -> DeviceLink:
    """Only over NVLink does a GPU use the page tables of the processor, each in the other's memory."""
    return DeviceLink(
        devices=(_PROCESSOR, info.name),
        kind="nvlink" if shares else "pcie",
        has_peer_access=shares,
        has_native_atomics=shares,
        width=None if shares else lanes,
    )


def _between(
    names: tuple[str, str],
    pair: Mapping[str, Any],
    more: Mapping[str, Any] | None,
    lanes: tuple[int | None, int | None],
) -> DeviceLink:
    """Make the link of two GPUs of what the driver tells, and NVML if it has answered."""
    nvlinks = more["nvlinks"] if more else 0
    # Atomics tell where NVML does not: GPUs have native ones in each other's memory over NVLink alone.
    over_nvlink = more["over_nvlink"] if more else None
    is_nvlink = bool(nvlinks) or (pair["atomics"] if over_nvlink is None else over_nvlink)
    kind: LinkKind = "host" if not pair["access"] else "nvlink" if is_nvlink else "pcie"
    width: dict[LinkKind, int | None] = {
        "nvlink": nvlinks or None,
        "pcie": None if None in lanes else min(lane for lane in lanes if lane is not None),
        "host": None,
    }
    return DeviceLink(
        devices=names,
        kind=kind,
        has_peer_access=pair["access"],
        width=width[kind],
        rank=pair["rank"] if pair["access"] else None,
        has_native_atomics=pair["access"] and pair["atomics"],
        meets_at=_MEETS_AT.get(more["meets_at"]) if more else None,
    )
