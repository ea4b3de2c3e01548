"""Models as programs: what runs in the worker of each rank.

A step reads one copy of the state and writes the other one. So a step that is lost has changed nothing that
anybody reads, and all ranks do it again. `torch` is imported by the module of the model, not here.
"""

from __future__ import annotations

import importlib
import logging
import math
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeAlias

import attrs
import numpy as np

from ..programs import Array, current_rank, method
from ._layout import Batch, Layout, rows_of, shared
from ._mesh import Mesh, Turn, turns

__all__ = ["ArrayModule", "Module"]

_logger = logging.getLogger("trio_accel.train")

State: TypeAlias = "Mapping[str, Array]"
Told: TypeAlias = "dict[str, float]"


@attrs.frozen
class Work:
    """A step as a rank computes it.

    Attributes:
        rank: The rank.
        batch: Its samples.
        number: Number of the step, from 1 on.
        weight: The share of these samples in all of the step.
        rate: The rate of the optimizer.
        scale: Factor of the loss, by which gradients are divided again.
    """

    rank: Any
    batch: Mapping[str, Array]
    number: int
    weight: float
    rate: float
    scale: float

    def parts(self, batch: Batch, count: int) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield parts of the samples, and the share of each in all of the step."""
        for part in shared(batch, count):
            yield part, self.weight * rows_of(part) / rows_of(batch)


class Beginning:
    """Parameters and buffers of a rank's beginning, without an instance of the model: a program.

    The constructor makes them: imports and large models may take longer than a method may.
    """

    def __init__(self, path: str, seed: int, mesh: Sequence[int], options: Mapping[str, Any]) -> None:
        module, _, name = path.partition(":")
        target: Any = operator.attrgetter(name)(importlib.import_module(module))
        model = object.__new__(target)
        model.mesh = Mesh(*mesh)
        parameters, buffers = model.start(seed, options)
        self._made: dict[str, dict[str, Any]] = {"parameters": parameters, "buffers": buffers}

    def state(self) -> dict[str, dict[str, Any]]:
        """Return both by name."""
        return self._made


class _Trained(ABC):
    """Base of models that are programs.

    Args:
        a: One copy of the state: flat arrays by name.
        b: The other one, of the same names and shapes.
        plan: What of the configuration a rank needs.
        options: Arguments of `configure` or `initial`.

    Attributes:
        mesh: The place of this rank among all.
    """

    mesh: Mesh

    def __init__(self, a: State, b: State, plan: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.plan: Mapping[str, Any] = plan
        self.mesh = Mesh(*plan["mesh"])
        names, shapes = plan["parameters"]
        self.layout: Layout = Layout(names, shapes, self.mesh.data)
        self.buffers: Layout = Layout(*plan["buffers"])
        self._a = {name: self._native(array) for name, array in a.items()}
        self._b = {name: self._native(array) for name, array in b.items()}
        self._prepare(options)

    @abstractmethod
    def start(self, seed: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return parameters and buffers of the beginning, as arrays of the host by name."""

    def between(self, rows: int) -> tuple[int, ...]:
        """Return the shape of what a stage of a pipeline gives to the next one, for so many samples."""
        raise NotImplementedError(f"{type(self).__name__} must define between(rows) for a pipeline")

    @method(updates=["self.b"], idempotent=True)
    def step_to_b(self, work: Mapping[str, Any], batch: Batch) -> Told:
        """Compute a step from `a` to `b`; see `_step`."""
        return self._step(self._a, self._b, Work(current_rank(), batch, **work))

    @method(updates=["self.a"], idempotent=True)
    def step_to_a(self, work: Mapping[str, Any], batch: Batch) -> Told:
        """Compute a step from `b` to `a`; see `_step`."""
        return self._step(self._b, self._a, Work(current_rank(), batch, **work))

    def _step(self, source: State, target: State, work: Work) -> Told:
        """Write the state after a step to `target`, which has nothing that is read.

        Returns:
            The mean loss of all samples, and the norm of the gradient of that before it is clipped.
        """
        mesh, is_apart, data = self.mesh, self.plan["shard"], work.rank.group("data")
        self._begin(source, target, work)
        loss = self._backward_all(work)
        gradient = self._wide(self._summed(data))
        if "buffers" in target:
            self._keep(target["buffers"])
            data.broadcast(target["buffers"])
        own = self._own() if is_apart else slice(None)
        # Ranks that have the same numbers give their share of them.
        squares = gradient @ (gradient if mesh.tensor == 1 else gradient * self._counts()[own])
        told = self._numbers(loss / mesh.tensor, squares if is_apart else squares / mesh.data)
        work.rank.all_reduce(told, "sum")
        mean, total = told.tolist()
        norm = math.sqrt(total) / work.scale if math.isfinite(total) else total
        factor, clip = 1.0 / work.scale, self.plan["clip"]
        if clip is not None and norm > clip:
            factor *= clip / norm
        before = {**source, "parameters": source["parameters"][own]}
        after = {**target, "parameters": target["parameters"][own]}
        self._optimize(before, after, gradient if factor == 1.0 else gradient * factor, work)
        if is_apart:
            data.all_gather(self._copied(after["parameters"]), target["parameters"])
        return {"loss": mean, "norm": norm}

    def _own(self) -> slice:
        part = self.layout.padded // self.mesh.data
        return slice(self.mesh.data_rank * part, (self.mesh.data_rank + 1) * part)

    def _backward_all(self, work: Work) -> Any:
        """Compute all gradients of this rank; returns its part of the loss, which the last stage has."""
        mesh, scale, loss = self.mesh, work.scale, 0.0
        parts = [*work.parts(self._samples(work.batch), self.plan["accumulate"])]
        order = [*turns(self.plan["order"], mesh.stage, mesh.pipeline, len(parts))]
        kept: dict[int, Any] = {}
        got = self._exchanged(work, None, None, order[0], parts)
        for turn, after in zip(order, (*order[1:], None), strict=True):
            what, number = turn
            part, factor = parts[number]
            if what == "forward":
                made, kept[number] = self._forward(part, got)
                if mesh.is_last:
                    loss = loss + made * factor
            else:
                self._end_with(number + 1 == len(parts), work.rank)
                made = self._backward(kept.pop(number), factor * scale if mesh.is_last else got)
            got = self._exchanged(work, turn, made, after, parts)
        return loss

    def _exchanged(
        self, work: Work, turn: Turn | None, made: Any, after: Turn | None, parts: Sequence[Any]
    ) -> Any:
        """Give what a turn has made to the next stage, and get what the turn after it needs, at once."""
        mesh = self.mesh
        if mesh.pipeline == 1:
            return None
        to, source, got = -1, -1, None
        if turn is not None:
            to = mesh.stage + (1 if turn[0] == "forward" else -1)
        if after is not None:
            source = mesh.stage + (-1 if after[0] == "forward" else 1)
        sends = [(made, to)] if 0 <= to < mesh.pipeline else []
        receives: list[Any] = []
        if after is not None and 0 <= source < mesh.pipeline:
            got = self._empty(self.between(rows_of(parts[after[1]][0])))
            receives = [(got, source)]
        if sends or receives:
            work.rank.group("pipeline").exchange(sends, receives)
        return got

    def _optimize(self, before: State, after: State, g: Any, work: Work) -> None:
        """Compute a step of the optimizer by a gradient, with the formulas of PyTorch's."""
        numbers, param, rate, number = self.plan["numbers"], before["parameters"], work.rate, work.number
        if self.plan["optimizer"] == "adamw":
            one, two = numbers["beta1"], numbers["beta2"]
            m, v = after["exp_avg"], after["exp_avg_sq"]
            m[:] = before["exp_avg"] + (1 - one) * (g - before["exp_avg"])
            v[:] = two * before["exp_avg_sq"] + (1 - two) * (g * g)
            root = (v / (1 - two**number)) ** 0.5 + numbers["eps"]
            slope = m / (root * (1 - one**number))
            after["parameters"][:] = (1 - rate * numbers["weight_decay"]) * param - rate * slope
            return
        g = g + numbers["weight_decay"] * param
        if "momentum_buffer" in after:
            g = numbers["momentum"] * before["momentum_buffer"] + g
            after["momentum_buffer"][:] = g
        after["parameters"][:] = param - rate * g

    @abstractmethod
    def _native(self, array: Array) -> Any:
        """Return an array of the state as one of the model's library, with the same memory."""

    @abstractmethod
    def _prepare(self, options: Mapping[str, Any]) -> None:
        """Make the model."""

    @abstractmethod
    def _begin(self, source: State, target: State, work: Work) -> None:
        """Give the model its parameters, buffers and random numbers, and set the gradients to zero."""

    @abstractmethod
    def _samples(self, batch: Batch) -> Batch:
        """Return samples as the model takes them."""

    @abstractmethod
    def _empty(self, shape: tuple[int, ...]) -> Any:
        """Return an array for what another stage gives."""

    @abstractmethod
    def _forward(self, part: Batch, x: Any) -> tuple[Any, Any]:
        """Return what the next stage gets, or the loss; and what `_backward` takes."""

    @abstractmethod
    def _backward(self, kept: Any, slope: Any) -> Any:
        """Add to the gradients, and return that of what the stage has got."""

    @abstractmethod
    def _summed(self, data: Any) -> Any:
        """Return the flat gradient, summed over the ranks with other samples.

        With a sharded optimizer, a rank gets its part alone.
        """

    @abstractmethod
    def _counts(self) -> Any:
        """Return for each element of the flat gradient its share in the sum over all ranks."""

    @abstractmethod
    def _numbers(self, *numbers: Any) -> Any:
        """Return numbers as one array of float64 where the model computes."""

    @abstractmethod
    def _wide(self, array: Any) -> Any:
        """Return an array in the dtype of the parameters that the optimizer changes."""

    @abstractmethod
    def _copied(self, array: Any) -> Any:
        """Return a copy of an array."""

    def _end_with(self, is_last: bool, rank: Any) -> None:
        """Hear whether the next backward pass is the last one."""
        return

    def _keep(self, buffers: Any) -> None:
        """Take the model's buffers over."""
        return


class ArrayModule(_Trained):
    """A model that computes its own gradients, in a program, with arrays of NumPy.

    Derive from it at the level of a module, with `initial` and `gradients`; for a stage of a pipeline with
    `forward`, `backward` and `between` in place of the latter. On a GPU its arrays are those of the device:
    use `Module` there, or `CallModule`.

    Attributes:
        rng: Random numbers of this step and rank: the same ones if the step is done again.
        sharded: Names of the parameters of which each rank of a shared layer has a part.
    """

    rng: np.random.Generator
    sharded: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def initial(self, rng: np.random.Generator, **options: Any) -> Mapping[str, Array]:
        """Return the parameters of the beginning by name."""

    def gradients(
        self, parameters: Mapping[str, Array], batch: Mapping[str, Array]
    ) -> tuple[float, Mapping[str, Array]]:
        """Return the mean loss of some samples, and its gradients by the names of the parameters."""
        raise NotImplementedError(f"{type(self).__name__} must define gradients()")

    def forward(
        self, parameters: Mapping[str, Array], x: Array, batch: Mapping[str, Array]
    ) -> tuple[Any, object]:
        """Return what this stage makes of `x`, the last one the mean loss; and what `backward` needs."""
        return self.gradients(parameters, batch)

    def backward(
        self, parameters: Mapping[str, Array], kept: Any, slope: Any
    ) -> tuple[Array, Mapping[str, Array]]:
        """Return the gradients for `x` and for the parameters, by that of what `forward` has made."""
        return None, {name: one * slope for name, one in kept.items()}

    def start(self, seed: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See the base class."""
        return dict(self.initial(np.random.default_rng(seed), **options)), {}

    def _native(self, array: Array) -> Any:
        return array

    def _prepare(self, options: Mapping[str, Any]) -> None:
        self.options: Mapping[str, Any] = options

    def _begin(self, source: State, target: State, work: Work) -> None:
        self.rng = np.random.default_rng((self.plan["seed"], work.number, work.rank.number))
        self._parameters = self.layout.views(source["parameters"].astype(self.plan["compute"]))
        self._total = np.zeros(self.layout.padded, self.plan["reduce"])

    def _samples(self, batch: Batch) -> Batch:
        return batch

    def _empty(self, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, self.plan["compute"])

    def _forward(self, part: Batch, x: Any) -> tuple[Any, Any]:
        made, kept = self.forward(self._parameters, x, part)
        return float(made) if self.mesh.is_last else np.ascontiguousarray(made), kept

    def _backward(self, kept: Any, slope: Any) -> Any:
        below, found = self.backward(self._parameters, kept, slope)
        self._total += self.layout.flattened(found, self.plan["compute"])
        return None if below is None else np.ascontiguousarray(below)

    def _summed(self, data: Any) -> Any:
        if not self.plan["shard"]:
            data.all_reduce(self._total, "sum")
            return self._total
        own = np.empty(len(self._total) // data.size, self._total.dtype)
        data.reduce_scatter(self._total, own)
        return own

    def _counts(self) -> Any:
        counts = np.full(self.layout.padded, 1.0 / self.mesh.tensor)
        for name, place, _ in self.layout.places():
            if name in self.sharded:
                counts[place] = 1.0
        return counts

    def _numbers(self, *numbers: Any) -> Any:
        return np.array(numbers, np.float64)

    def _wide(self, array: Any) -> Any:
        return array.astype(self.plan["master"], copy=False)

    def _copied(self, array: Any) -> Any:
        return array.copy()


class Module(_Trained):
    """A model of PyTorch, which computes its gradients by autograd, in a program.

    Derive from it at the level of a module that imports `torch` at its top, with `configure` and `loss`; for
    a pipeline with `stage` and `between` in place of the latter. Parameters and buffers are the state of the
    training. A parameter of which each rank of a shared layer has a part has ``is_sharded = True``.

    Attributes:
        model: What `configure` has returned.
    """

    model: Any

    def configure(self, **options: Any) -> Any:
        """Return the `torch.nn.Module`, on the host and with the parameters of the beginning."""
        raise NotImplementedError(f"{type(self).__name__} must define configure()")

    def loss(self, batch: Mapping[str, Any]) -> Any:
        """Return the mean loss of some samples, as a tensor without axes; `batch` has tensors by name."""
        raise NotImplementedError(f"{type(self).__name__} must define loss()")

    def stage(self, x: Any, batch: Mapping[str, Any]) -> Any:
        """Return what this stage makes of `x`, which the first one has not; the last one, the mean loss."""
        return self.loss(batch)

    def start(self, seed: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See the base class."""
        _torch().manual_seed(seed)
        model = self.configure(**options)
        parameters = {name: _on_host(one) for name, one in model.named_parameters()}
        return parameters, {name: _on_host(one) for name, one in model.named_buffers()}

    def _native(self, array: Array) -> Any:
        return _torch().from_dlpack(array)

    def _prepare(self, options: Mapping[str, Any]) -> None:
        torch, plan = _torch(), self.plan
        self._master = getattr(torch, plan["master"])
        where = self._a["parameters"].device
        with torch.device(where):
            # Its first parameters are nothing: a GPU makes them in no time.
            self.model = self.configure(**options)
        parameters = dict(self.model.named_parameters())
        shapes = {name: one.shape for name, one in parameters.items()}
        if difference := self.layout.difference(shapes):
            raise ValueError(f"configure() has made another model than before: {difference}")
        self._flat = torch.zeros(self.layout.padded, dtype=getattr(torch, plan["compute"]), device=where)
        self._slopes = self._total = torch.zeros_like(self._flat)
        if plan["reduce"] != plan["compute"]:
            self._total = torch.zeros_like(self._flat, dtype=getattr(torch, plan["reduce"]))
        # Buckets from the end on, as the backward pass goes: where each begins and ends, and its parameters.
        self._buckets: list[tuple[slice, set[int]]] = []
        stop, inside, least = self.layout.padded, set[int](), plan["bucket"] // self._flat.itemsize
        for number, (name, place, shape) in reversed([*enumerate(self.layout.places())]):
            parameters[name].data = self._flat[place].view(shape)
            parameters[name].grad = self._slopes[place].view(shape)
            parameters[name].register_post_accumulate_grad_hook(lambda _, number=number: self._there(number))
            inside.add(number)
            if stop - place.start >= least or not place.start:
                self._buckets.append((slice(place.start, stop), inside))
                stop, inside = place.start, set()
        self._side = torch.cuda.Stream(where) if where.type == "cuda" else None
        # What is missing of each bucket that is not summed; None where no gradient is the last one.
        self._missing: list[set[int]] | None = None

    def warm_up(self) -> None:
        """Load the code of a step, by one sample of zeros: a spare worker does so ahead of a loss."""
        torch = _torch()
        if self.mesh.pipeline > 1 or self.mesh.tensor > 1:
            return
        sample = self.plan["sample"].items()
        where = self._flat.device
        batch = {
            name: torch.zeros(1, *shape, dtype=getattr(torch, dtype), device=where)
            for name, (dtype, shape) in sample
        }
        try:
            self.loss(batch).backward()
        except Exception:
            _logger.info("the model cannot be warmed up by zeros", exc_info=True)
        self._slopes.zero_()
        one = {name: self._flat[:1].to(self._master) for name in ("parameters", *self.plan["states"])}
        self._optimize(one, one, self._wide(self._slopes[:1]), Work(None, {}, 1, 1.0, 0.0, 1.0))
        if self._side is not None:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _begin(self, source: State, target: State, work: Work) -> None:
        seed = (self.plan["seed"] * 1_000_003 + work.number) * 1_000_003 + work.rank.number
        _torch().manual_seed(seed)
        self._flat.copy_(source["parameters"])
        self._slopes.zero_()
        self._missing = None
        if self._side is not None:
            # The optimizer works in place: what it begins with is copied while the model computes.
            self._side.wait_stream(_torch().cuda.current_stream())
        with self._beside():
            for name in ("parameters", *self.plan["states"]):
                target[name].copy_(source[name])
        for (_, place, shape), buffer in self._pairs():
            buffer.copy_(source["buffers"][place].view(shape))

    def _samples(self, batch: Batch) -> Batch:
        return {name: _torch().from_dlpack(array) for name, array in batch.items()}

    def _empty(self, shape: tuple[int, ...]) -> Any:
        return self._flat.new_empty(shape)

    def _forward(self, part: Batch, x: Any) -> tuple[Any, Any]:
        if x is not None:
            x.requires_grad_()
        made = self.stage(x, part)
        return made.detach().double() if self.mesh.is_last else made.detach().contiguous(), (x, made)

    def _backward(self, kept: Any, slope: Any) -> Any:
        x, made = kept
        if self.mesh.is_last:
            (made * slope).backward()
        else:
            made.backward(slope)
        return None if x is None else x.grad

    def _end_with(self, is_last: bool, rank: Any) -> None:
        if is_last and not self.plan["shard"]:
            self._data, self._missing = rank.group("data"), [set(inside) for _, inside in self._buckets]

    def _there(self, number: int) -> None:
        """Sum the buckets whose gradients are there, in their order: it is the same on all ranks."""
        missing = self._missing
        if missing is None:
            return
        for one in missing:
            one.discard(number)
        while missing and not missing[0]:
            self._sum_next(missing)

    def _sum_next(self, missing: list[set[int]]) -> None:
        part, _ = self._buckets[len(self._buckets) - len(missing)]
        missing.pop(0)
        if self._side is not None:
            self._side.wait_stream(_torch().cuda.current_stream())
        with self._beside():
            if self._total is not self._slopes:
                self._total[part] = self._slopes[part]
            self._data.all_reduce(self._total[part], "sum", stream=self._side)

    def _beside(self) -> AbstractContextManager[object]:
        """Enqueue beside what the model computes, on a GPU."""
        beside: AbstractContextManager[object] = nullcontext()
        return beside if self._side is None else _torch().cuda.stream(self._side)

    def _summed(self, data: Any) -> Any:
        while self._missing:
            # Parameters that the loss does not depend on hold their bucket up.
            self._sum_next(self._missing)
        if self._side is not None:
            _torch().cuda.current_stream().wait_stream(self._side)
        if not self.plan["shard"]:
            return self._total
        if self._total is not self._slopes:
            self._total.copy_(self._slopes)
        own = self._total.new_empty(len(self._total) // data.size)
        data.reduce_scatter(self._total, own)
        return own

    def _counts(self) -> Any:
        counts = self._flat.new_full((self.layout.padded,), 1.0 / self.mesh.tensor, dtype=self._master)
        parameters = dict(self.model.named_parameters())
        for name, place, _ in self.layout.places():
            if getattr(parameters[name], "is_sharded", False):
                counts[place] = 1.0
        return counts

    def _keep(self, buffers: Any) -> None:
        for (_, place, shape), buffer in self._pairs():
            buffers[place].view(shape).copy_(buffer)

    def _pairs(self) -> Iterator[tuple[tuple[str, slice, tuple[int, ...]], Any]]:
        return zip(self.buffers.places(), self.model.buffers(), strict=True)

    def _optimize(self, before: State, after: State, g: Any, work: Work) -> None:
        if self.plan["optimizer"] != "adamw":
            super()._optimize(before, after, g, work)
            return
        # PyTorch's own step is one launch.
        torch, numbers = _torch(), self.plan["numbers"]
        param = after["parameters"]
        param.grad = g
        betas, rest = (numbers["beta1"], numbers["beta2"]), (numbers["eps"], numbers["weight_decay"])
        optimizer = torch.optim.AdamW([param], work.rate, betas, *rest, fused=True)
        step = torch.full((), float(work.number - 1), device=g.device)
        optimizer.state[param] = {"step": step, **{name: after[name] for name in self.plan["states"]}}
        optimizer.step()
        param.grad = None

    def _numbers(self, *numbers: Any) -> Any:
        torch = _torch()
        where = self._flat.device
        return torch.stack([torch.as_tensor(one, dtype=torch.float64, device=where) for one in numbers])

    def _wide(self, array: Any) -> Any:
        return array.to(self._master)

    def _copied(self, array: Any) -> Any:
        return array.clone()


def _on_host(tensor: Any) -> Any:
    narrow = tensor.dtype in (_torch().float16, _torch().bfloat16)
    return (tensor.float() if narrow else tensor).detach().cpu().numpy()


def _torch() -> Any:
    """Return PyTorch, which the module of the model has imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise ImportError("a model of train.Module needs PyTorch: import torch at the top of its module")
    return torch
