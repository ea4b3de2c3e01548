"""A program that configures no logging prints one line for each death, and none for an orderly end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
import trio
import trio_accel as ta
from trio_accel import cluster, testing

def children(pid):
    found = {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{number}/stat") as file:
                name, rest = file.read().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        if int(rest.split()[1]) == pid:
            found[int(number)] = name
    return found

def pids(actors, name):
    for actor in actors:
        if actor.path.endswith(name) and actor.pid is not None:
            yield actor.pid
        yield from pids(actor.children, name)

async def use_device(system, how):
    isolation = "inline" if how.startswith("inline") else "process"
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation=isolation)) as device:
        generation = device.generation
        await (await device.put([1.0])).to_host()
        if how == "inline poisoned":
            testing.poison(device)
            try:
                await device.put([1.0])
            except ta.ContextLostError:
                pass
        elif how == "worker killed":
            [pid] = pids(system.tree().children, "/context")
            os.kill(pid, signal.SIGKILL)
        else:
            return
        with trio.fail_after(30):
            while device.generation == generation:
                await trio.sleep(0.01)
        await (await device.put([1.0])).to_host()

async def use_nodes(system, how):
    options = cluster.ClusterOptions(devices=("cpu",), device=ta.DeviceOptions(isolation="inline"))
    nodes = cluster.LocalNodes(1)
    async with cluster.open_cluster(system, nodes, options=options) as made:
        if how == "node killed":
            epoch = made.epoch
            os.kill(nodes.pid("node-0"), signal.SIGKILL)
            with trio.fail_after(30):
                while made.epoch < epoch + 2:
                    await made.wait_changed()
        elif how == "node drained":
            await made.drain("node-0")

async def main(how):
    async with ta.open_system("s") as system:
        await (use_nodes if how.startswith("node") else use_device)(system, how)

trio.run(main, sys.argv[1])
"""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("inline poisoned", "device s/cpu:0 lost its context of generation 1"),
        ("worker killed", "device s/cpu:0 lost its context of generation 1: ContextLostError: the worker"),
        ("node killed", "actor s/nodes/node-0 crashed: NodeLostError"),
        ("inline used", None),
        ("worker used", None),
        ("node used", None),
        ("node drained", None),
    ],
)
def test_each_death_is_one_line(how: str, text: str | None, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == (text is not None), lines
    assert text is None or text in lines[0]
