"""Asks by calls of Ray's actors, as where no stream gets through: streams are tested against them."""

from __future__ import annotations

import attrs

from trio_accel import cluster
from trio_accel.cluster import _link as links


class WalledAgent(cluster.RayNodes.agent):
    """An agent that nobody reaches by a stream."""

    def _tell(self, address: links.Address, devices: tuple[str, ...]) -> None:
        super()._tell(attrs.evolve(address, port=1), devices)


class RayCalls(cluster.RayNodes):
    """Nodes of Ray's whose agents are asked by calls."""

    agent = WalledAgent
