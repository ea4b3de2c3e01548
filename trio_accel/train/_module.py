"""Models as programs: the code in the worker of each rank.

A step reads one copy of the state and writes the other one. So a lost step has not changed the copy that is
read, and all ranks can repeat it (D197). The model's module imports `torch`; this module does not.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..programs import Array, current_rank, method
from ._config import AVERAGE
from ._groups import GroupPart, within
from ._layout import Batch, FlatLayout, Work, checksum_of, rows_of
from ._mesh import Mesh, Turn, torch_of_model, turns
from ._torch_parts import CONFIGURING, Stepper, host_dtype, on_host, real_view, recompute

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Module"]

_logger = logging.getLogger("trio_accel.train")

State: TypeAlias = "Mapping[str, Array]"
Metrics: TypeAlias = "dict[str, float]"


class Beginning:
    """The initial parameters and buffers of a rank, without an instance of the model: a program.

    The constructor makes them, because imports and large models may take longer than a method may.
    """

    def __init__(
        self,
        path: str,
        seed: int,
        mesh: Sequence[int],
        options: Mapping[str, Any],
        optimizer: tuple[str, Mapping[str, Any], Sequence[float | None]] | None,
    ) -> None:
        module, _, name = path.partition(":")
        target: Any = operator.attrgetter(name)(importlib.import_module(module))
        model = object.__new__(target)
        model.mesh = Mesh(*mesh)
        parameters, buffers = model.start(seed, options)
        self._model: Module = model
        self._made: dict[str, dict[str, Any]] = {"parameters": parameters, "buffers": buffers}
        if optimizer is not None:
            shapes = {name: array.shape for name, array in parameters.items()}
            self._made["optimizer"] = Stepper(*optimizer).beginning(shapes)
        self._base: dict[str, int] = model.base()

    def state(self) -> dict[str, dict[str, Any]]:
        """Return parameters and buffers by name, and the state of an optimizer that needs their shapes."""
        return self._made

    def base(self) -> dict[str, int]:
        """Return the checksums of the frozen parameters."""
        return self._base

    def entries(self) -> dict[str, list[str]]:
        """Return the source of each `state_dict` entry; see `Module.entries`."""
        return self._model.entries(self._made)

    def frozen(self) -> dict[str, Any]:
        """Return the frozen parameters by name."""
        return self._model.frozen()


class Module:
    """A PyTorch model, which computes its gradients by autograd, in a program.

    Derive from it at the top level of a module that imports `torch`, and define `configure` and `loss`; for a
    pipeline, define `stage` and `output_shape` instead of `loss`. Parameters and buffers are the state of the
    training. If the ranks of a shared layer each have a part of a parameter, set ``is_sharded = True`` on it.
    A parameter with ``requires_grad = False`` is not trained, and is not part of the state: each worker gets
    it by `configure`, which must therefore make the same numbers each time (the seed is set before it).

    Args:
        a: One copy of the state: flat arrays by name.
        b: The other copy, with the same names and shapes.
        plan: The parts of the configuration that a rank needs.
        options: Arguments of `configure`.

    Attributes:
        mesh: The coordinates of this rank.
        model: The result of `configure`.
    """

    mesh: Mesh
    model: Any = None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse arguments other than those of `__init__`.

        Raises:
            TypeError: A program has made an instance by hand.
        """
        if len(args) != 4 or options or not isinstance(args[2], Mapping):
            values = "".join(f", {name}={value!r:.40}" for name, value in options.items()) or ", ..."
            raise TypeError(
                f"{cls.__name__}: a trainer makes the model on each device: "
                f"write train.open_trainer(devices, {cls.__name__}, config{values})"
            )
        return super().__new__(cls)

    def __init__(self, a: State, b: State, plan: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.plan: Mapping[str, Any] = plan
        self.mesh = Mesh(*plan["mesh"])
        self.layout: FlatLayout = FlatLayout(*plan["parameters"])
        self.buffers: FlatLayout = FlatLayout(*plan["buffers"])
        self._a = {name: self._native(array) for name, array in a.items()}
        self._b = {name: self._native(array) for name, array in b.items()}
        self._prepare(options)

    # Programs read the names of the arguments.
    vars(__new__)["__signature__"] = inspect.signature(__init__)

    def configure(self, *args: Any, **options: Any) -> Any:
        """Return the `torch.nn.Module`, on the host and with the initial parameters."""
        raise NotImplementedError(f"{type(self).__name__} must define configure()")

    def loss(self, batch: Mapping[str, Any]) -> Any:
        """Return the mean loss of some samples, as a 0-d tensor; `batch` has tensors by name."""
        raise NotImplementedError(f"{type(self).__name__} must define loss()")

    def validate(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return metrics of some samples by name: means over the samples, as tensors or numbers.

        It runs without gradients, and with the modules in `eval` mode. By default, the loss is the metric.
        """
        return {"loss": self.loss(batch)}

    def stage(self, x: Any, batch: Mapping[str, Any]) -> Any:
        """Return this stage's output for `x` (None in the first stage); in the last stage, the mean loss."""
        return self.loss(batch)

    def start(self, seed: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the initial parameters and buffers, as host arrays by name."""
        with CONFIGURING:
            torch_of_model().manual_seed(seed)
            self.model = model = self.configure(**options)
        parameters = {
            name: on_host(tensor) for name, tensor in model.named_parameters() if tensor.requires_grad
        }
        return parameters, {name: on_host(real_view(tensor)) for name, tensor in model.named_buffers()}

    def base(self) -> dict[str, int]:
        """Return the checksums of the frozen parameters, after `start`."""
        return {name: checksum_of(name, array) for name, array in self.frozen().items()}

    def frozen(self) -> dict[str, Any]:
        """Return the frozen parameters, after `start`, as host arrays by name."""
        named: Any = () if self.model is None else self.model.named_parameters()
        return {name: on_host(tensor) for name, tensor in named if not tensor.requires_grad}

    def entries(self, initial: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
        """Return the source of each `state_dict` entry, after `start`.

        Args:
            initial: The parameters and buffers of `start`.

        Returns:
            Kind, name and dtype by the key of the entry. The kind is ``"parameters"``, ``"buffers"``,
            ``"frozen"``, or ``"other"`` for values that belong to none of them.
        """
        if self.model is None:
            return {
                name: [kind, name, np.asarray(array).dtype.name]
                for kind in ("parameters", "buffers")
                for name, array in initial[kind].items()
            }
        # Tied tensors share a name among the parameters and buffers, but the keys of the `state_dict` differ.
        sources = {
            id(tensor): ("parameters" if tensor.requires_grad else "frozen", name)
            for name, tensor in self.model.named_parameters()
        }
        sources |= {id(tensor): ("buffers", name) for name, tensor in self.model.named_buffers()}
        entries: dict[str, list[str]] = {}
        for key, value in self.model.state_dict(keep_vars=True).items():
            kind, name = sources.get(id(value), ("other", key))
            entries[key] = [kind, name, "" if kind == "other" else host_dtype(value)]
        return entries

    def output_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of a stage's output for the next stage, for `rows` samples."""
        raise NotImplementedError(f"{type(self).__name__} must define output_shape(rows) for a pipeline")

    @method(updates=["self.b"], idempotent=True)
    def step_to_b(self, work: Mapping[str, Any], batch: Batch) -> Metrics:
        """Compute a step from `a` to `b`; see `_step`."""
        return self._step(self._a, self._b, Work(**work, batch=batch))

    @method(updates=["self.a"], idempotent=True)
    def step_to_a(self, work: Mapping[str, Any], batch: Batch) -> Metrics:
        """Compute a step from `b` to `a`; see `_step`."""
        return self._step(self._b, self._a, Work(**work, batch=batch))

    @method(idempotent=True)
    def evaluate(self, is_b: bool, name: str, batch: Batch) -> Metrics:
        """Return the metrics of a rank's samples, if any.

        Args:
            is_b: Which copy of the state to read.
            name: ``"parameters"`` or ``"average"``.
            batch: The samples.
        """
        source = self._b if is_b else self._a
        flat = source[name]
        if name == AVERAGE and self.plan["shard"]:
            flat = self._empty((self.layout.padded,))
            shard = source[name] if flat.dtype == source[name].dtype else self._as(source[name], flat.dtype)
            current_rank().group("data").all_gather(shard, flat)
        self._load(flat, source.get("buffers"))
        return self._evaluated(batch) if batch else {}

    def _step(self, source: State, target: State, work: Work) -> Metrics:
        """Write the state after a step to `target`, which is not read.

        Returns:
            The mean loss of all samples, and the norm of its gradient before clipping.
        """
        mesh, is_apart, rank = self.mesh, self.plan["shard"], current_rank()
        rank_slice, data = self.layout.rank_slice(mesh.data_rank), rank.group("data")
        self._begin(source, target, work)
        loss = self._backward_all(work)
        gradient = self._summed(data)
        if "buffers" in target:
            self._save_buffers(target["buffers"])
            data.broadcast(target["buffers"])
        squares = self._squares(gradient, rank_slice)
        # Ranks with the same numbers each contribute a share, so that the sum is right.
        totals = self._numbers(loss / mesh.tensor, squares if is_apart else squares / mesh.data)
        rank.all_reduce(totals)
        after = {**target, "parameters": target["parameters"][rank_slice]}
        self._optimize(after, self._clipped(gradient, totals[1], work), work)
        if is_apart:
            data.all_gather(after["parameters"], target["parameters"])
        # Only here, because the host waits for the device, which has the whole step by now.
        mean, total = totals.tolist()
        norm, _ = work.clipped(total, self.plan["clip_norm"])
        return {"loss": mean, "norm": norm}

    def _backward_all(self, work: Work) -> Any:
        """Compute all gradients of this rank; return its part of the loss, which only the last stage has."""
        mesh, scale, loss = self.mesh, work.scale, 0.0
        samples = {name: self._native(array) for name, array in work.batch.items()}
        parts = [*work.parts(samples, self.plan["accumulate"])]
        order = [*turns(self.plan["schedule"], mesh.stage, mesh.pipeline, len(parts))]
        activations: dict[int, Any] = {}
        got = self._exchanged(None, None, order[0], parts)
        for turn, after in zip(order, (*order[1:], None), strict=True):
            direction, number = turn
            part, factor = parts[number]
            if direction == "forward":
                result, activations[number] = self._forward(part, got)
                if mesh.is_last:
                    loss = loss + result * factor
            else:
                self._end_with(number + 1 == len(parts))
                result = self._backward(activations.pop(number), factor * scale if mesh.is_last else got)
            got = self._exchanged(turn, result, after, parts)
        return loss

    def _exchanged(self, turn: Turn | None, result: Any, after: Turn | None, parts: Sequence[Any]) -> Any:
        """Send a turn's result to the next stage, and receive the input of the following turn, at once."""
        mesh, ways, got = self.mesh, {"forward": 1, "backward": -1}, None
        sends, receives = list[Any](), list[Any]()
        if turn is not None and 0 <= (to := mesh.stage + ways[turn[0]]) < mesh.pipeline:
            sends = [(result, to)]
        if after is not None and 0 <= (source := mesh.stage - ways[after[0]]) < mesh.pipeline:
            got = self._empty(self.output_shape(rows_of(parts[after[1]][0])))
            receives = [(got, source)]
        if sends or receives:
            current_rank().group("pipeline").exchange(sends, receives)
        return got

    # The code from here on depends on PyTorch.
    def _native(self, array: Array) -> Any:
        """Return an array of the state as a tensor with the same memory."""
        torch = torch_of_model()
        host: Any = array
        if isinstance(array, np.ndarray) and host.dtype == "bfloat16":
            # NumPy itself does not know the type, so DLPack refuses it.
            return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(array)

    def _prepare(self, options: Mapping[str, Any]) -> None:
        torch, plan = torch_of_model(), self.plan
        self._master = getattr(torch, plan["master"])
        device = self._a["parameters"].device
        if plan["base"]:
            # Frozen parameters are equal on each device if the host makes them, and if no other rank of this
            # process uses PyTorch's generator meanwhile.
            with CONFIGURING:
                torch.manual_seed(plan["seed"])
                self.model = self.configure(**options)
            named, checksums = dict(self.model.named_parameters()), plan["base"]
            check_base({name: on_host(named[name]) for name in named if name in checksums}, checksums)
            self.model.to(device)
        else:
            with torch.device(device):
                # Its first parameters are nothing: a GPU makes them in no time.
                self.model = self.configure(**options)
        recompute(self.model, plan["recompute"])
        compute = getattr(torch, plan["compute"])
        self._convert(compute)
        self._optimizer = Stepper(plan["optimizer"], plan["numbers"], plan["decays"])
        self._parts = [GroupPart(*part) for part in plan["parts"]]
        self._shapes = FlatLayout(*plan["shapes"])
        parameters = self._trained()
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        if difference := self.layout.difference(shapes):
            raise ValueError(f"configure() has made another model than before: {difference}")
        self._flat = torch.zeros(self.layout.padded, dtype=compute, device=device)
        self._slopes = self._total = torch.zeros_like(self._flat)
        if plan["reduce"] != plan["compute"]:
            self._total = torch.zeros_like(self._flat, dtype=getattr(torch, plan["reduce"]))
        # Buckets in the order of the backward pass, from the end: each with its slice and its parameters.
        self._buckets: list[tuple[slice, set[int]]] = []
        stop, inside, min_elements = self.layout.padded, set[int](), plan["bucket"] // self._flat.itemsize
        for number, (name, span, shape) in reversed([*enumerate(self.layout.entries())]):
            parameters[name].data = self._flat[span].view(shape)
            parameters[name].grad = self._slopes[span].view(shape)
            parameters[name].register_post_accumulate_grad_hook(partial(self._there, number))
            inside.add(number)
            if stop - span.start >= min_elements or not span.start:
                self._buckets.append((slice(span.start, stop), inside))
                stop, inside = span.start, set[int]()
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # The buckets to sum, with their missing gradients; none before the last part.
        self._waiting: list[tuple[slice, set[int]]] = []
        self._data: Any = None

    def _convert(self, compute: Any) -> None:
        """Convert frozen parameters and floating buffers to the dtype of the computations.

        Layers such as BatchNorm require the same dtype of both. Only layers with parameters get narrower
        buffers, so that tables, such as rotary frequencies, keep their digits.
        """
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name not in self.plan["frozen"])
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(compute)
        for layer in self.model.modules():
            has_parameters = next(layer.parameters(recurse=False), None) is not None
            for buffer in layer.buffers(recurse=False):
                is_wider = torch_of_model().promote_types(buffer.dtype, compute) == compute
                if buffer.is_floating_point() and (is_wider or has_parameters):
                    buffer.data = buffer.data.to(compute)

    def warm_up(self) -> None:
        """Load the code of a step with one sample of zeros, so that a spare worker is ready for a loss."""
        torch = torch_of_model()
        if self.mesh.pipeline > 1 or self.mesh.tensor > 1:
            return
        sample = self.plan["sample"].items()
        device = self._flat.device
        batch = {
            name: torch.zeros(1, *shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape) in sample
        }
        try:
            self.loss(batch).backward()
        except Exception:
            _logger.info("the model cannot be warmed up by zeros", exc_info=True)
        self._slopes.zero_()
        if not self._optimizer.has_shapes:
            state = {name: self._flat[:1].to(self._master) for name in ("parameters", *self.plan["states"])}
            pieces = self._optimizer.pieces(state, self._slopes[:1].to(self._master), [(0, slice(0, 1))])
            self._optimizer.step(pieces, 1, [0.0])
        if self._side is not None:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _begin(self, source: State, target: State, work: Work) -> None:
        seed = (self.plan["seed"] * 1_000_003 + work.number) * 1_000_003 + current_rank().number
        torch_of_model().manual_seed(seed)
        self._load(source["parameters"], source.get("buffers"))
        self._slopes.zero_()
        self._waiting = []
        # The optimizer works in place, so copy its input while the model computes.
        with self._beside():
            for name in ("parameters", *self.plan["states"]):
                target[name].copy_(source[name])

    def _load(self, flat: Any, buffers: Any) -> None:
        """Load parameters and buffers into the model."""
        self._flat.copy_(flat)
        for (_, span, shape), buffer in self._pairs():
            buffer.copy_(buffers[span].view(shape))

    def _save_buffers(self, flat: Any) -> None:
        """Write the buffers of the model to a flat array."""
        for (_, span, shape), buffer in self._pairs():
            flat[span].view(shape).copy_(buffer)

    def _evaluated(self, batch: Batch) -> Metrics:
        torch, mesh = torch_of_model(), self.mesh
        samples = {name: self._native(array) for name, array in batch.items()}
        torch.manual_seed(self.plan["seed"])
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                if mesh.pipeline == 1:
                    metrics = self.validate(samples)
                else:
                    parts = [(samples, 1.0)]
                    got = self._exchanged(None, None, ("forward", 0), parts)
                    output = self.stage(got, samples)
                    self._exchanged(("forward", 0), output, None, parts)
                    metrics = {"loss": output} if mesh.is_last else {}
        finally:
            for module, is_training in modes:
                module.training = is_training
        return {name: float(value) for name, value in metrics.items()}

    def _as(self, array: Any, dtype: Any) -> Any:
        return array.to(dtype)

    def _trained(self) -> dict[str, Any]:
        return {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }

    def _empty(self, shape: tuple[int, ...]) -> Any:
        return self._flat.new_empty(shape)

    def _forward(self, part: Batch, x: Any) -> tuple[Any, Any]:
        if x is not None:
            x.requires_grad_()
        output = self.stage(x, part)
        return output.detach().double() if self.mesh.is_last else output.detach().contiguous(), (x, output)

    def _backward(self, activations: Any, slope: Any) -> Any:
        x, output = activations
        if self.mesh.is_last:
            (output * slope).backward()
        else:
            output.backward(slope)
        return None if x is None else x.grad

    def _end_with(self, is_last: bool) -> None:
        if is_last and not self.plan["shard"]:
            # Autograd's threads do not have a rank of their own, so fetch it here.
            self._data = current_rank().group("data")
            self._waiting = [(part, set(inside)) for part, inside in self._buckets]

    def _there(self, number: int, _parameter: object) -> None:
        """Sum the buckets with complete gradients, in the bucket order, which is the same on all ranks."""
        for _, missing in self._waiting:
            missing.discard(number)
        while self._waiting and not self._waiting[0][1]:
            self._sum_next()

    def _sum_next(self) -> None:
        part, _ = self._waiting.pop(0)
        with self._beside():
            if self._total is not self._slopes:
                self._total[part] = self._slopes[part]
            self._data.all_reduce(self._total[part], stream=self._side)

    def _beside(self) -> AbstractContextManager[object]:
        """Enqueue after all enqueued work, and concurrently with the model's next work, on a GPU."""
        beside: AbstractContextManager[object] = nullcontext()
        if self._side is not None:
            self._side.wait_stream(torch_of_model().cuda.current_stream())
            beside = torch_of_model().cuda.stream(self._side)
        return beside

    def _summed(self, data: Any) -> Any:
        while self._waiting:
            # Parameters that the loss does not depend on hold their bucket up.
            self._sum_next()
        # The hooks of the model keep this object, and the rank's memory must end with its world.
        self._data = None
        if self._side is not None:
            torch_of_model().cuda.current_stream().wait_stream(self._side)
        total = self._total
        if self.plan["shard"]:
            if total is not self._slopes:
                total.copy_(self._slopes)
            total = total.new_empty(len(total) // data.size)
            data.reduce_scatter(self._total, total)
        return total.to(self._master)

    def _squares(self, gradient: Any, rank_slice: slice) -> Any:
        """Return the sum of a gradient's squares, of numbers that several ranks have its share."""
        # A sum in bfloat16 would have three digits.
        wide = gradient.float() if gradient.dtype == torch_of_model().bfloat16 else gradient
        return wide @ (wide if self.mesh.tensor == 1 else wide * self._counts()[rank_slice])

    def _clipped(self, gradient: Any, squares: Any, work: Work) -> Any:
        """Return a gradient no longer scaled, and clipped: as `Work.clipped` does, but on the device."""
        factor, max_norm = 1.0 / work.scale, self.plan["clip_norm"]
        if max_norm is not None:
            norm = squares.sqrt() / work.scale
            return gradient * torch_of_model().where(norm > max_norm, factor * max_norm / norm, factor)
        return gradient if factor == 1.0 else gradient * factor

    def _counts(self) -> Any:
        counts = self._flat.new_full((self.layout.padded,), 1.0 / self.mesh.tensor, dtype=self._master)
        parameters = self._trained()
        for name, span, _ in self.layout.entries():
            if getattr(parameters[name], "is_sharded", False):
                counts[span] = 1.0
        return counts

    def _pairs(self) -> Iterator[tuple[tuple[str, slice, tuple[int, ...]], Any]]:
        return zip(self.buffers.entries(), map(real_view, self.model.buffers()), strict=True)

    def _optimize(self, state: State, g: Any, work: Work) -> None:
        """Compute a step of the optimizer in place, by a gradient, and the average of the parameters."""
        optimizer = self._optimizer
        if optimizer.has_shapes:
            pieces = optimizer.shaped_pieces(state, g, self._parts, self.layout, self._shapes)
        else:
            pieces = optimizer.pieces(
                state, g, within(self._parts, self.layout.rank_slice(self.mesh.data_rank))
            )
        optimizer.step(pieces, work.number, work.rates)
        if AVERAGE in state:
            share = 1.0 if work.number == 1 else 1.0 - self.plan["average"]
            state[AVERAGE].lerp_(state["parameters"], share)

    def _numbers(self, *numbers: Any) -> Any:
        torch = torch_of_model()
        device = self._flat.device
        return torch.stack(
            [torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers]
        )


def check_base(arrays: Mapping[str, Any], checksums: Mapping[str, int]) -> None:
    """Require the frozen parameters of the beginning.

    Raises:
        ValueError: A parameter has another checksum.
    """
    for name, array in arrays.items():
        if checksums[name] != checksum_of(name, array):
            raise ValueError(
                f"configure() has made other numbers for {name!r} than before: parameters that are not "
                "trained must depend on its options and on the seed alone"
            )
