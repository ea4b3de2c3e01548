"""A cluster of Ray's on this host, with simulated nodes; it leaves no process behind."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_NODE = {"num_cpus": 1, "object_store_memory": 200 << 20}
NAMES = ("node-0", "node-1", "node-2")


class RayHost:
    """A head, without a CPU for work, and three nodes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # Processes of Ray's find the package and the entities by it.
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, _paths()))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        head = {"num_cpus": 0, "object_store_memory": 200 << 20, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        # All processes of Ray's have a file open there. Their environment is overwritten by their titles.
        self.folder = str(self.cluster.head_node.get_session_dir_path())
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


def _paths() -> list[Path]:
    here = Path(__file__).resolve().parent
    return [here, here.parent, here.parents[1]]


def left(folder: str, seconds: float = 60.0, of: str = "") -> list[str]:
    """Processes with a file open in a folder that live on this many seconds after their expected end."""
    until = time.monotonic() + seconds
    while (found := [one for one in _users(folder) if of in one]) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def _users(folder: str) -> list[str]:
    found = list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            files = [os.readlink(file) for file in (process / "fd").iterdir()]
            if any(file.startswith(folder) for file in files) and process.name != str(os.getpid()):
                found.append(f"{process.name} {(process / 'cmdline').read_text()}")
    return found


@contextmanager
def ray_host() -> Generator[RayHost, None, None]:
    """Have a cluster; all its processes have ended at the end."""
    import ray

    host = RayHost()
    try:
        # Its threads start before the tests, which look for leftovers.
        ray.init(host.address, log_to_driver=False)
        yield host
    finally:
        host.end()
    assert left(host.folder) == []
