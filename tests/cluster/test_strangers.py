"""Strangers who connect to an agent cost its entities nothing."""

from __future__ import annotations

import resource
from contextlib import ExitStack, suppress
from typing import Any

import attrs
import pytest
import trio
from cluster_entities import Add, Counter

import trio_accel as ta
from trio_accel import cluster
from trio_accel.cluster import _link as links

OPTIONS = cluster.ClusterOptions(device=ta.DeviceOptions(isolation="inline"))


async def test_strangers_beyond_the_descriptors_of_an_agent_end_nothing() -> None:
    nodes, total = cluster.LocalNodes(1), 0.0
    with trio.fail_after(60), ExitStack() as stack:
        async with (
            ta.open_system("test") as system,
            cluster.open_cluster(system, nodes, options=OPTIONS) as made,
        ):
            ref, pid, address = made.entity(Counter, "a"), nodes.pid("node-0"), made.members[0].address

            async def ask() -> None:
                nonlocal total
                total += 1.0
                assert await ref.ask(Add(1.0)) == total

            await ask()
            # Fewer than there are strangers.
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (100, 100))
            for number in range(300):
                sock = stack.enter_context(trio.socket.socket())
                await sock.connect((address.host, address.port))
                if number % 20 == 0:
                    await ask()
            # Others come and go, and the secret is another one.
            wrong = attrs.evolve(address, secret=bytes(32))
            for _ in range(50):
                async with trio.open_nursery() as nursery:
                    with pytest.raises(links.LinkLostError):
                        await wrong.connect("node-0", 64, nursery)
            await ask()
            # Clients with the key are still admitted.
            async with trio.open_nursery() as nursery:
                link = await address.connect("node-0", 64, nursery)
                await link.ask(("flush",))
                link.close()
            assert nodes.pid("node-0") == pid


async def test_halves_of_a_link_without_the_other_half_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_PROOF", 0.2)

    async def serve(request: Any) -> object:
        return request

    async with trio.open_nursery() as nursery:
        address = await links.listen("127.0.0.1", bytes(32), serve, nursery)
        with trio.socket.socket() as sock, trio.fail_after(60):
            await sock.connect((address.host, address.port))
            half = links._Connection(sock, links.allocate_any)
            await links._prove(half, bytes(32), is_asked=False, token=bytes(32))
            with suppress(OSError):
                assert await sock.recv(1) == b""
        nursery.cancel_scope.cancel(reason="the test has ended")
