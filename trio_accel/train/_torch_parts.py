"""The PyTorch parts of a step: its optimizers, and layers with recomputed results.

The model's module imports `torch`; this module does not.
"""

from __future__ import annotations

import importlib
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import attrs
import numpy as np

from ..backends.base import NotSupportedError
from ._groups import GroupPart
from ._layout import FlatLayout
from ._mesh import torch_of_model
from ._optimizers import SHAPED, Optimizer, constant, momentum_of

__all__: list[str] = []

# PyTorch has a single generator for all threads.
CONFIGURING = threading.Lock()
_CLASSES = {"adafactor": "torch.optim:Adafactor"}


@attrs.frozen(eq=False)
class Piece:
    """Tensors that a step changes in place.

    Attributes:
        group: The number of the parameter group.
        param: The parameters.
        grad: Their gradient.
        states: The optimizer's arrays for them, by name.
    """

    group: int
    param: Any
    grad: Any
    states: Mapping[str, Any]


class Stepper:
    """A PyTorch optimizer, made for each step from the state on the device.

    Args:
        kind: See `Optimizer`.
        numbers: See `Optimizer`.
        decays: The weight decay of each group; None if the optimizer lacks one.
    """

    def __init__(
        self, kind: str, numbers: Mapping[str, Any], decays: Sequence[float | None] = (None,)
    ) -> None:
        self._kind = kind
        self._numbers = dict(numbers)
        self._decays = decays
        self._states = Optimizer(kind, constant(0.0), numbers).states
        self.has_shapes: bool = self._states == (SHAPED,)

    def beginning(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return zeros with the shapes of the state after a first step, named ``"parameter/state"``.

        Raises:
            NotSupportedError: The state has other values than tensors and numbers for each parameter.
            ValueError: A group has a weight decay, but the optimizer has none.
        """
        torch = torch_of_model()
        pieces = [
            Piece(0, torch.zeros(*shape), torch.zeros(*shape), {name: None}) for name, shape in shapes.items()
        ]
        optimizer = self._optimizer_of(pieces, [1e-3])
        if "weight_decay" not in optimizer.defaults and any(decay is not None for decay in self._decays[1:]):
            raise ValueError(f"groups: {self._kind} does not take weight_decay")
        try:
            optimizer.step()
        except TypeError as error:
            raise NotSupportedError(f"{self._kind} needs more than gradients for a step: {error}") from error
        state: dict[str, Any] = {}
        for piece in pieces:
            [name] = piece.states
            for key, value in optimizer.state[piece.param].items():
                if value is not None and not isinstance(value, (int, float, torch.Tensor)):
                    raise NotSupportedError(f"{self._kind} keeps {key!r}, which is not a tensor: {value!r}")
                if value is not None:
                    state[f"{name}/{key}"] = np.zeros(getattr(value, "shape", ()), np.float64)
        return state

    def pieces(self, state: Mapping[str, Any], g: Any, spans: Sequence[tuple[int, slice]]) -> list[Piece]:
        """Return a piece for each group, if the state has the shape of the flat parameters."""
        return [
            Piece(
                group,
                state["parameters"][span],
                g[span],
                {name: state[name][span] for name in self._states},
            )
            for group, span in spans
        ]

    def shaped_pieces(
        self,
        state: Mapping[str, Any],
        g: Any,
        parts: Sequence[GroupPart],
        layout: FlatLayout,
        shapes: FlatLayout,
    ) -> list[Piece]:
        """Return a piece for each parameter."""
        states: dict[str, dict[str, Any]] = {name: {} for name in layout.names}
        for name, view in shapes.views(state[SHAPED]).items():
            owner, _, key = name.rpartition("/")
            states[owner][key] = view
        groups = [
            next(part.group for part in parts if span.stop <= part.stop) for _, span, _ in layout.entries()
        ]
        both = zip(layout.views(state["parameters"]).items(), layout.views(g).values(), groups, strict=True)
        return [Piece(group, param, grad, states[name]) for (name, param), grad, group in both]

    def step(self, pieces: Sequence[Piece], number: int, rates: Sequence[float]) -> None:
        """Take a step in place.

        Args:
            pieces: All that the rank changes.
            number: The number of the step, from 1 on.
            rates: The rate of each group.
        """
        if self._kind == "lion":
            for piece in pieces:
                self._lion(piece, rates[piece.group])
            return
        optimizer = self._optimizer_of(pieces, rates)
        for piece in pieces:
            if not self.has_shapes:
                optimizer.state[piece.param] = {**piece.states, **self._scalars(piece, number)}
            elif number > 1:
                # Before the first step, the optimizer makes its own state.
                optimizer.state[piece.param] = dict(self._restored(piece))
        optimizer.step()
        for piece in pieces:
            if self.has_shapes:
                for key, view in piece.states.items():
                    view.copy_(torch_of_model().as_tensor(optimizer.state[piece.param][key]))
            piece.param.grad = None

    def _optimizer_of(self, pieces: Sequence[Piece], rates: Sequence[float]) -> Any:
        optim, numbers = torch_of_model().optim, dict(self._numbers)
        numbers.pop("weight_decay", None)
        groups: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            piece.param.grad = piece.grad
            options: dict[str, Any] = {"params": [], "lr": rates[piece.group]}
            if self._decays[piece.group] is not None:
                options["weight_decay"] = self._decays[piece.group]
            groups.setdefault(piece.group, options)["params"].append(piece.param)
        if "beta1" in numbers:
            numbers["betas"] = numbers.pop("beta1"), numbers.pop("beta2")
        param_groups = [*groups.values()]
        if self._kind in ("adamw", "sgd"):
            # One launch for all elements of a group.
            return {"adamw": optim.AdamW, "sgd": optim.SGD}[self._kind](param_groups, fused=True, **numbers)
        if self._kind == "nadam":
            return optim.NAdam(param_groups, **numbers)
        if not self.has_shapes:
            raise NotSupportedError(f"{self._kind} is not an optimizer of PyTorch")
        module, _, name = _CLASSES.get(self._kind, self._kind).partition(":")
        target: Any = operator.attrgetter(name)(importlib.import_module(module))
        if "weight_decay" in self._numbers:
            numbers["weight_decay"] = self._numbers["weight_decay"]
        return target(param_groups, lr=rates[0], **numbers)

    def _scalars(self, piece: Piece, number: int) -> dict[str, Any]:
        torch = torch_of_model()
        if self._kind == "adamw":
            return {"step": torch.full((), float(number - 1), device=piece.param.device)}
        if self._kind == "nadam":
            product = momentum_of(self._numbers, number)[2]
            scalars = {"step": float(number - 1), "mu_product": product}
            return {name: torch.tensor(value, dtype=torch.float64) for name, value in scalars.items()}
        return {}

    def _restored(self, piece: Piece) -> Iterator[tuple[str, Any]]:
        torch = torch_of_model()
        is_near = self._numbers.get("fused") or self._numbers.get("capturable")
        for key, view in piece.states.items():
            if view.shape:
                yield key, view.clone()
            else:
                # PyTorch keeps the step number on the host, unless it is `capturable` or fused.
                wide = torch.get_default_dtype() if view.dtype == torch.float64 else view.dtype
                yield key, view.to(view.device if is_near else "cpu", wide, copy=True)

    def _lion(self, piece: Piece, rate: float) -> None:
        first, second = self._numbers["beta1"], self._numbers["beta2"]
        mean, decay = piece.states["exp_avg"], self._decays[piece.group] or 0.0
        direction = mean.lerp(piece.grad, 1.0 - first).sign_()
        piece.param.mul_(1.0 - rate * decay).sub_(direction, alpha=rate)
        mean.lerp_(piece.grad, 1.0 - second)


def recompute(model: Any, patterns: Sequence[str]) -> None:
    """Have layers compute their inner results again in the backward pass.

    Args:
        model: The `torch.nn.Module`.
        patterns: Names of layers, where ``*`` and ``?`` match no dot.

    Raises:
        ValueError: A pattern matches no layer.
    """
    for pattern in patterns:
        layers = [layer for name, layer in model.named_modules() if matches(pattern, name)]
        if not layers:
            raise ValueError(f"recompute: {pattern!r} matches no layer of the model")
        checkpoint: Any = importlib.import_module("torch.utils.checkpoint").checkpoint
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def matches(pattern: str, name: str) -> bool:
    """Return whether a name with dots matches a pattern; stars match no dot."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatchcase, parts, pattern_parts))


def on_host(tensor: Any) -> Any:
    """Return a tensor as a host array; narrow numbers become float32."""
    narrow = tensor.dtype in (torch_of_model().float16, torch_of_model().bfloat16)
    return (tensor.float() if narrow else tensor).detach().cpu().numpy()


def real_view(tensor: Any) -> Any:
    """Return a complex tensor as a real view with a last axis of 2, and any other tensor unchanged."""
    return torch_of_model().view_as_real(tensor) if tensor.is_complex() else tensor


def host_dtype(tensor: Any) -> str:
    """Return the dtype of `on_host`'s array."""
    name = str(tensor.dtype).removeprefix("torch.")
    return "float32" if name in ("float16", "bfloat16") else name
