"""Arrays that no operation uses, and their contents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta

MIB = 1 << 20
_AT_ONCE = 8
_STEP = 512
# By number, size and the size of the largest, which together determine the contents.
_known: dict[tuple[int, int, int], str] = {}


def sizes_from_to(count: int, least: int, most: int) -> list[int]:
    """This many sizes, each power of two in turn."""
    powers = [least << shift for shift in range((most // least).bit_length())]
    return [powers[number % len(powers)] for number in range(count)]


@attrs.define(eq=False)
class Witnesses:
    """Arrays on a device, with the hashes of their contents.

    Attributes:
        refs: The arrays.
        digests: Of the host's copies, before they were put.
    """

    refs: list[ta.AccelRef]
    digests: list[str]

    @classmethod
    async def put(cls, device: ta.Device, sizes: Sequence[int]) -> Witnesses:
        """Put arrays of this many bytes, each of different contents."""
        content = np.frombuffer(np.random.default_rng(7).bytes(max(sizes)), np.uint64).copy()
        refs, digests = [], []
        for number, nbytes in enumerate(sizes):
            host = content[: nbytes // 8]
            host[::_STEP] = number + 1
            key = number, nbytes, len(content)
            if key not in _known:
                _known[key] = await trio.to_thread.run_sync(_sha, host)
            digests.append(_known[key])
            refs.append(await device.put(host))
        return cls(refs, digests)

    async def check(self) -> None:
        """See that each is identical."""
        found: dict[int, str] = {}
        room = np.empty((_AT_ONCE, max(ref.nbytes for ref in self.refs) // 8), np.uint64)

        async def look(number: int) -> None:
            for index in range(number, len(self.refs), _AT_ONCE):
                ref = self.refs[index]
                host = await ref.to_host(out=room[number, : ref.size])
                found[index] = await trio.to_thread.run_sync(_sha, host)

        async with trio.open_nursery() as nursery:
            for number in range(_AT_ONCE):
                nursery.start_soon(look, number)
        assert [found[index] for index in range(len(self.refs))] == self.digests


def _sha(host: npt.NDArray[np.uint64]) -> str:
    return hashlib.sha256(host).hexdigest()
