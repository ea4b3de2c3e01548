"""The arrays that ``demo recover`` leaves on the device, to see what a fault does to them."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

import trio_accel as ta
from trio_accel.cli._run import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["ArrayReport", "Witnesses"]

# Of 16 MiB each.
_ARRAYS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("float32", (2048, 2048)),
    ("float64", (2097152,)),
    ("complex64", (1024, 2048)),
    ("int8", (256, 256, 256)),
)


@attrs.frozen(kw_only=True)
class ArrayReport:
    """An array, before the first fault and after the last one.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        nbytes: Its size in bytes.
        sha256_before: Hash of its elements before the first fault, copied to the host.
        sha256_after: The same at the end.
        lost_with: Generation that it was lost with, and it has been put again since; ``None`` if it is
            still the same array.
    """

    dtype: str
    shape: Sequence[int]
    nbytes: int
    sha256_before: str
    sha256_after: str
    lost_with: int | None

    @property
    def is_identical(self) -> bool:
        """Whether its elements are as they were."""
        return self.sha256_before == self.sha256_after


@attrs.define(kw_only=True, eq=False)
class Witnesses:
    """Arrays that no operation uses.

    Attributes:
        device: Where they are.
    """

    device: ta.Device
    _refs: list[ta.AccelRef] = attrs.field(factory=list[ta.AccelRef], init=False)
    _before: list[str] = attrs.field(factory=list[str], init=False)

    async def put(self) -> None:
        """Put them, and note what they hold."""
        for index in range(len(_ARRAYS)):
            ref = await self._put(index)
            self._refs.append(ref)
            self._before.append(await _hash(ref))

    async def compare(self) -> list[ArrayReport]:
        """See what they hold now; one that is lost is put again."""
        return [await self._compare(index) for index in range(len(_ARRAYS))]

    def release(self) -> None:
        """Give their memory back."""
        for ref in self._refs:
            ref.release()
        self._refs.clear()

    async def _compare(self, index: int) -> ArrayReport:
        ref, lost_with = self._refs[index], None
        try:
            after = await _hash(ref)
        except ta.StaleRefError:
            lost_with = ref.generation
            self._refs[index] = ref = await self._put(index)
            after = await _hash(ref)
        dtype, shape = _ARRAYS[index]
        return ArrayReport(
            dtype=dtype,
            shape=shape,
            nbytes=ref.nbytes,
            sha256_before=self._before[index],
            sha256_after=after,
            lost_with=lost_with,
        )

    async def _put(self, index: int) -> ta.AccelRef:
        return await self.device.put(await in_thread(_elements, index))


def _elements(index: int) -> NDArray[Any]:
    """Random bytes, the same each time: any pattern of bits must come through. Blocking."""
    name, shape = _ARRAYS[index]
    dtype = np.dtype(name)
    content = np.random.default_rng(index).bytes(math.prod(shape) * dtype.itemsize)
    elements: NDArray[Any] = np.frombuffer(content, dtype)
    return elements.reshape(shape)


async def _hash(ref: ta.AccelRef) -> str:
    return await in_thread(_sha256, await ref.to_host())


def _sha256(host: NDArray[Any]) -> str:
    return hashlib.sha256(host.data).hexdigest()
