"""Models as programs: what runs in the worker of each rank.

A step reads one copy of the state and writes the other one. So a step that is lost has changed nothing that
anybody reads, and all ranks do it again. `torch` is imported by the module of the model, not here.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import attrs
import numpy as np

from ..programs import Array, current_rank, method
from ._layout import Batch, Layout, rows_of, shared

__all__ = ["ArrayModule", "Module"]

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


def beginning(path: str, seed: int, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return parameters and buffers of a model's beginning by name; runs in a worker, by `ta.run`."""
    module, _, name = path.partition(":")
    target: Any = operator.attrgetter(name)(importlib.import_module(module))
    parameters, buffers = target.start(seed, options)
    return {"parameters": parameters, "buffers": buffers}


class _Trained(ABC):
    """Base of models that are programs.

    Args:
        a: One copy of the state: flat arrays by name.
        b: The other one, of the same names and shapes.
        plan: What of the configuration a rank needs.
        options: Arguments of `configure` or `initial`.
    """

    def __init__(self, a: State, b: State, plan: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.plan: Mapping[str, Any] = plan
        names, shapes = plan["parameters"]
        self.layout: Layout = Layout(names, shapes, plan["ranks"])
        self.buffers: Layout = Layout(*plan["buffers"])
        self._a = {name: self._native(array) for name, array in a.items()}
        self._b = {name: self._native(array) for name, array in b.items()}
        self._prepare(options)

    @classmethod
    @abstractmethod
    def start(cls, seed: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return parameters and buffers of the beginning, as arrays of the host by name."""

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
        rank, is_apart = work.rank, self.plan["shard"]
        loss, total = self._gradients(source, work)
        if "buffers" in target:
            self._keep(target["buffers"])
        gradient = self._wide(total)
        # A rank has the whole sum, or its part of it.
        told = self._numbers(loss, (gradient @ gradient) * (1.0 if is_apart else 1.0 / rank.size))
        rank.all_reduce(told, "sum")
        mean, squares = told.tolist()
        norm = math.sqrt(squares) / work.scale
        factor, clip = 1.0 / work.scale, self.plan["clip"]
        if clip is not None and norm > clip:
            factor *= clip / norm
        own = self._own(rank) if is_apart else slice(None)
        before = {**source, "parameters": source["parameters"][own]}
        after = {**target, "parameters": target["parameters"][own]}
        self._optimize(before, after, gradient * factor, work)
        if is_apart:
            rank.all_gather(self._copied(after["parameters"]), target["parameters"])
        if "buffers" in target:
            rank.broadcast(target["buffers"])
        return {"loss": mean, "norm": norm}

    def _own(self, rank: Any) -> slice:
        part = self.layout.padded // rank.size
        return slice(rank.number * part, (rank.number + 1) * part)

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

    def _keep(self, buffers: Any) -> None:
        """Take the model's buffers over."""
        raise NotImplementedError

    @abstractmethod
    def _gradients(self, source: State, work: Work) -> tuple[Any, Any]:
        """Return this rank's part of the loss, and the flat gradient of all ranks.

        With a sharded optimizer, a rank gets its part of the latter alone.
        """

    @abstractmethod
    def _numbers(self, *numbers: Any) -> Any:
        """Return numbers as one array of float64 where the model computes."""

    @abstractmethod
    def _wide(self, array: Any) -> Any:
        """Return an array in the dtype of the parameters that the optimizer changes."""

    @abstractmethod
    def _copied(self, array: Any) -> Any:
        """Return a copy of an array."""


class ArrayModule(_Trained):
    """A model that computes its own gradients, in a program, with arrays of NumPy.

    Derive from it at the level of a module, with `initial` and `gradients`. On a GPU its arrays are those of
    the device: use `Module` there, or `CallModule`.
    """

    rng: np.random.Generator
    """Random numbers of this step and rank: the same ones if the step is done again."""

    @classmethod
    @abstractmethod
    def initial(cls, rng: np.random.Generator, **options: Any) -> Mapping[str, Array]:
        """Return the parameters of the beginning by name."""

    @abstractmethod
    def gradients(
        self, parameters: Mapping[str, Array], batch: Mapping[str, Array]
    ) -> tuple[float, Mapping[str, Array]]:
        """Return the mean loss of some samples, and its gradients by the names of the parameters."""

    @classmethod
    def start(cls, seed: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See the base class."""
        return dict(cls.initial(np.random.default_rng(seed), **options)), {}

    def _native(self, array: Array) -> Any:
        return array

    def _prepare(self, options: Mapping[str, Any]) -> None:
        self.options: Mapping[str, Any] = options

    def _gradients(self, source: State, work: Work) -> tuple[Any, Any]:
        plan = self.plan
        self.rng = np.random.default_rng((plan["seed"], work.number, work.rank.number))
        parameters = self.layout.views(source["parameters"].astype(plan["compute"]))
        total, loss = np.zeros(self.layout.padded, plan["reduce"]), 0.0
        for part, factor in work.parts(work.batch, plan["accumulate"]):
            one, slopes = self.gradients(parameters, part)
            loss += factor * float(one)
            total += self.layout.flattened(slopes, plan["compute"]) * (factor * work.scale)
        if not plan["shard"]:
            work.rank.all_reduce(total, "sum")
            return loss, total
        own = np.empty(len(total) // work.rank.size, total.dtype)
        work.rank.reduce_scatter(total, own)
        return loss, own

    def _numbers(self, *numbers: Any) -> Any:
        return np.array(numbers, np.float64)

    def _wide(self, array: Any) -> Any:
        return array.astype(self.plan["master"], copy=False)

    def _copied(self, array: Any) -> Any:
        return array.copy()


class Module(_Trained):
    """A model of PyTorch, which computes its gradients by autograd, in a program.

    Derive from it at the level of a module that imports `torch` at its top, with `configure` and `loss`. Its
    parameters and buffers, those of its submodules included, are the state of the training.

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

    @classmethod
    def start(cls, seed: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """See the base class."""
        _torch().manual_seed(seed)
        model = cls.configure(object.__new__(cls), **options)
        parameters = {name: _on_host(one) for name, one in model.named_parameters()}
        return parameters, {name: _on_host(one) for name, one in model.named_buffers()}

    def _native(self, array: Array) -> Any:
        return _torch().from_dlpack(array)

    def _prepare(self, options: Mapping[str, Any]) -> None:
        torch, plan = _torch(), self.plan
        self._reduced, self._master = getattr(torch, plan["reduce"]), getattr(torch, plan["master"])
        where = self._a["parameters"].device
        self.model = self.configure(**options).to(where)
        parameters = dict(self.model.named_parameters())
        shapes = {name: one.shape for name, one in parameters.items()}
        if difference := self.layout.difference(shapes):
            raise ValueError(f"configure() has made another model than before: {difference}")
        self._flat = torch.zeros(self.layout.padded, dtype=getattr(torch, plan["compute"]), device=where)
        self._slopes = torch.zeros_like(self._flat)
        self._total = self._slopes
        if self._reduced is not self._flat.dtype:
            self._total = torch.zeros_like(self._flat, dtype=self._reduced)
        # Buckets from the end on, as the backward pass goes: where each begins and ends, and its parameters.
        self._buckets: list[tuple[int, int, set[int]]] = []
        stop, inside, least = self.layout.padded, set[int](), plan["bucket"] // self._flat.itemsize
        for number, (name, place, shape) in reversed([*enumerate(self.layout.places())]):
            parameters[name].data = self._flat[place].view(shape)
            parameters[name].grad = self._slopes[place].view(shape)
            parameters[name].register_post_accumulate_grad_hook(lambda _, number=number: self._there(number))
            inside.add(number)
            if stop - place.start >= least or not place.start:
                self._buckets.append((place.start, stop, inside))
                stop, inside = place.start, set()
        self._side = torch.cuda.Stream(where) if where.type == "cuda" else None
        self._waiting: list[set[int]] | None = None
        self._rank: Any = None

    def _keep(self, buffers: Any) -> None:
        for (_, place, shape), buffer in self._pairs():
            buffers[place].view(shape).copy_(buffer)

    def _pairs(self) -> Iterator[tuple[tuple[str, slice, tuple[int, ...]], Any]]:
        return zip(self.buffers.places(), self.model.buffers(), strict=True)

    def _there(self, number: int) -> None:
        """Sum the buckets whose gradients are there, in their order: it is the same on all ranks."""
        if self._waiting is None:
            return
        for missing in self._waiting:
            missing.discard(number)
        while self._waiting and not self._waiting[0]:
            self._sum(len(self._buckets) - len(self._waiting))
            self._waiting.pop(0)

    def _sum(self, bucket: int) -> None:
        start, stop, _ = self._buckets[bucket]
        torch = _torch()
        if self._side is None:
            self._sum_part(slice(start, stop), None)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._sum_part(slice(start, stop), self._side)

    def _sum_part(self, part: slice, stream: Any) -> None:
        if self._total is not self._slopes:
            self._total[part] = self._slopes[part]
        self._rank.all_reduce(self._total[part], "sum", stream=stream)

    def _gradients(self, source: State, work: Work) -> tuple[Any, Any]:
        torch, plan = _torch(), self.plan
        self._rank, is_apart, parts = work.rank, plan["shard"], plan["accumulate"]
        torch.manual_seed((plan["seed"] * 1_000_003 + work.number) * 1_000_003 + work.rank.number)
        self._flat.copy_(source["parameters"])
        self._slopes.zero_()
        for (_, place, shape), buffer in self._pairs():
            buffer.copy_(source["buffers"][place].view(shape))
        tensors = {name: torch.from_dlpack(array) for name, array in work.batch.items()}
        loss: Any = 0.0
        try:
            for number, (part, factor) in enumerate(work.parts(tensors, parts), 1):
                if number == parts and not is_apart:
                    self._waiting = [set(inside) for *_, inside in self._buckets]
                value = self.loss(part)
                (value * (factor * work.scale)).backward()
                loss = loss + value.detach().double() * factor
            for bucket in range(len(self._buckets) - len(self._waiting or ()), len(self._buckets)):
                # Parameters that the loss does not depend on hold them up.
                self._sum(bucket)
        finally:
            self._rank, self._waiting = None, None
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        if not is_apart:
            return loss, self._total
        if self._total is not self._slopes:
            self._total.copy_(self._slopes)
        own = self._total.new_empty(len(self._total) // work.rank.size)
        work.rank.reduce_scatter(self._total, own)
        return loss, own

    def _optimize(self, before: State, after: State, g: Any, work: Work) -> None:
        if self._side is None or self.plan["optimizer"] != "adamw":
            super()._optimize(before, after, g, work)
            return
        # PyTorch's own step is one launch.
        torch, names = _torch(), ("parameters", *self.plan["states"])
        for name in names:
            after[name].copy_(before[name])
        param, *states = [[after[name]] for name in names]
        step = [torch.full((), float(work.number - 1), device=g.device)]
        kinds: dict[str, Any] = {"amsgrad": False, "maximize": False, "fused": True}
        torch.optim.adamw.adamw(param, [g], *states, [], step, lr=work.rate, **self.plan["numbers"], **kinds)

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
