"""The links of the machine's GPUs to one another, and to the processor."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..base import DeviceInfo, DeviceLink
from ._probe import ChildError, ask

_logger = logging.getLogger("trio_accel.backends")

_PROCESSOR = "cpu:0"


def find_links(infos: Sequence[DeviceInfo]) -> tuple[DeviceLink, ...]:
    """Query the driver in a child process; blocks. If that fails, return no links.

    Args:
        infos: Descriptions of all GPUs that the driver has, by their number.
    """
    if not infos:
        return ()
    try:
        answer = ask("ask_links", {"count": len(infos)})
    except ChildError as error:
        _logger.warning("a process that asked how GPUs reach one another %s", error)
        return ()
    if "error" in answer:
        _logger.warning("the NVIDIA driver does not tell how GPUs reach one another: %s", answer["error"])
        return ()
    # Only over NVLink does a GPU use the page tables of the processor, each in the other's memory.
    links = [
        DeviceLink(
            devices=(_PROCESSOR, info.name), kind="nvlink" if shares else "pcie", has_peer_access=shares
        )
        for info, shares in zip(infos, answer["shares_page_tables"], strict=True)
    ]
    peers: list[tuple[tuple[int, int], int | None, bool]] = answer["peers"]
    for (first, second), rank, has_atomics in peers:
        # CUDA lacks a query for NVLink, but GPUs have native atomics in each other's memory only over NVLink.
        links.append(
            DeviceLink(
                devices=(infos[first].name, infos[second].name),
                kind="nvlink" if has_atomics else "pcie",
                has_peer_access=True,
                rank=rank,
            )
        )
    return tuple(links)
