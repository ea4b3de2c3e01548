"""The load of ``demo recover``: clients that ask, the fates of their requests, and arrays beside them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import attrs
import numpy as np
import trio
from numpy.typing import NDArray

import trio_accel as ta
from trio_accel.cli._board import relative_error, worst_of
from trio_accel.cli._run import in_thread

__all__ = ["ArrayReport", "Fate", "Load", "Products", "Witnesses", "worst_error"]

# Of one float32 product and sum; it grows with the root of the number of terms.
TOLERANCE = 1e-5
# Of 16 MiB each.
_ARRAYS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("float32", (2048, 2048)),
    ("float64", (2097152,)),
    ("complex64", (1024, 2048)),
    ("int8", (256, 256, 256)),
)


@attrs.frozen(kw_only=True)
class Fate:
    """The fate of one request.

    Attributes:
        client: Number of the client that asked, from 1.
        request: Number of the client's request, from 1.
        begun: When it was asked, in seconds of Trio's clock from the start of the load.
        ended: When its fate was known.
        after: The fault injected last at that time, ``None`` before the first.
        generation: Generation of the device at that time.
        outcome: ``"completed"`` or the class of the error that the asker got.
        cause: The error and what caused it, ``None`` for a completed request.
        error: Relative error against NumPy in float64, ``None`` if there was no result.
    """

    client: int
    request: int
    begun: float
    ended: float
    after: str | None
    generation: int
    outcome: str
    cause: str | None
    error: float | None

    @property
    def is_completed(self) -> bool:
        """Whether the asker got a product, right or wrong."""
        return self.cause is None


@attrs.frozen(kw_only=True)
class Products:
    """The products to ask for: left operands on the host, one right operand on the device.

    Attributes:
        lefts: Left operands, float32.
        right: Right operand of all.
        references: The products in float64.
    """

    lefts: NDArray[np.float32] = attrs.field(eq=False)
    right: NDArray[np.float32] = attrs.field(eq=False)
    references: NDArray[np.float64] = attrs.field(eq=False)

    @classmethod
    def random(cls, number: int, size: int) -> Products:
        """Make as many of square operands. Blocking."""
        generator = np.random.default_rng(20250101)
        lefts = generator.standard_normal((number, size, size), np.float32)
        right = generator.standard_normal((size, size), np.float32)
        references = lefts.astype(np.float64) @ right.astype(np.float64)
        return cls(lefts=lefts, right=right, references=references)

    @property
    def limit(self) -> float:
        """The largest relative error that is right."""
        return TOLERANCE * math.sqrt(self.right.shape[0])


@attrs.define(kw_only=True, eq=False)
class Load:
    """Clients that ask all the time, several requests each.

    Attributes:
        device: The device that they ask.
        products: The products that they ask for.
        clients: Clients that ask at once.
        in_flight: Requests that a client has under way at once.
        after: Name of the fault injected last; it goes into the fates.
        asked: Requests so far.
        fates: Those that have ended, in the order of their ends.
    """

    device: ta.Device
    products: Products
    clients: int
    in_flight: int
    after: str | None = attrs.field(default=None, init=False)
    asked: int = attrs.field(default=0, init=False)
    fates: list[Fate] = attrs.field(factory=list[Fate], init=False)
    _right: ta.AccelRef = attrs.field(init=False)
    _renewing: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _start: float = attrs.field(factory=trio.current_time, init=False)
    _lost: ta.DeviceLostError | None = attrs.field(default=None, init=False)
    _is_over: bool = attrs.field(default=False, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def start(self, nursery: trio.Nursery) -> None:
        """Put the right operand; then the clients ask, as tasks of ``nursery``, until they are stopped."""
        self._right = await self.device.put(self.products.right)
        # The first product starts the library's actor, so that the tree shows it before anything fails.
        (await ta.linalg.matmul(self.products.lefts[0], self._right)).release()
        for client in range(1, self.clients + 1):
            numbers = count(1)
            for _ in range(self.in_flight):
                nursery.start_soon(self._ask_on, client, numbers)

    def stop(self) -> None:
        """Ask for nothing new; what is under way ends by itself."""
        self._is_over = True

    async def wait_settled(self, more: int) -> None:
        """Wait until so many more requests have their fates.

        Raises:
            DeviceLostError: The device was given up.
        """
        wanted = len(self.fates) + more
        while len(self.fates) < wanted:
            await self.wait_change()

    async def wait_change(self) -> None:
        """Wait until another request has its fate.

        Raises:
            DeviceLostError: That is its fate.
        """
        await self._changed.wait()
        if self._lost is not None:
            raise self._lost

    async def _ask_on(self, client: int, numbers: Iterator[int]) -> None:
        while not self._is_over:
            await self._ask(client, next(numbers))

    async def _ask(self, client: int, request: int) -> None:
        self.asked += 1
        begun, right = self._now(), self._right
        index = (client + request) % len(self.products.lefts)
        failure: Exception | None = None
        error: float | None = None
        try:
            product = await ta.linalg.matmul(self.products.lefts[index], right)
            host = await product.to_host()
            product.release()
            error = relative_error(host, self.products.references[index])
        except (ta.ActorError, ta.AccelError) as caught:
            failure = caught
            if isinstance(failure, ta.DeviceLostError):
                self._lost, self._is_over = failure, True
        fate = Fate(
            client=client,
            request=request,
            begun=begun,
            ended=self._now(),
            after=self.after,
            generation=self.device.generation,
            outcome="completed" if failure is None else type(failure).__name__,
            cause=None if failure is None else _describe(failure),
            error=error,
        )
        self.fates.append(fate)
        changed, self._changed = self._changed, trio.Event()
        changed.set()
        if isinstance(failure, ta.StaleRefError):
            await self._renew(right)

    async def _renew(self, stale: ta.AccelRef) -> None:
        """Put the right operand again if it is the one that was lost; a product that was lost is not."""
        async with self._renewing:
            if self._right is not stale:
                return
            # An error here comes again with the next request.
            with suppress(ta.AccelError, ta.ActorError):
                try:
                    await stale.to_host()
                except ta.StaleRefError:
                    self._right = await self.device.put(self.products.right)

    def _now(self) -> float:
        return trio.current_time() - self._start


def worst_error(fates: Sequence[Fate]) -> float:
    """Return the largest error of the completed requests; NaN if one is NaN, or none was completed."""
    return worst_of([math.nan if fate.error is None else fate.error for fate in fates if fate.is_completed])


def _describe(failure: Exception) -> str:
    cause = failure.__cause__
    text = f"{type(failure).__name__}: {failure}"
    return text if cause is None else f"{text}; from {type(cause).__name__}: {cause}"


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
    host = await ref.to_host()
    return await in_thread(lambda: hashlib.sha256(host.data).hexdigest())
