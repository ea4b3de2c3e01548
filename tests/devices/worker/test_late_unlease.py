"""A worker learns that an array is no longer borrowed when the context that read it has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trio_accel.backends.base import PlacedBlock
from trio_accel.devices.worker._requests import WorkerRequests

BLOCK = PlacedBlock(5, 8, -1, 0)


class Engine:
    """An engine with a device that knows no block once it is closed."""

    def __init__(self) -> None:
        self.leases = SimpleNamespace(is_idle=lambda block: True)
        self.there: set[int] = set()

    def adopt(self, blocks: tuple[int, ...]) -> None:
        self.there |= {*blocks}

    def release_all(self, blocks: tuple[int, ...]) -> None:
        self.there.remove(*blocks)


@pytest.mark.parametrize("fate", ["there", "gone", "another"])
def test_the_end_of_a_lease_after_the_end_of_its_context(fate: str) -> None:
    answers: list[Any] = []
    given_back: list[int] = []
    other: Any = None
    channel = SimpleNamespace(send=lambda answer, now: answers.append(answer))
    table = SimpleNamespace(adopt=lambda block, nbytes: None, remove=lambda block: None)
    requests = WorkerRequests(
        *[channel, other, other, table],  # type: ignore[arg-type]
        SimpleNamespace(give_back=given_back.append, borrow=lambda *_, stays: None),  # type: ignore[arg-type]
    )
    engine = Engine()
    requests.session = SimpleNamespace(engine=engine)  # type: ignore[assignment]
    requests.on_borrow(7, (), (BLOCK.block, BLOCK.nbytes, BLOCK.chunk, BLOCK.offset), 4096, False)
    assert engine.there == {5}
    if fate != "there":
        engine.there.clear()
        requests.session = None if fate == "gone" else SimpleNamespace(engine=Engine())  # type: ignore[assignment]
    requests.on_unlease(7)
    assert not engine.there
    assert given_back == [BLOCK.chunk]
    assert answers[-1][:2] == ("done", 7)
