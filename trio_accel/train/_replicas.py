"""The model on each rank: all ranks compute a step, and commit it together or not at all."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import attrs
import numpy as np
import trio

from .. import arrays
from ..backends.base import DType, NotSupportedError
from ..collectives import World
from ..devices import AccelRef, ArrayFunction, Call, called, gather, run_together
from ..programs import Program, open_program
from ._config import AVERAGE, LEAST_SCALE, Config
from ._groups import GroupPart, chosen, decays_of, parts_of
from ._layout import Batch, FlatLayout, Work, checksum_of
from ._mesh import Mesh
from ._module import Beginning, Metrics, Module, check_base
from ._optimizers import SHAPED
from ._updates import changed, shaped_beginning

__all__ = ["CallModule"]

# The maximum bytes of samples in a request. A chain takes 64 KiB, with gaps and the model's arrays.
_MOST_SENT = 48 << 10
# The largest power of two in float16. A larger scale is applied after the backward pass.
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
        options: The options of the model.

    Attributes:
        meshes: The coordinates of each rank.
        layouts: How ``"parameters"`` and ``"buffers"`` of each rank lie in their flat arrays.
        states: The committed state.
        base: The checksums of the frozen parameters.
        frozen: The parameters of frozen groups, as host arrays by name, for each part of the model.
        entries: The source of each `state_dict` entry, for each part of the model; see `Module.entries`.
        takes_cuda: Whether batches may have arrays of other libraries in CUDA memory.
    """

    takes_cuda: ClassVar[bool] = False

    def __init__(
        self, world: World, config: Config, module: type[ModuleT], options: Mapping[str, Any]
    ) -> None:
        self.meshes: list[Mesh] = config.parallel.meshes(world.size)
        self.layouts: list[Mapping[str, FlatLayout]] = []
        self.states: States = []
        self.base: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._parts: dict[int, list[GroupPart]] = {}
        self.frozen: dict[int, dict[str, Any]] = {}
        self.entries: dict[int, dict[str, list[str]]] = {}
        self._world = world
        self._config = config
        self._module = module
        self._options = options

    @property
    def is_apart(self) -> bool:
        """Whether each rank has only its part of the optimizer's arrays."""
        return self._config.parallel.shard_optimizer and self.meshes[0].data > 1

    async def begin_all(self) -> dict[int, dict[str, dict[str, Any]]]:
        """Return the initial state of each part of the model, as host arrays by name.

        Raises:
            ValueError: A group matches no parameter or overlaps with another, or no parameter is trained.
        """
        groups, optimizer = self._config.groups, self._config.optimizer
        if optimizer.has_shapes and self.is_apart:
            raise NotSupportedError(
                f"{optimizer.kind} depends on shapes, so shard_optimizer is not supported"
            )
        beginnings: dict[int, dict[str, dict[str, Any]]] = {}
        for mesh in self.meshes:
            if mesh.cell not in beginnings:
                beginnings[mesh.cell] = await self.begin(mesh)
        names = [name for named in beginnings.values() for name in named["parameters"]]
        self._groups = chosen(groups, dict.fromkeys(names))
        is_frozen = [False, *(group.is_frozen for group in groups)]
        for cell, named in beginnings.items():
            parameters = named["parameters"]
            # Parameters of a group are adjacent.
            order = sorted(parameters, key=self._groups.__getitem__)
            fixed = {name: parameters[name] for name in order if is_frozen[self._groups[name]]}
            self.frozen[cell] = fixed
            self.base |= {f"{cell} {name}": checksum_of(name, array) for name, array in fixed.items()}
            named["parameters"] = {name: parameters[name] for name in order if name not in fixed}
            if not named["parameters"]:
                raise ValueError("every parameter of the model is frozen")
            shaped = named.get(SHAPED, {}).items()
            named[SHAPED] = {name: array for name, array in shaped if name.rpartition("/")[0] not in fixed}
        return beginnings

    def parts(self, rank: int) -> list[GroupPart]:
        """Return the parameter groups of a rank, cached because layouts stay the same."""
        if rank not in self._parts:
            self._parts[rank] = parts_of(self.layouts[rank]["parameters"], self._groups)
        return self._parts[rank]

    @abstractmethod
    async def begin(self, mesh: Mesh) -> dict[str, dict[str, Any]]:
        """Return the initial parameters and buffers of a rank, as host arrays by name.

        They include the state of an optimizer that needs shapes.
        """

    async def model_frozen(self, mesh: Mesh) -> dict[str, Any]:
        """Return the parameters that the model of a rank has frozen itself, as host arrays by name.

        Raises:
            ValueError: The model makes other numbers than at the beginning.
        """
        raise NotImplementedError

    @abstractmethod
    async def evaluate(self, name: str, shares: Sequence[Batch]) -> list[Metrics]:
        """Return the metrics of sample shares, one share for each data rank; some may be empty.

        Args:
            name: Which parameters: ``"parameters"`` or ``"average"``.
            shares: The samples.
        """

    @abstractmethod
    async def open(self) -> None:
        """Make the models, from `states`."""

    @abstractmethod
    async def compute(self, works: Sequence[Work]) -> Metrics:
        """Compute a step without changing `states`; return the mean loss, and the norm of its gradient.

        Args:
            works: The work of each data rank.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make the state of the last computed step the committed one."""

    async def put_state(self, rank: int, flat: Mapping[str, np.ndarray]) -> dict[str, AccelRef]:
        """Put flat host arrays on a rank, with the rank's part of the optimizer's arrays."""
        span, device = self.rank_slice(rank), self._world.devices[rank]
        return {
            name: await device.put(array if name in self.layouts[rank] else array[span])
            for name, array in flat.items()
        }

    def rank_slice(self, rank: int) -> slice:
        """Return a rank's slice of the optimizer's flat arrays."""
        return self.layouts[rank]["parameters"].rank_slice(self.meshes[rank].data_rank)

    async def _on_each(self, work: Callable[[int], Awaitable[T]]) -> list[T]:
        """Do work for all ranks at once; return the results, or raise the first error."""
        results: dict[int, T] = {}

        async def run_rank(rank: int) -> None:
            results[rank] = await work(rank)

        await run_together(partial(run_rank, rank) for rank in range(self._world.size))
        return [results[rank] for rank in range(self._world.size)]


class ProgramReplicas(Replicas[Module]):
    """Models as programs, with two copies of the state; a step reads one and writes the other."""

    def _beginning(self, mesh: Mesh, shaped: object) -> AbstractAsyncContextManager[Program[Beginning]]:
        module, device = self._module, self._world.devices[mesh.rank]
        path = f"{module.__module__}:{module.__qualname__}"
        args = path, self._config.seed, attrs.astuple(mesh), dict(self._options)
        return open_program(device, Beginning, *args, shaped)

    async def begin(self, mesh: Mesh) -> dict[str, dict[str, Any]]:
        optimizer, decays = self._config.optimizer, decays_of(self._config.optimizer, self._config.groups)
        shaped = (optimizer.kind, dict(optimizer.numbers), decays) if optimizer.has_shapes else None
        async with self._beginning(mesh, shaped) as program:
            state: Any = await program.ask(Beginning.state)
            base: Any = await program.ask(Beginning.base)
            entries: Any = await program.ask(Beginning.entries)
        self.entries[mesh.cell] = entries
        self.base |= {f"{mesh.cell} {name}": checksum for name, checksum in base.items()}
        return {
            kind: {name: await array.to_host() for name, array in named.items()}
            for kind, named in state.items()
        }

    async def model_frozen(self, mesh: Mesh) -> dict[str, Any]:
        async with self._beginning(mesh, None) as program:
            named: Any = await program.ask(Beginning.frozen)
        arrays = {name: await array.to_host() for name, array in named.items()}
        check_base(arrays, {name: self.base[f"{mesh.cell} {name}"] for name in arrays})
        return arrays

    async def open(self) -> None:
        self._next: States = [
            {name: await array.copy() for name, array in state.items()} for state in self.states
        ]
        self._to_b = True
        # After a loss during the opening, programs stay open.
        self._programs: dict[int, Program[Module]] = {}

    async def _open_programs(self, batch: Batch) -> None:
        """Open the models; warm-ups, also of spare workers, use the shapes and dtypes of a batch."""
        config, optimizer = self._config, self._config.optimizer
        plan: dict[str, Any] = {
            **attrs.asdict(config.parallel),
            **attrs.asdict(config.precision),
            "reduce": config.precision.reduce or config.precision.compute,
            "optimizer": optimizer.kind,
            "numbers": dict(optimizer.numbers),
            "decays": decays_of(optimizer, config.groups),
            "states": [*config.states],
            "average": config.average,
            "recompute": [*config.recompute],
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
                layouts = {kind: attrs.astuple(layout) for kind, layout in self.layouts[rank].items()}
                rank_plan = plan | {kind: layouts[kind] for kind in ("parameters", "buffers")}
                rank_plan["shapes"] = layouts[SHAPED]
                rank_plan["parts"] = [attrs.astuple(part) for part in self.parts(rank)]
                cell = f"{self.meshes[rank].cell} "
                rank_plan["base"] = {
                    name.removeprefix(cell): checksum
                    for name, checksum in self.base.items()
                    if name.startswith(cell)
                }
                rank_plan["frozen"] = [*self.frozen[self.meshes[rank].cell]]
                rank_plan["mesh"] = attrs.astuple(self.meshes[rank])
                self._programs[rank] = await open_program(device, self._module, *state, rank_plan, options)

        await self._on_each(make)

    async def compute(self, works: Sequence[Work]) -> Metrics:
        if len(self._programs) < self._world.size:
            await self._open_programs(works[0].batch)
        metrics = await self._world.call(
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
        return cast("Metrics", metrics[0])

    async def evaluate(self, name: str, shares: Sequence[Batch]) -> list[Metrics]:
        if len(self._programs) < self._world.size:
            await self._open_programs(shares[0])
        metrics: Any = await self._world.call(
            [self._programs[rank] for rank in range(self._world.size)],
            Module.evaluate,
            [not self._to_b] * self._world.size,
            [name] * self._world.size,
            [shares[mesh.data_rank] for mesh in self.meshes],
            within=self._config.timeout,
            groups=self.meshes[0].groups(),
        )
        # The last stage has the metrics.
        ranks = {mesh.data_rank: mesh.rank for mesh in self.meshes if mesh.is_last}
        return [metrics[ranks[number]] for number in range(len(shares))]

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
        """Return the initial parameters, as host arrays by name."""

    @abstractmethod
    def loss(self, parameters: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        """Return the mean loss of some samples: a call with a 0-d result.

        Args:
            parameters: Calls of the parameters, by name.
            batch: The samples by name: arrays on the device, or calls that send them with the request.
        """

    def validate(self, parameters: Mapping[str, Any], batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return metrics of some samples by name: means over the samples, as calls with 0-d results.

        By default, the loss is the only metric. The arguments are the same as for `loss`.
        """
        return {"loss": self.loss(parameters, batch)}


class CallReplicas(Replicas[CallModule]):
    """Models of own operations: a step is three requests of each rank (D218)."""

    takes_cuda: ClassVar[bool] = True

    async def begin(self, mesh: Mesh) -> dict[str, dict[str, Any]]:
        if mesh.data != mesh.size:
            raise NotSupportedError("a CallModule has the whole model on each rank; use a train.Module")
        self._model = self._module(**self._options)
        if self._config.recompute:
            raise NotSupportedError(
                "recompute is for a train.Module; a CallModule keeps what its gradients need"
            )
        if self._config.optimizer.has_shapes and self._config.optimizer.kind != "adafactor":
            raise NotSupportedError(
                "torch_optimizer is for a train.Module; a CallModule has train.adamw and others"
            )
        initial = dict(self._model.initial(np.random.default_rng(self._config.seed)))
        self.entries[mesh.cell] = {name: ["parameters", name, ""] for name in initial}
        state: dict[str, dict[str, Any]] = {"parameters": initial, "buffers": {}}
        if self._config.optimizer.has_shapes:
            state[SHAPED] = shaped_beginning({name: np.shape(array) for name, array in initial.items()})
        return state

    async def open(self) -> None:
        self._next = self.states
        self._fixed: list[Mapping[str, AccelRef]] = []
        for mesh in self.meshes:
            frozen, views = self.frozen[mesh.cell], dict[str, AccelRef]()
            if frozen:
                layout = FlatLayout([*frozen], [*map(np.shape, frozen.values())])
                flat = layout.flattened(frozen, DType.of(self._config.precision.compute).dtype)
                views = layout.views(await self._world.devices[mesh.rank].put(flat))
            self._fixed.append(views)

    async def evaluate(self, name: str, shares: Sequence[Batch]) -> list[Metrics]:
        flats = [state[name] for state in self.states]
        if name == AVERAGE and self.is_apart:
            flats = await self._world.all_gather(flats)

        async def evaluate_rank(rank: int) -> Metrics:
            if not shares[rank]:
                return {}
            samples = await self._samples(shares[rank], flats[rank])
            layout = self.layouts[rank]["parameters"]
            views = layout.views(_as_dtype(flats[rank], self._config.precision.compute))
            metrics = self._model.validate({**views, **self._fixed[rank]}, samples)
            values = await gather(*(call.to_host() for call in metrics.values()))
            return dict(zip(metrics, map(float, values), strict=True))

        return await self._on_each(evaluate_rank)

    async def compute(self, works: Sequence[Work]) -> Metrics:
        config, size, clip = self._config, self._world.size, self._config.clip_norm
        with trio.fail_after(math.inf if config.timeout is None else config.timeout):
            results = await self._on_each(lambda rank: self._gradient(rank, works[rank]))
            totals = [total for _, total in results]
            if self.is_apart:
                totals = await self._world.reduce_scatter(totals)
            elif size > 1:
                totals = await self._world.all_reduce(totals)
            factor, squares = 1.0 / works[0].scale, list[Any]()
            if clip is not None:
                squares = await self._on_each(lambda rank: self._squares(totals[rank]).to_host())
                _, factor = works[0].clipped(self._sum(squares), clip)
            changed = await self._on_each(lambda rank: self._changed(rank, totals[rank], factor, works[rank]))
            # If nothing is clipped, the norm arrives with the new state.
            norm, _ = works[0].clipped(
                self._sum(squares or [rank_squares for _, rank_squares in changed]), clip
            )
            self._next = [state for state, _ in changed]
            if self.is_apart:
                wholes = await self._world.all_gather([state["parameters"] for state in self._next])
                for state, parameters in zip(self._next, wholes, strict=True):
                    state["parameters"] = parameters
        return {"loss": sum(loss for loss, _ in results), "norm": norm}

    def commit(self) -> None:
        self.states = self._next

    def _sum(self, squares: Sequence[Any]) -> float:
        """Return the sum of the gradient's squares from the sums of the ranks."""
        # Without shares of the optimizer, all ranks have the same sum.
        return float(sum(map(float, squares))) if self.is_apart else float(squares[0])

    async def _gradient(self, rank: int, work: Work) -> tuple[float, AccelRef]:
        """Compute a rank's part of the loss, and its flat gradient, by a request for each part."""
        config, layout, state = (
            self._config,
            self.layouts[rank]["parameters"],
            self.states[rank]["parameters"],
        )
        from ..gradients import flat_grad_and_value

        precision, loss = config.precision, 0.0
        gradient: AccelRef | None = None
        end = np.zeros(layout.padded - layout.size, DType.of(precision.compute).dtype)
        for number, (part, factor) in enumerate(work.parts(work.batch, config.accumulate), 1):
            samples = await self._samples(part, state)
            # In the backward pass, the scale keeps small gradients above 0, up to the largest float16 scale.
            within = min(max(factor * work.scale, LEAST_SCALE), _LARGEST_WITHIN)
            views = layout.views(_as_dtype(state, precision.compute))
            both = flat_grad_and_value(self._loss, scale=within)(views, self._fixed[rank], samples)
            value, slopes = both[-1], both[:-1]
            if end.size:
                slopes = arrays.concat([slopes, end], axis=None)
            if factor * work.scale != within:
                slopes = slopes * (factor * work.scale / within)
            total = slopes if gradient is None else gradient + slopes
            if number == config.accumulate and precision.reduce not in (None, precision.compute):
                total = total.cast(precision.reduce)
            gradient, loss_part = await gather(total, value.to_host())
            loss += factor * float(loss_part)
        assert gradient is not None  # there is one part at least
        return loss, gradient

    def _loss(self, trained: Mapping[str, Any], fixed: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        return self._model.loss({**trained, **fixed}, batch)

    async def _samples(self, part: Batch, ref: AccelRef) -> dict[str, Any]:
        """Return samples as device arrays; small ones as calls that send them with a request."""
        hosts = [array for array in part.values() if type(array) is np.ndarray]
        is_sent = sum(host.nbytes for host in hosts) <= _MOST_SENT
        return {
            name: _SAMPLES(array, ref)
            if is_sent and type(array) is np.ndarray
            else await ref.device.put(array)
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
            The state, and the sum of the gradient's squares if it was not known before.
        """
        config, state, is_clipped = self._config, self.states[rank], self._config.clip_norm is not None
        # float16 holds neither the reciprocal of a small scale, nor a small gradient without its scale.
        wide, span = _as_dtype(total, config.precision.master), self.rank_slice(rank)
        shard = {"parameters": state["parameters"][span] if self.is_apart else state["parameters"]}
        shard |= {name: state[name] for name in config.states}
        gradient = wide * factor if factor != 1.0 else wide
        calls = changed(config, shard, gradient, work, self.layouts[rank], self.parts(rank), span)
        if not is_clipped:
            calls = [*calls, self._squares(total).to_host()]
        after: Any = await gather(*calls)
        squares = None if is_clipped else after[-1]
        return dict(zip(shard, after[: len(shard)], strict=True)), squares


async def _placed(host: Any, ref: AccelRef) -> AccelRef:
    # In a chain, `host` is already a placeholder on the device.
    return host if isinstance(host, AccelRef) else await ref.device.put(host)


# The model sees the samples of a request as arrays on the device.
_SAMPLES = called(ArrayFunction("train.samples", _placed, "awaitable", takes_hosts=True))


def _as_dtype(array: Any, dtype: str) -> Any:
    return array if array.dtype == dtype else array.cast(dtype)
