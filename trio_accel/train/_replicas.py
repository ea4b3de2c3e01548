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

from .. import arrays, nn
from ..backends.base import NotSupportedError
from ..collectives import World
from ..devices import AccelRef, run_together
from ..gradients import value_and_grad
from ..programs import Program, open_program
from ._config import LEAST_SCALE, Config
from ._layout import Batch, Layout, Work
from ._mesh import Mesh
from ._module import Beginning, Module, Told

__all__ = ["CallModule"]

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

    It runs in the application, so it may be a class of any place. Each step makes new arrays.
    """

    @abstractmethod
    def initial(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the parameters of the beginning, as arrays of the host by name."""

    @abstractmethod
    def loss(self, parameters: Mapping[str, Any], batch: Mapping[str, AccelRef]) -> Any:
        """Return the mean loss of some samples: a call whose result has no axes."""


class CallReplicas(Replicas[CallModule]):
    """Models of own operations."""

    async def begin(self, mesh: Mesh) -> dict[str, dict[str, Any]]:
        if mesh.data != mesh.size:
            raise NotSupportedError("a CallModule has the whole model on each rank; use a train.Module")
        self._model = self._module(**self._options)
        initial = self._model.initial(np.random.default_rng(self._config.seed))
        return {"parameters": dict(initial), "buffers": {}}

    async def open(self) -> None:
        self._next = self.states

    async def compute(self, works: Sequence[Work]) -> Told:
        config, size = self._config, self._world.size
        with trio.fail_after(math.inf if config.timeout is None else config.timeout):
            made = await self._on_each(lambda rank: self._gradient(rank, works[rank]))
            totals = [total for _, total in made]
            if self.is_apart:
                totals = await self._world.reduce_scatter(totals)
            elif size > 1:
                totals = await self._world.all_reduce(totals)
            squares = await self._on_each(lambda rank: self._squares(totals[rank]))
            # Without shares of the optimizer, all ranks have the same sum.
            total = sum(squares) if self.is_apart else squares[0]
            norm, factor = works[0].clipped(total, config.clip_norm)
            self._next = await self._on_each(
                lambda rank: self._changed(rank, totals[rank], factor, works[rank])
            )
            if self.is_apart:
                parts = [state["parameters"][self.own(rank)] for rank, state in enumerate(self._next)]
                for state, whole in zip(self._next, await self._world.all_gather(parts), strict=True):
                    state["parameters"] = whole
        return {"loss": sum(loss for loss, _ in made), "norm": norm}

    def commit(self) -> None:
        self.states = self._next

    async def _squares(self, total: AccelRef) -> float:
        wide = await total.cast(self._config.precision.master)
        return float(await (await arrays.sum(wide * wide)).to_host())

    async def _changed(self, rank: int, gradient: AccelRef, factor: float, work: Work) -> dict[str, AccelRef]:
        """Return the state of a rank after the optimizer's step; that of before stays."""
        new = {name: await array.copy() for name, array in self.states[rank].items()}
        # float16 holds neither the reciprocal of a small scale, nor a small gradient without its scale.
        wide = await (gradient.cast(self._config.precision.master) * factor)
        await self._optimize(new, new["parameters"][self.own(rank)], wide, work)
        return new

    async def _gradient(self, rank: int, work: Work) -> tuple[float, AccelRef]:
        """Compute a rank's part of the loss, and the flat gradient of that."""
        config, layout, device = self._config, self.layouts[rank]["parameters"], self._world.devices[rank]
        flat = await self.states[rank]["parameters"].cast(config.precision.compute)
        views, total, loss = layout.views(flat), None, 0.0
        end = await device.zeros(layout.padded - layout.size, flat.dtype)
        for part, factor in work.parts(work.batch, config.accumulate):
            samples = {name: await device.put(array) for name, array in part.items()}
            # In the backward pass a small gradient of float16 is kept by its scale, as far as float16 has it.
            within = min(max(factor * work.scale, LEAST_SCALE), _LARGEST_WITHIN)
            value, slopes = await value_and_grad(self._model.loss, scale=within)(views, samples)
            loss += factor * float(await value.to_host())
            joined = arrays.concat([*[slopes[name] for name in layout.names], end], axis=None)
            scaled = joined * (factor * work.scale / within)
            total = await (scaled if total is None else total + scaled)
        assert total is not None  # there is one part at least
        return loss, await total.cast(config.precision.reduce or config.precision.compute)

    async def _optimize(
        self, new: Mapping[str, AccelRef], param: AccelRef, gradient: AccelRef, work: Work
    ) -> None:
        optimizer = self._config.optimizer
        numbers = optimizer.numbers
        common: dict[str, Any] = {"lr": work.rate, "weight_decay": numbers["weight_decay"]}
        if optimizer.kind == "adamw":
            betas = numbers["beta1"], numbers["beta2"]
            states = new["exp_avg"], new["exp_avg_sq"]
            await nn.adamw(param, gradient, *states, work.number, betas=betas, eps=numbers["eps"], **common)
        else:
            buffer = new.get("momentum_buffer")
            await nn.sgd(param, gradient, buffer, momentum=numbers["momentum"], **common)
