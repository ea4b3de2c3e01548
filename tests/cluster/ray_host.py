"""A cluster of Ray's on this host, whose nodes are simulated, and which leaves no process behind."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MARK = "TRIO_ACCEL_RAY_TESTS"
_NODE = {"num_cpus": 1, "object_store_memory": 200 << 20}
NAMES = ("node-0", "node-1", "node-2")


class RayHost:
    """A head, which has no CPU for work, and three nodes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.mark = os.environ[_MARK] = uuid.uuid4().hex
        # Processes of Ray's find the package and the entities by it.
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, _paths()))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        head = {"num_cpus": 0, "object_store_memory": 200 << 20, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: dict[str, Any] = {}
        for name in NAMES:
            self.add(name)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, name: str) -> None:
        self.nodes[name] = self.cluster.add_node(node_name=name, **_NODE)

    def remove(self, name: str) -> None:
        """Kill all processes of a node."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def kill_head(self) -> None:
        self.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    def end(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()

    def left(self, seconds: float = 10.0) -> list[str]:
        """Commands of processes that live on so many seconds after they should be gone."""
        until = time.monotonic() + seconds
        while (found := marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.1)
        return found


def _paths() -> list[Path]:
    here = Path(__file__).resolve().parent
    return [here, here.parent, here.parents[1]]


def marked(mark: str) -> list[str]:
    """Commands of the other processes that were started with a mark in their environment."""
    found = list[str]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            is_marked = f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if is_marked and state != "Z" and folder.name != str(os.getpid()):
            found.append(f"{folder.name} {command}")
    return found


@contextmanager
def ray_host() -> Generator[RayHost, None, None]:
    """Have a cluster; all that it has started is gone at the end."""
    host = RayHost()
    try:
        yield host
    finally:
        host.end()
    assert host.left() == []
