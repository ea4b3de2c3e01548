"""What the clients of the soak ask for, and the numbers that they must get."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import scipy.fft
import scipy.sparse
import trio

import trio_accel as ta
from trio_accel.collectives import World
from trio_accel.patterns import Batcher, FairScheduler, FairSubmit, ReplicaPool, Submit, stacked
from trio_accel.programs import Array, Program

from ._soak_lives import Bank, Texts

__all__ = ["Kept", "Model", "Service", "WrongNumbersError", "all_work", "open_service"]

_WIDTH = 24
Numbers = npt.NDArray[np.float64]
Operand = ta.AccelRef | npt.NDArray[Any]
Work = Callable[[np.random.Generator], Awaitable[None]]


class WrongNumbersError(AssertionError):
    """A request was answered with other numbers than NumPy's."""


class Model:
    """A program of the user: its weights are read by one method and written by another."""

    def __init__(self, weights: Array, counts: Array) -> None:
        self.weights, self.counts = weights, counts

    @ta.programs.method(out=lambda x: (x.shape, "float64"))
    def apply(self, x: Array) -> Array:
        """Return x @ weights."""
        return x @ self.weights

    @ta.programs.method(updates=["self.counts"])
    def count(self) -> None:
        """Add one to all counts, in place."""
        self.counts += 1.0


@attrs.define(eq=False)
class Kept:
    """An array that lies on a device all the time, and its numbers."""

    ref: ta.AccelRef
    host: Numbers

    async def check(self) -> None:
        """Compare them bit for bit.

        Raises:
            WrongNumbersError: They differ.
        """
        _same("an array that was kept", await self.ref.to_host(), self.host)


@attrs.define(eq=False)
class Service:
    """Two devices and all that is open on them.

    Attributes:
        first: The device whose workers are killed.
        second: Its neighbour.
        world: Both as ranks.
        program: `Model` on the first device.
        graph: A captured chain of three operations.
        batcher: Batches of products on the first device.
        scheduler: Fair shares of the batcher.
        pool: Products on either device.
        kept: Arrays that must be the same at the end.
        sparse: A sparse matrix of the first device, and the same numbers with all zeros.
        counts: The state that `Model.count` writes to.
        texts: Texts that are streamed.
        bank: Accounts of a cluster.
    """

    first: ta.Device
    second: ta.Device
    world: World
    program: Program[Model]
    graph: ta.graphs.Graph[ta.AccelRef]
    batcher: ta.Ref[Batcher[Any, Any]]
    scheduler: ta.Ref[FairScheduler[Any, Any]]
    pool: ta.Ref[ReplicaPool[Numbers, Numbers]]
    kept: Sequence[Kept]
    sparse: tuple[ta.sparse.CsrMatrix, Numbers]
    counts: ta.AccelRef
    texts: Texts
    bank: Bank
    updating: trio.Lock = attrs.field(factory=trio.Lock)


async def open_service(
    system: ta.System,
    devices: Sequence[ta.Device],
    world: World,
    program: Program[Model],
    counts: ta.AccelRef,
    texts: Texts,
    bank: Bank,
) -> Service:
    """Put the arrays, capture the graph and start the patterns.

    Args:
        system: The system in which the patterns live.
        devices: Both devices.
        world: Both as ranks.
        program: `Model` on the first.
        counts: Its second array.
        texts: Texts on the first.
        bank: Accounts of a cluster.
    """
    await texts.open_in(system)
    first, second = devices
    rng = np.random.default_rng(1)
    hosts = [_whole(rng, (_WIDTH, _WIDTH)) for _ in range(4)]
    kept = [Kept(await device.put(host), host) for device in devices for host in hosts]
    dense = np.where(rng.random((200, 200)) < 0.03, rng.random((200, 200)), 0.0)

    async def chain(x: ta.AccelRef) -> ta.AccelRef:
        hidden = await ta.linalg.matmul(x, kept[0].ref)
        return await ta.linalg.matmul(await ta.arrays.add(hidden, 1.0), kept[1].ref)

    def product(device: ta.Device, weights: ta.AccelRef) -> Callable[[Numbers], Awaitable[Numbers]]:
        async def model(x: Numbers) -> Numbers:
            return await (await ta.linalg.matmul(await device.put(x), weights)).to_host()

        return model

    async def rows(x: ta.AccelRef) -> ta.AccelRef:
        return await ta.linalg.matmul(x, kept[0].ref)

    batcher = await system.spawn(
        Batcher, stacked(rows, first, to_host=True), max_size=8, max_wait=0.001, name="batcher"
    )
    pool = {
        name: product(device, kept[at].ref)
        for name, device, at in (("first", first, 0), ("second", second, len(hosts)))
    }
    return Service(
        first=first,
        second=second,
        world=world,
        program=program,
        graph=await ta.graphs.capture(first, chain, kept[2].ref),
        batcher=batcher,
        scheduler=await system.spawn(FairScheduler, batcher, max_in_flight=8, name="scheduler"),
        pool=await system.spawn(ReplicaPool, pool, name="pool"),
        kept=kept,
        sparse=(await ta.sparse.csr(first, scipy.sparse.csr_array(dense)), dense),
        counts=counts,
        texts=texts,
        bank=bank,
    )


def all_work(service: Service) -> dict[str, Work]:
    """Functions by name, each of which asks for something and checks what comes."""
    kinds = (_linear, _solve, _transform, _vocabulary, _expression, _networks, _sparse, _draws)
    shared = (
        _graph,
        _program,
        _update,
        _in_place,
        _patterns,
        _neighbour,
        _collective,
        _refused,
        _text,
        _addition,
    )
    return {kind.__name__.removeprefix("_"): partial(kind, service) for kind in (*kinds, *shared)}


async def _linear(service: Service, rng: np.random.Generator) -> None:
    a, b = _whole(rng, (_WIDTH, _WIDTH)), _whole(rng, (_WIDTH, 5))
    there = await service.first.put(a)
    _same("matmul", await (await ta.linalg.matmul(there, b)).to_host(), a @ b)


async def _solve(service: Service, rng: np.random.Generator) -> None:
    a, b = rng.random((8, 8)) + 8.0 * np.eye(8), rng.random(8)
    _near(
        "solve", await (await ta.linalg.solve(await service.first.put(a), b)).to_host(), np.linalg.solve(a, b)
    )


async def _transform(service: Service, rng: np.random.Generator) -> None:
    x = rng.random(int(rng.integers(3, 300)))
    spectrum = await ta.fft.rfft(await service.first.put(x))
    _near("rfft", await spectrum.to_host(), scipy.fft.rfft(x))
    _near("irfft", await (await ta.fft.irfft(spectrum, x.size)).to_host(), x)


async def _vocabulary(service: Service, rng: np.random.Generator) -> None:
    x = rng.integers(-50, 50, (7, 11)).astype(np.float64)
    there = await service.first.put(x)
    _same("sort", await (await ta.arrays.sort(there, axis=1)).to_host(), np.sort(x, axis=1))
    _same("sum", await (await ta.arrays.sum(there, axis=0)).to_host(), x.sum(axis=0))
    _same("unique", await (await ta.arrays.unique_values(there)).to_host(), np.unique(x))
    _same("view", await there[1::2, ::-1].to_host(), x[1::2, ::-1])


_SHIFTED = ta.jit.elementwise("r = where(x > 0, 2 * x + y, y - x)")


async def _expression(service: Service, rng: np.random.Generator) -> None:
    x, y = _whole(rng, (50,)), _whole(rng, (50,))
    got = await (await _SHIFTED(await service.first.put(x), y)).to_host()
    _same("expression", got, np.where(x > 0, 2 * x + y, y - x))


async def _networks(service: Service, rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 20))
    shares = np.exp(x - x.max(axis=1, keepdims=True))
    got = await (await ta.arrays.softmax(await service.first.put(x), axis=1)).to_host()
    _near("softmax", got, shares / shares.sum(axis=1, keepdims=True))


async def _sparse(service: Service, rng: np.random.Generator) -> None:
    matrix, host = service.sparse
    x = rng.random(200)
    _near("spmv", await (await ta.sparse.spmv(matrix, x)).to_host(), host @ x)


async def _draws(service: Service, rng: np.random.Generator) -> None:
    """Draws of one seed have the same bits on both devices."""
    seed = int(rng.integers(2**32))
    both = [
        await (await ta.random.Generator(device, seed=seed).uniform((40,))).to_host()
        for device in (service.first, service.second)
    ]
    _same("draws", both[0], both[1])


async def _graph(service: Service, rng: np.random.Generator) -> None:
    x = _whole(rng, (_WIDTH, _WIDTH))
    wanted = (x @ service.kept[0].host + 1.0) @ service.kept[1].host
    _same("graph", await (await service.graph(x)).to_host(), wanted)


async def _program(service: Service, rng: np.random.Generator) -> None:
    x = _whole(rng, (3, _WIDTH))
    made: ta.AccelRef = await service.program.ask(Model.apply, x)
    _same("program", await made.to_host(), x @ service.kept[0].host)


async def _update(service: Service, rng: np.random.Generator) -> None:
    """An update of the state counts once or damages it; a write of the whole state heals it."""
    async with service.updating:
        await service.counts.assign(np.zeros(4))
        await service.program.ask(Model.count)
        _same("state", await service.counts.to_host(), np.ones(4))


async def _in_place(service: Service, rng: np.random.Generator) -> None:
    x, y = _whole(rng, (2, 30))
    there = await service.first.put(x)
    await ta.linalg.axpy(2.0, y, there)
    _same("axpy", await there.to_host(), x + 2.0 * y)
    await ta.arrays.negative(y, out=there)
    _same("out=", await there.to_host(), -y)


async def _patterns(service: Service, rng: np.random.Generator) -> None:
    x = _whole(rng, (_WIDTH,))
    wanted = x @ service.kept[0].host
    tenant = f"tenant {rng.integers(5)}"
    _same("scheduler", await service.scheduler.ask(FairSubmit(x, tenant=tenant)), wanted)
    _same("pool", await service.pool.ask(Submit(x[None])), wanted[None])


async def _neighbour(service: Service, rng: np.random.Generator) -> None:
    kept = service.kept[int(rng.integers(4))]
    async with service.second.borrow(kept.ref) as borrowed:
        _same("borrowed", await (await ta.arrays.sum(borrowed, axis=0)).to_host(), kept.host.sum(axis=0))
    _same("copied", await (await kept.ref.copy_to(service.second)).to_host(), kept.host)


async def _collective(service: Service, rng: np.random.Generator) -> None:
    hosts = _whole(rng, (2, 60))
    refs = [await service.first.put(hosts[0]), await service.second.put(hosts[1])]
    for made in await service.world.all_reduce(refs):
        _same("all_reduce", await made.to_host(), hosts.sum(axis=0))


async def _refused(service: Service, rng: np.random.Generator) -> None:
    """What cannot be is refused in the task that asks, and costs nobody anything."""
    try:
        await ta.linalg.matmul(service.kept[0].ref, np.ones(_WIDTH + 1))
    except ValueError:
        return
    raise WrongNumbersError("a product of shapes that do not fit was answered")


async def _text(service: Service, rng: np.random.Generator) -> None:
    made, wanted = await service.texts.read(rng)
    if made != wanted:
        raise WrongNumbersError(f"text: got {made}, not {wanted}")


async def _addition(service: Service, rng: np.random.Generator) -> None:
    await service.bank.add(rng)


def _whole(rng: np.random.Generator, shape: tuple[int, ...]) -> Numbers:
    """Small whole numbers, whose sums and products are exact."""
    return rng.integers(-8, 9, shape).astype(np.float64)


def _same(name: str, got: object, wanted: Numbers) -> None:
    if not np.array_equal(np.asarray(got), wanted):
        raise WrongNumbersError(f"{name}: got {got!r}, not {wanted!r}")


def _near(name: str, got: npt.NDArray[np.generic], wanted: npt.NDArray[np.generic]) -> None:
    if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=1e-10, atol=1e-10):
        raise WrongNumbersError(f"{name}: got {got!r}, not {wanted!r}")
