"""The errors of a caller if the other end is closed, has other settings, or has other classes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from cluster_entities import Account, Add, Counter, Echo, FailThere

import trio_accel as ta
from trio_accel import cluster
from trio_accel.cluster import _frames as frames
from trio_accel.cluster import _link as links

INLINE = cluster.ClusterOptions(device=ta.DeviceOptions(isolation="inline"))


async def test_asks_of_a_closed_cluster_are_refused(tmp_path: Path) -> None:
    store = cluster.SqliteStore(tmp_path / "store.db")
    told: list[Exception] = []
    async with ta.open_system("program") as system, trio.open_nursery() as nursery:

        async def ask(ref: Any, seconds: float) -> None:
            try:
                await ref.ask(Echo(None, seconds))
            except Exception as error:  # noqa: BLE001  # what it is, is the question
                told.append(error)

        async with cluster.open_cluster(system, cluster.LocalNodes(1), store=store, options=INLINE) as made:
            counter, account = made.entity(Counter, "a"), made.entity(Account, "a")
            assert await counter.ask(Add(1.0)) == 1.0
            assert await account.ask(Add(1.0)) == 1.0
            assert (counter.is_available, counter.is_dead) == (True, False)
            nursery.start_soon(ask, counter, 60.0)
            await trio.testing.wait_all_tasks_blocked()
            # It follows on the link, so it has begun.
            await made.entity(Counter, "behind").ask(Add(1.0))
        assert (counter.is_available, counter.is_dead) == (False, True)
        with trio.fail_after(60):
            for ref in (counter, account, made.entity(Counter, "b")):
                with pytest.raises(ta.ActorStoppedError, match="its cluster is closed"):
                    await ref.ask(Add(1.0))
    assert [type(error) for error in told] == [cluster.NodeLostError]
    assert "it may have been executed" in str(told[0])


async def test_asks_of_closed_entities_are_refused() -> None:
    async with (
        ta.open_system("here") as system,
        system.open_devices(["cpu"], options=INLINE.device) as devices,
    ):
        async with cluster.open_entities(system, devices) as router:
            ref = router.entity(Counter, "a")
            assert await ref.ask(Add(1.0)) == 1.0
        assert ref.is_dead
        with pytest.raises(ta.ActorStoppedError, match="its cluster is closed"):
            await ref.ask(Add(1.0))


@pytest.mark.parametrize(("device", "error"), [("cuda:99", ta.NotSupportedError), ("nosuch", ValueError)])
async def test_a_node_without_the_wanted_device_is_named(device: str, error: type[Exception]) -> None:
    options = cluster.ClusterOptions(devices=(device,), device=INLINE.device)
    found = None
    with trio.fail_after(60):
        try:
            async with (
                ta.open_system("program") as system,
                cluster.open_cluster(system, cluster.LocalNodes(["one"]), options=options),
            ):
                await trio.sleep_forever()
        except* ta.ActorFailedError as group:
            [found] = group.exceptions
    while isinstance(found, ExceptionGroup):
        [found] = found.exceptions
    assert isinstance(found, ta.ActorFailedError)
    cause = found.__cause__
    assert isinstance(cause, error)
    assert "node one" in str(cause)
    assert device in str(cause)


async def test_ctrl_c_in_a_terminal_reaches_no_agent() -> None:
    """A terminal sends it to all processes of its foreground, which are of one session."""
    nodes = cluster.LocalNodes(["one"])
    async with (
        ta.open_system("program") as system,
        cluster.open_cluster(system, nodes, options=INLINE),
    ):
        assert os.getsid(nodes.pid("one")) == nodes.pid("one")


async def test_an_agent_imports_nothing_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pickle", "trio", "trio_accel"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the current folder')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    async with (
        ta.open_system("program") as system,
        cluster.open_cluster(system, cluster.LocalNodes(1), options=INLINE) as made,
    ):
        assert len(made.members) == 1


async def test_an_error_of_a_class_that_only_the_node_has() -> None:
    async with (
        ta.open_system("program") as system,
        cluster.open_cluster(system, cluster.LocalNodes(1), options=INLINE) as made,
    ):
        ref = made.entity(Counter, "a")
        with pytest.raises(RuntimeError, match=r"Odd.*an odd thing") as raised:
            await ref.ask(FailThere())
        assert "in fail_there" in raised.value.__notes__[0]
        assert await ref.ask(Add(1.0)) == 1.0


async def test_another_file_of_a_class_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "of_two_versions.py"
    file.write_text("from cluster_entities import Counter\n\n\nclass Own(Counter):\n    pass\n", "ascii")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("of_two_versions")
    assert frames.digest_of("of_two_versions")
    assert frames.digest_of("no.such.module") == frames.digest_of("sys") == ""
    async with (
        ta.open_system("program") as system,
        cluster.open_cluster(system, cluster.LocalNodes(1), options=INLINE) as made,
    ):
        assert await made.entity(module.Own, "a").ask(Add(1.0)) == 1.0
        assert "another file" not in capfd.readouterr().err
        file.write_text(file.read_text("ascii") + "# newer\n", "ascii")
    async with (
        ta.open_system("program") as system,
        cluster.open_cluster(system, cluster.LocalNodes(1), options=INLINE) as made,
    ):
        assert await made.entity(module.Own, "a").ask(Add(1.0)) == 1.0
    assert "node node-0 has another file of of_two_versions:Own than the asker" in capfd.readouterr().err
    del sys.modules["of_two_versions"]


async def test_large_arrays_arrive_in_memory_chosen_by_the_receiver() -> None:
    made: list[np.ndarray[Any, Any]] = []

    def allocate(size: int) -> np.ndarray[Any, Any]:
        made.append(np.empty(size, np.uint8))
        return made[-1]

    async def serve(request: Any) -> Any:
        small, large = request
        return [any(np.shares_memory(one, mine) for mine in made) for one in (small, large)], large

    async with trio.open_nursery() as nursery:
        address = await links.listen("127.0.0.1", b"s" * 32, serve, nursery, allocate)
        own: list[np.ndarray[Any, Any]] = []

        def here(size: int) -> np.ndarray[Any, Any]:
            own.append(np.empty(size, np.uint8))
            return own[-1]

        link = await address.connect("there", 4, nursery, here)
        large = np.arange(1 << 16, dtype=np.float64)
        shared, back = await link.ask((np.arange(4.0), large))
        assert shared == [False, True]
        assert [one.nbytes for one in made] == [large.nbytes]
        assert np.array_equal(back, large)
        assert [np.shares_memory(back, one) for one in own] == [True]
        nursery.cancel_scope.cancel()


async def test_an_agent_has_large_arrays_in_memory_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that `host_empty` gives travels to a device without a copy."""
    asked: list[int] = []
    kind: Any = sys.modules["trio_accel.devices.front._device"].OpenDevice
    was = kind.host_empty

    def host_empty(self: Any, shape: int, dtype: str = "float64") -> np.ndarray[Any, Any]:
        asked.append(shape)
        made: np.ndarray[Any, Any] = was(self, shape, dtype)
        return made

    monkeypatch.setattr(kind, "host_empty", host_empty)
    agents: Any = sys.modules["trio_accel.cluster._agent"]
    targets: Any = sys.modules["trio_accel.cluster._table"]
    options = cluster.ClusterOptions(devices=("cpu",), device=INLINE.device)
    send, receive = trio.open_memory_channel[links.Address](1)
    async with trio.open_nursery() as nursery:
        agent = agents.Agent(cluster.AgentConfig("x", options, None, b"s" * 32))
        nursery.start_soon(agent.run, lambda address, _: send.send_nowait(address))
        link = await (await receive.receive()).connect("x", 4, nursery)
        await link.ask(("table", cluster.Table(1, (cluster.Member("x", (), 1, None),)), None))
        target = targets.Target(frames.path_of(Counter), "a")
        back = await link.ask(("ask", 1, target, Echo(np.ones(1 << 14)), None, False))
        assert np.array_equal(back, np.ones(1 << 14))
        assert asked == [8 << 14]
        nursery.cancel_scope.cancel()


async def test_a_world_of_several_nodes_is_refused_with_the_way() -> None:
    async with (
        ta.open_system("program") as system,
        cluster.open_cluster(system, cluster.LocalNodes(2), options=INLINE) as made,
    ):
        refs: list[Any] = [*made.replicas(Counter).values()]
        with pytest.raises(
            ta.NotSupportedError, match=r"open_world: .*used there; send one array a node by ask"
        ):
            async with ta.open_world(refs):
                pass
