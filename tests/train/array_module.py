"""A model in NumPy that takes the place of PyTorch's, so that steps of ranks are tested without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from trio_accel import train
from trio_accel.programs import current_rank

Arrays = Mapping[str, Any]


class ArrayModule(train.Module):
    """A model that computes its own gradients.

    It has `initial` and `gradients`; a stage of a pipeline has `forward`, `backward` and `output_shape`
    instead of the latter. `rng` has the same numbers if a step is done again. Each rank of a shared layer has
    a part of the parameters in `sharded`.
    """

    rng: np.random.Generator
    sharded: ClassVar[Sequence[str]] = ()

    def initial(self, rng: np.random.Generator, **options: Any) -> Arrays:
        """Return the parameters of the beginning by name."""
        raise NotImplementedError

    def gradients(self, parameters: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        """Return the mean loss of some samples, and its gradients by the names of the parameters."""
        raise NotImplementedError(f"{type(self).__name__} must define gradients()")

    def forward(self, parameters: Arrays, x: Any, batch: Arrays) -> tuple[Any, object]:
        """Return this stage's result for `x`, the last one the mean loss; and the state for `backward`."""
        return self.gradients(parameters, batch)

    def backward(self, parameters: Arrays, kept: Any, slope: Any) -> tuple[Any, Arrays]:
        """Return the gradients for `x` and for the parameters, from the state of `forward`."""
        return None, {name: one * slope for name, one in kept.items()}

    def start(self, seed: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return dict(self.initial(np.random.default_rng(seed), **options)), {}

    def base(self) -> dict[str, int]:
        return {}

    def _native(self, array: Any) -> Any:
        return array

    def _prepare(self, options: Mapping[str, Any]) -> None:
        self.options: Mapping[str, Any] = options

    def warm_up(self) -> None:
        return

    def _begin(self, source: Arrays, target: Arrays, work: Any) -> None:
        self.rng = np.random.default_rng((self.plan["seed"], work.number, current_rank().number))
        self._load(source["parameters"], None)
        self._total = np.zeros(self.layout.padded, self.plan["reduce"])
        for name in ("parameters", *self.plan["states"]):
            target[name][:] = source[name]

    def _load(self, flat: Any, buffers: Any) -> None:
        self._parameters = self.layout.views(flat.astype(self.plan["compute"]))

    def _as(self, array: Any, dtype: Any) -> Any:
        return array.astype(dtype)

    def _evaluated(self, batch: Arrays) -> dict[str, float]:
        return {"loss": float(self.forward(self._parameters, None, batch)[0])}

    def _empty(self, shape: tuple[int, ...]) -> Any:
        return np.empty(shape, self.plan["compute"])

    def _forward(self, part: Arrays, x: Any) -> tuple[Any, Any]:
        made, kept = self.forward(self._parameters, x, part)
        return float(made) if self.mesh.is_last else np.ascontiguousarray(made), kept

    def _backward(self, kept: Any, slope: Any) -> Any:
        below, found = self.backward(self._parameters, kept, slope)
        self._total += self.layout.flattened(found, self.plan["compute"])
        return None if below is None else np.ascontiguousarray(below)

    def _summed(self, data: Any) -> Any:
        total = self._total
        if self.plan["shard"]:
            total = np.empty(len(total) // data.size, total.dtype)
            data.reduce_scatter(self._total, total)
        else:
            data.all_reduce(total, "sum")
        return total.astype(self.plan["master"], copy=False)

    def _squares(self, gradient: Any, own: slice) -> Any:
        return gradient @ (gradient if self.mesh.tensor == 1 else gradient * self._counts()[own])

    def _clipped(self, gradient: Any, squares: Any, work: Any) -> Any:
        return gradient * work.clipped(float(squares), self.plan["clip_norm"])[1]

    def _counts(self) -> Any:
        counts = np.full(self.layout.padded, 1.0 / self.mesh.tensor)
        for name, place, _ in self.layout.entries():
            if name in self.sharded:
                counts[place] = 1.0
        return counts

    def _numbers(self, *numbers: Any) -> Any:
        return np.array(numbers, np.float64)

    def _end_with(self, is_last: bool) -> None:
        return

    def _optimize(self, state: Arrays, g: Any, work: Any) -> None:
        own = self.layout.rank_slice(self.mesh.data_rank)
        for group, start, stop in self.plan["parts"]:
            place = slice(max(start, own.start) - own.start, max(min(stop, own.stop) - own.start, 0))
            part = {name: state[name][place] for name in ("parameters", *self.plan["states"])}
            self._update(part, g[place], work.rates[group], self.plan["decays"][group], work.number)
        if "average" in state:
            share = 1.0 if work.number == 1 else 1.0 - self.plan["average"]
            average = state["average"]
            average += share * (state["parameters"] - average)

    def _update(self, state: Arrays, g: Any, rate: float, decay: float, number: int) -> None:
        numbers, param = self.plan["numbers"], state["parameters"]
        if self.plan["optimizer"] == "adamw":
            one, two = numbers["beta1"], numbers["beta2"]
            m, v = state["exp_avg"], state["exp_avg_sq"]
            m += (1 - one) * (g - m)
            v[:] = two * v + (1 - two) * (g * g)
            slope = m / ((np.sqrt(v / (1 - two**number)) + numbers["eps"]) * (1 - one**number))
            param[:] = (1 - rate * decay) * param - rate * slope
            return
        g = g + decay * param
        if "momentum_buffer" in state:
            buffer = state["momentum_buffer"]
            buffer[:] = g = numbers["momentum"] * buffer + g
        param -= rate * g
