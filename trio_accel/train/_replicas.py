"""The model on each rank: a step is computed by all of them, and committed for all or for none."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, cast

import attrs
import numpy as np
import trio

from .. import arrays
from ..backends.base import DType, NotSupportedError
from ..collectives import World
from ..devices import AccelRef, Call, Function, called, gather, run_together
from ..gradients import flat_grad_and_value
from ..programs import Program, open_program
from ._config import LEAST_SCALE, Config
from ._layout import Batch, Layout, Work
from ._mesh import Mesh
from ._module import Beginning, Module, Told
from ._optimizers import changed

__all__ = ["CallModule"]

# The bytes of samples that go with a request. A chain takes 64 KiB, with gaps and with arrays of the model.
_MOST_SENT = 48 << 10
# The largest power of two of float16. A larger scale is multiplied behind the backward pass.
_LARGEST_WITHIN = 2.0**15

States: TypeAlias = "list[dict[str, AccelRef]]"
"""Flat arrays of each rank by name."""
T = TypeVar("T")
ModuleT = TypeVar("ModuleT")


class Replicas(ABC, Generic[ModuleT]):
    """The model on each rank.

    Args:
        world: The ranks.
        config: The configuration.
        module: The class of the model.
        options: Its options.

    Attributes:
        meshes: The place of each rank.
        layouts: How ``"parameters"`` and ``"buffers"`` of each rank lie in their flat arrays.
        states: The state that is committed.
    """

    def __init__(
        self, world: World, config: Config, module: type[ModuleT], options: Mapping[str, Any]
    ) -> None:
        self.meshes: list[Mesh] = config.parallel.meshes(world.size)
        self.layouts: list[Mapping[str, Layout]] = []
        self.states: States = []
        self._world = world
        self._config = config
        self._module = module
        self._options = options

    @property
    def is_apart(self) -> bool:
        """Whether each rank has its part of the optimizer's arrays alone."""
        return self._config.parallel.shard_optimizer and self.meshes[0].data > 1

    @abstractmethod
    async def begin(self, mesh: Mesh) -> dict[str, dict[str, Any]]:
        """Return parameters and buffers of a rank's beginning, as arrays of the host by name."""

    @abstractmethod
    async def open(self) -> None:
        """Make what computes, from `states`."""

    @abstractmethod
    async def compute(self, works: Sequence[Work]) -> Told:
        """Compute a step from `states`, which stay; returns the mean loss, and the norm of its gradient.

        Args:
            works: What ranks with other samples compute.
        """

    @abstractmethod
    def commit(self) -> None:
        """Let `states` be those of the step that was computed last."""

    async def place(self, rank: int, flat: Mapping[str, np.ndarray]) -> dict[str, AccelRef]:
        """Put flat arrays of the host on a rank, which gets its part of the optimizer's."""
        own, device = self.own(rank), self._world.devices[rank]
        return {
            name: await device.put(array if name in self.layouts[rank] else array[own])
            for name, array in flat.items()
        }

    def own(self, rank: int) -> slice:
        """Return the part of flat arrays of the optimizer that a rank has."""
        return self.layouts[rank]["parameters"].own(self.meshes[rank].data_rank)

    async def _on_each(self, work: Callable[[int], Awaitable[T]]) -> list[T]:
        """Do work for all ranks at once; returns what came of it, or raises the first error."""
        made: dict[int, T] = {}

        async def one(rank: int) -> None:
            made[rank] = await work(rank)

        await run_together(partial(one, rank) for rank in range(self._world.size))
        return [made[rank] for rank in range(self._world.size)]


class ProgramReplicas(Replicas[Module]):
    """Models that are programs; each has two copies of the state, of which a step reads one."""

    async def begin(self, mesh: Mesh) -> dict[str, dict[str, Any]]:
        module, device = self._module, self._world.devices[mesh.rank]
        path = f"{module.__module__}:{module.__qualname__}"
        given = path, self._config.seed, attrs.astuple(mesh), dict(self._options)
        async with open_program(device, Beginning, *given) as program:
            made: Any = await program.ask(Beginning.state)
        return {
            kind: {name: await array.to_host() for name, array in named.items()}
            for kind, named in made.items()
        }

    async def open(self) -> None:
        self._next: States = [
            {name: await array.copy() for name, array in state.items()} for state in self.states
        ]
        self._to_b = True
        # A loss may come when some of them are open: they stay.
        self._programs: dict[int, Program[Module]] = {}

    async def _open_programs(self, batch: Batch) -> None:
        """Make the models; a batch tells what kernels are warmed up with, also those of spare workers."""
        config, optimizer = self._config, self._config.optimizer
        plan: dict[str, Any] = {
            **attrs.asdict(config.parallel),
            **attrs.asdict(config.precision),
            "reduce": config.precision.reduce or config.precision.compute,
            "optimizer": optimizer.kind,
            "numbers": dict(optimizer.numbers),
            "states": [*optimizer.states],
            "shard": self.is_apart,
            "clip_norm": config.clip_norm,
            "accumulate": config.accumulate,
            "seed": config.seed,
            "sample": {name: [array.dtype.name, [*array.shape[1:]]] for name, array in batch.items()},
        }

        async def make(rank: int) -> None:
            if rank not in self._programs:
                state = self.states[rank], self._next[rank]
                device, options = self._world.devices[rank], dict(self._options)
                own = plan | {kind: attrs.astuple(layout) for kind, layout in self.layouts[rank].items()}
                own["mesh"] = attrs.astuple(self.meshes[rank])
                self._programs[rank] = await open_program(device, self._module, *state, own, options)

        await self._on_each(make)

    async def compute(self, works: Sequence[Work]) -> Told:
        if len(self._programs) < self._world.size:
            await self._open_programs(works[0].batch)
        told = await self._world.call(
            [self._programs[rank] for rank in range(self._world.size)],
            Module.step_to_b if self._to_b else Module.step_to_a,
            [
                attrs.asdict(works[mesh.data_rank], filter=attrs.filters.exclude("batch"))
                for mesh in self.meshes
            ],
            [works[mesh.data_rank].batch for mesh in self.meshes],
            within=self._config.timeout,
            groups=self.meshes[0].groups(),
        )
        return cast("Told", told[0])

    def commit(self) -> None:
        self.states, self._next = self._next, self.states
        self._to_b = not self._to_b


class CallModule(ABC):
    """A model of own operations: its loss composes calls, and `train.grad` finds the gradients.

    It runs in the application, so it may be a class of any place. Each step makes new arrays, by three
    requests of each rank.
    """

    @abstractmethod
    def initial(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the parameters of the beginning, as arrays of the host by name."""

    @abstractmethod
    def loss(self, parameters: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        """Return the mean loss of some samples: a call whose result has no axes.

        Args:
            parameters: Calls of the parameters, by name.
            batch: The samples by name: arrays on the device, or calls that send them with the request.
        """


class CallReplicas(Replicas[CallModule]):
    """Models of own operations: a step is three requests of each rank (D218)."""

    async def begin(self, mesh: Mesh) -> dict[str, dict[str, Any]]:
        if mesh.data != mesh.size:
            raise NotSupportedError("a CallModule has the whole model on each rank; use a train.Module")
        self._model = self._module(**self._options)
        initial = self._model.initial(np.random.default_rng(self._config.seed))
        return {"parameters": dict(initial), "buffers": {}}

    async def open(self) -> None:
        self._next = self.states

    async def compute(self, works: Sequence[Work]) -> Told:
        config, size, clip = self._config, self._world.size, self._config.clip_norm
        with trio.fail_after(math.inf if config.timeout is None else config.timeout):
            made = await self._on_each(lambda rank: self._gradient(rank, works[rank]))
            totals = [total for _, total in made]
            if self.is_apart:
                totals = await self._world.reduce_scatter(totals)
            elif size > 1:
                totals = await self._world.all_reduce(totals)
            factor, squares = 1.0 / works[0].scale, list[Any]()
            if clip is not None:
                squares = await self._on_each(lambda rank: self._squares(totals[rank]).to_host())
                _, factor = works[0].clipped(self._sum(squares), clip)
            changed = await self._on_each(lambda rank: self._changed(rank, totals[rank], factor, works[rank]))
            # If nothing is clipped, the norm comes with the new state.
            norm, _ = works[0].clipped(self._sum(squares or [one for _, one in changed]), clip)
            self._next = [state for state, _ in changed]
            if self.is_apart:
                wholes = await self._world.all_gather([state["parameters"] for state in self._next])
                for state, whole in zip(self._next, wholes, strict=True):
                    state["parameters"] = whole
        return {"loss": sum(loss for loss, _ in made), "norm": norm}

    def commit(self) -> None:
        self.states = self._next

    def _sum(self, squares: Sequence[Any]) -> float:
        """Return the sum of the squares of the gradient by those of the ranks."""
        # Without shares of the optimizer, all ranks have the same sum.
        return float(sum(map(float, squares))) if self.is_apart else float(squares[0])

    async def _gradient(self, rank: int, work: Work) -> tuple[float, AccelRef]:
        """Compute a rank's part of the loss, and the flat gradient of that: a request for each part."""
        config, layout, state = (
            self._config,
            self.layouts[rank]["parameters"],
            self.states[rank]["parameters"],
        )
        precision, loss = config.precision, 0.0
        made: AccelRef | None = None
        end = np.zeros(layout.padded - layout.size, DType.of(precision.compute).dtype)
        for number, (part, factor) in enumerate(work.parts(work.batch, config.accumulate), 1):
            samples = await self._samples(part, state)
            # In the backward pass a small gradient of float16 is kept by its scale, as far as float16 has it.
            within = min(max(factor * work.scale, LEAST_SCALE), _LARGEST_WITHIN)
            views = layout.views(_as_dtype(state, precision.compute))
            both = flat_grad_and_value(self._model.loss, scale=within)(views, samples)
            value, slopes = both[-1], both[:-1]
            if end.size:
                slopes = arrays.concat([slopes, end], axis=None)
            if factor * work.scale != within:
                slopes = slopes * (factor * work.scale / within)
            total = slopes if made is None else made + slopes
            if number == config.accumulate and precision.reduce not in (None, precision.compute):
                total = total.cast(precision.reduce)
            made, told = await gather(total, value.to_host())
            loss += factor * float(told)
        assert made is not None  # there is one part at least
        return loss, made

    async def _samples(self, part: Batch, near: AccelRef) -> dict[str, Any]:
        """Return samples as arrays on a device: calls that send them with a request, if they are small."""
        hosts = [array for array in part.values() if type(array) is np.ndarray]
        is_sent = sum(host.nbytes for host in hosts) <= _MOST_SENT
        return {
            name: _SAMPLES(array, near)
            if is_sent and type(array) is np.ndarray
            else await near.device.put(array)
            for name, array in part.items()
        }

    def _squares(self, total: AccelRef) -> Call[AccelRef]:
        wide = _as_dtype(total, self._config.precision.master)
        return arrays.sum(wide * wide)

    async def _changed(
        self, rank: int, total: AccelRef, factor: float, work: Work
    ) -> tuple[dict[str, AccelRef], Any]:
        """Compute the state of a rank after the optimizer's step; the committed one stays.

        Returns:
            The state, and the sum of the squares of the gradient if that is not known yet.
        """
        precision, optimizer, state = self._config.precision, self._config.optimizer, self.states[rank]
        # float16 holds neither the reciprocal of a small scale, nor a small gradient without its scale.
        wide = _as_dtype(total, precision.master)
        param = state["parameters"]
        own = {"parameters": param[self.own(rank)] if self.is_apart else param}
        own |= {name: state[name] for name in optimizer.states}
        step = changed(optimizer, own, wide * factor if factor != 1.0 else wide, work, precision.master)
        if self._config.clip_norm is not None:
            after, squares = await step, None
        else:
            after, squares = await gather(step, self._squares(total).to_host())
        return dict(zip(own, after, strict=True)), squares


async def _placed(host: Any, near: AccelRef) -> AccelRef:
    # In a chain, an array on the device stands for it.
    return host if isinstance(host, AccelRef) else await near.device.put(host)


# The samples that a request takes with it are arrays on the device for the model.
_SAMPLES = called(Function("train.samples", _placed, "awaitable", takes_hosts=True))


def _as_dtype(array: Any, dtype: str) -> Any:
    return array if array.dtype == dtype else array.cast(dtype)
