"""A program that configures no logging prints one line for each loss, and none for an orderly end."""

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

def leaves(pid):
    found = children(pid)
    return {leaf for child in found for leaf in leaves(child) or {child}}

def pids(actors, name):
    for actor in actors:
        if actor.path.endswith(name) and actor.pid is not None:
            yield actor.pid
        yield from pids(actor.children, name)

async def until(condition):
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.01)

async def use_device(system, how):
    isolation = "inline" if how.startswith("inline") else "process"
    options = ta.DeviceOptions(isolation=isolation, spares=how.count("spare"))
    async with system.open_device("cpu", options=options) as device:
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
        elif how.startswith("launcher killed"):
            if options.spares:
                await until(lambda: device.recovery.spares)
            [pid] = children(os.getpid())
            os.kill(pid, signal.SIGKILL)
        elif how == "spare killed":
            await until(lambda: device.recovery.spares)
            [pid] = pids(system.tree().children, "/context")
            [launcher] = children(os.getpid())
            spare, = leaves(launcher) - {pid}
            os.kill(spare, signal.SIGKILL)
            await until(lambda: len(leaves(launcher) - {spare}) == 2)
            await until(lambda: device.recovery.spares)
            return
        else:
            return
        await until(lambda: device.generation > generation)
        await (await device.put([1.0])).to_host()

async def use_launcher(system, how):
    async with system.open_device("cpu", options=ta.DeviceOptions(isolation="process")) as device:
        await (await device.put([1.0])).to_host()
    [pid] = children(os.getpid())
    os.kill(pid, signal.SIGKILL)
    await until(lambda: children(os.getpid()).keys() - {pid})

async def use_world(system, how):
    options = ta.DeviceOptions(isolation="process")
    async with (
        system.open_devices(["cpu", "cpu"], options=options) as devices,
        ta.open_world(devices) as world,
    ):
        arrays = [await device.put([1.0]) for device in devices]
        await world.all_reduce(arrays)
        if how == "rank killed":
            testing.inject_fault(devices.devices[1], "collectives.sum", kill=True)
            try:
                await world.all_reduce(arrays)
            except ta.collectives.RankFailedError:
                pass
        await world.all_reduce(arrays)

async def use_agent(system, how):
    options = cluster.ClusterOptions(devices=("cpu",), device=ta.DeviceOptions(isolation="process"))
    nodes = cluster.LocalNodes(1)
    async with cluster.open_cluster(system, nodes, options=options):
        agent = nodes.pid("node-0")
        [worker] = leaves(agent)
        os.kill(worker, signal.SIGKILL)
        await until(lambda: leaves(agent) and not leaves(agent) & {worker, *children(agent)})

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
        uses = {"node": use_nodes, "idle": use_launcher, "rank": use_world, "agent's": use_agent}
        await uses.get(how.split()[0], use_device)(system, how)

trio.run(main, sys.argv[1])
"""


CONTEXT = "trio_accel.devices: device s/cpu:0 lost its context of generation 1: "
LAUNCHER = " crashed: LauncherError: the launcher of worker processes was killed by SIGKILL"


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("inline poisoned", [CONTEXT]),
        ("worker killed", [f"{CONTEXT}ContextLostError: the worker"]),
        ("spare killed", ["trio_accel.devices: device s/cpu:0: spare worker process "]),
        # Each lost thing has its line: the launcher has taken the context along, and the spare serves nobody.
        ("launcher killed with a spare", [LAUNCHER, CONTEXT]),
        ("idle launcher killed", [LAUNCHER]),
        ("rank killed", ["trio_accel.devices: device s/devices/cpu:0#2 lost its context of generation 1: "]),
        ("node killed", ["trio_accel.actors: actor s/nodes/node-0 crashed: NodeLostError"]),
        (
            "agent's worker killed",
            [" WARNING trio_accel.devices: device node-0/devices/cpu:0 lost its context of "],
        ),
        ("inline used", []),
        ("worker used", []),
        ("node used", []),
        ("node drained", []),
    ],
)
def test_each_loss_is_one_line(how: str, texts: list[str], tmp_path: Path) -> None:
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
    assert [sum(text in line for line in lines) for text in texts] == [1] * len(texts), lines
    assert len(lines) == len(texts), lines
