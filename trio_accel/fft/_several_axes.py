"""Transforms along several axes, batched over the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from ..backends.base.ops import ArraySpec, FftNorm
from ..devices import AccelRef, Operand, Operation, Planned, Planner
from ._actor import FftActor
from ._plan import Transform, check_axis, check_lengths, default_length, plan_transform, whole_numbers

__all__ = ["Fftn", "Hfftn", "Ifftn", "Ihfftn", "Irfftn", "Rfftn"]


@attrs.define(eq=False, on_setattr=None)
class _SeveralAxes(Operation[FftActor, AccelRef]):
    """What the transforms along several axes share."""

    a: Operand
    s: Sequence[int] | None = None
    axes: Sequence[int] | None = None
    norm: FftNorm | None = None
    out: AccelRef | None = None
    library: ClassVar[str] = "trio_accel.fft:FftActor"
    transform: ClassVar[Transform]

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Check the arguments and name the result."""
        name = planner.name
        source = planner.read("a", self.a)
        given = whole_numbers(name, "s", self.s)
        axes = _axes(name, source, whole_numbers(name, "axes", self.axes), given)
        lengths = self._lengths(name, source, axes, given)
        return plan_transform(planner, self.transform, source, axes, lengths, self.norm, self.out)

    def _lengths(
        self, name: str, source: ArraySpec, axes: tuple[int, ...], given: tuple[int, ...] | None
    ) -> tuple[int, ...]:
        if given is None:
            halved = axes[-1] if self.transform[0] == "c2r" else None
            return tuple(default_length(name, "s", source, axis, is_halved=axis == halved) for axis in axes)
        lengths = [
            default_length(name, "s", source, axis, is_halved=False) if length == -1 else length
            for axis, length in zip(axes, given, strict=True)
        ]
        check_lengths(name, "s", given, lengths)
        return tuple(lengths)


def _axes(
    name: str, source: ArraySpec, axes: tuple[int, ...] | None, given: tuple[int, ...] | None
) -> tuple[int, ...]:
    if axes is None:
        if given is not None and len(given) > source.ndim:
            raise ValueError(f"{name}: s must have a length for each axis, got {given} for {source.shape}")
        axes = tuple(range(-source.ndim if given is None else -len(given), 0))
    elif given is not None and len(given) != len(axes):
        raise ValueError(f"{name}: s must have a length for each of axes, got s {given} and axes {axes}")
    if not axes:
        raise ValueError(f"{name}: axes must name at least one axis, got none for a of shape {source.shape}")
    checked = tuple(check_axis(name, "axes:", axis, source) for axis in axes)
    if len(set(checked)) < len(checked):
        raise ValueError(f"{name}: axes must be distinct, got {axes} for a of shape {source.shape}")
    return checked


@attrs.define(eq=False, on_setattr=None)
class Fftn(_SeveralAxes):
    """Complex transform; see `fftn` and `fft2`."""

    transform: ClassVar[Transform] = ("c2c", "forward")


@attrs.define(eq=False, on_setattr=None)
class Ifftn(_SeveralAxes):
    """Inverse complex transform; see `ifftn` and `ifft2`."""

    transform: ClassVar[Transform] = ("c2c", "inverse")


@attrs.define(eq=False, on_setattr=None)
class Rfftn(_SeveralAxes):
    """Transform of a real array; see `rfftn` and `rfft2`."""

    transform: ClassVar[Transform] = ("r2c", "forward")


@attrs.define(eq=False, on_setattr=None)
class Irfftn(_SeveralAxes):
    """Inverse transform to a real array; see `irfftn` and `irfft2`."""

    transform: ClassVar[Transform] = ("c2r", "inverse")


@attrs.define(eq=False, on_setattr=None)
class Hfftn(_SeveralAxes):
    """Transform to a real spectrum; see `hfftn` and `hfft2`."""

    transform: ClassVar[Transform] = ("c2r", "forward")


@attrs.define(eq=False, on_setattr=None)
class Ihfftn(_SeveralAxes):
    """Inverse transform of a real spectrum; see `ihfftn` and `ihfft2`."""

    transform: ClassVar[Transform] = ("r2c", "inverse")
