"""Transforms of expressions, and expressions of their results, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

import attrs

from ..actors import unknown_option
from ..backends.base.contract.ops import FFT_DTYPES, FftNorm, FusedFftSpec, in_between
from ..devices import AccelRef, ArrayFunction, Call, Operation, Planned, Planner
from ..expressions import Elementwise, ExpressionArgument, Out, bind
from ._functions import FftTransform

__all__ = ["ComputeFused", "FusedTransform", "fused"]

_LIBRARY = "trio_accel.fft:FftActor"
_OPTIONS = ("n", "axis", "s", "axes", "norm", "out")


def fused(
    transform: Callable[..., Coroutine[Any, Any, AccelRef]], prolog: str = "x", epilog: str = "y"
) -> FusedTransform:
    """Make a function that computes a transform of an expression, and an expression of the result.

    On CUDA, cuFFT computes both while it loads and stores elements (LTO callbacks), if it supports them for
    the transform, so that no intermediate array is written. Otherwise they are separate launches, or NumPy's,
    with the same numbers except for rounding.

    >>> import trio_accel as ta
    >>> ta.fft.fused(ta.fft.rfft, "x * window", "abs(y) ** 2")
    <FusedTransform fft.fused_rfft(x, window)>

    Args:
        transform: A function of this package: `fft`, `irfftn` and so on.
        prolog: The expression to transform, of the array ``x`` and others, see `jit.elementwise`. Arrays
            broadcast. Its dtype must have the transform; a real one is converted for complex transforms. So
            ``"float32(x)"`` transforms integers, or float16.
        epilog: The result: an expression of the spectrum ``y`` and of other arrays and numbers, which
            broadcast to its shape. It may have another dtype, as ``"abs(y)"`` does.

    Raises:
        TypeError: `transform` is not such a function.
        ValueError: An expression contains something that is not allowed, does not read ``x`` or ``y``, loads
            elements of ``y`` by indices, or has an input with the name of an option.
    """
    fft_transform = getattr(transform, "transform", None)
    if not isinstance(fft_transform, FftTransform):
        raise TypeError(f"fft.fused: transform must be a function of trio_accel.fft, got {transform!r}")
    return FusedTransform(fft_transform, prolog, epilog)


class FusedTransform:
    """A transform between two expressions; see `fused`, which makes one.

    Attributes:
        operation: Name of the operation.
        inputs: Names of its arguments, in order: ``x``, the prolog's, the epilog's.
    """

    __slots__ = ("_asked", "epilog", "inputs", "operation", "prolog", "transform")

    def __init__(self, transform: FftTransform, prolog: str, epilog: str) -> None:
        self.transform: FftTransform = transform
        self.operation: str = f"fft.fused_{transform.name}"
        self._asked = ArrayFunction(self.operation, self.compute)
        self.prolog: Elementwise[AccelRef] = _expression(self.operation, prolog, "x")
        self.epilog: Elementwise[AccelRef] = _expression(self.operation, epilog, "y")
        if self.epilog.is_loaded("y"):
            raise ValueError(f"{self.operation}: the epilog can read y at the place of the element only")
        self.inputs: tuple[str, ...] = tuple(dict.fromkeys((*self.prolog.inputs, *self.epilog.inputs[1:])))
        taken = [name for name in (*self.prolog.inputs, *self.epilog.inputs) if name in _OPTIONS]
        if taken or "x" in self.epilog.inputs or "y" in self.prolog.inputs:
            label = f"{taken[0]}: that is an option" if taken else "x in the epilog, or y in the prolog"
            raise ValueError(f"{self.operation}: an input cannot have the name {label}")

    def __repr__(self) -> str:
        return f"<FusedTransform {self.operation}({', '.join(self.inputs)})>"

    def compute(
        self, *arguments: ExpressionArgument, norm: FftNorm | None = None, out: Out = None, **named: Any
    ) -> ComputeFused:
        """Make the message that computes it: ``device.submit(transform.compute(...))``.

        Raises:
            TypeError: Too few or too many arguments, or an option that the transform has not.
        """
        is_one = isinstance(self.transform.default_axes, int)
        defaults = {"n": None, "axis": -1} if is_one else {"s": None, "axes": self.transform.default_axes}
        options = {name: named.pop(name, value) for name, value in defaults.items()}
        for name in named:
            if name in _OPTIONS:
                raise unknown_option(self.operation, name, (*self.inputs, *defaults, "norm", "out"))
        operands = bind(self.operation, self.inputs, arguments, named, options=(*defaults, "norm", "out"))
        return ComputeFused(self, operands, norm, out, **options)

    def __call__(
        self, *arguments: ExpressionArgument, norm: FftNorm | None = None, out: Out = None, **named: Any
    ) -> Call[AccelRef]:
        """Compute it on the device of its arrays, once it is awaited.

        Args:
            *arguments: Arrays and numbers, in the order of `inputs`.
            norm: The transform's.
            out: Array of the result's shape and dtype to write to, which shares no memory with the others;
                by default a new one.
            **named: Arguments by their names; and `n` and `axis`, or `s` and `axes`, as of the transform.

        Returns:
            The result.

        Raises:
            TypeError: A wrong argument; or the prolog makes a dtype without a transform.
            ValueError: See the transform; or shapes that do not broadcast.

        See `Device.ask` for cancellation and the errors that any operation can end with.
        """
        return Call(self._asked, arguments, {**named, "norm": norm, "out": out})


@attrs.frozen(eq=False)
class ComputeFused(Operation[Any, AccelRef]):
    """One computation of a fused transform; see `FusedTransform.compute`, which makes one.

    Attributes:
        fused: The transform.
        arguments: One for each of its inputs.
        norm: The transform's, and so are the others.
    """

    library: ClassVar[str] = _LIBRARY

    fused: FusedTransform
    arguments: tuple[ExpressionArgument, ...]
    norm: FftNorm | None = None
    out: AccelRef | None = None
    n: int | None = None
    axis: int = -1
    s: Sequence[int] | None = None
    axes: Sequence[int] | None = None

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self.fused.operation

    def plan(self, planner: Planner) -> Planned[AccelRef]:
        """Find types and shapes, and name the result."""
        name, fused, transform = planner.name, self.fused, self.fused.transform
        operands = dict(zip(fused.inputs, self.arguments, strict=True))
        prolog, epilog = fused.prolog, fused.epilog
        first = getattr(operands["x"], "shape", ())
        prolog_arguments = prolog.take(planner, [operands[key] for key in prolog.inputs], otherwise=first)
        typed_prolog = prolog.known_of(name, prolog_arguments, (None,))
        prolog_dtype, dtype = typed_prolog.dtypes[0], transform.dtype_of(typed_prolog.dtypes[0])
        transformed_dtype = FFT_DTYPES[transform.kind].get(dtype)
        if transformed_dtype is None:
            allowed = "float32 or float64" if transform.kind == "r2c" else "a dtype of fft"
            raise TypeError(
                f"{name}: the prolog must make {allowed}, it makes {prolog_dtype}; try 'float32(x)'"
            )
        source = in_between(-1, dtype, prolog_arguments.shape)
        if dtype is not prolog_dtype:
            typed_prolog = prolog.known_of(name, prolog_arguments, (source,))
        axes, lengths, shape = transform.fit(name, self, source)
        epilog_arguments = epilog.take(
            planner,
            [in_between(-2, transformed_dtype, shape), *[operands[key] for key in epilog.inputs[1:]]],
            shape,
        )
        typed_epilog = epilog.known_of(name, epilog_arguments, (self.out,))
        result = planner.output(shape, typed_epilog.dtypes[0], self.out)
        if self.out is not None:
            read = (
                *prolog_arguments.lying,
                *prolog_arguments.loaded,
                *epilog_arguments.lying[1:],
                *epilog_arguments.loaded,
            )
            for array in read:
                planner.distinct("out", result.spec, **{"an argument": array})
        has_prolog = prolog.text != "x" or prolog_arguments.arrays[0].dtype is not dtype
        has_epilog = epilog.text != "y" or result.dtype is not transformed_dtype
        spec = FusedFftSpec(
            transform.kind,
            transform.direction,
            lengths,
            axes,
            self.norm or "backward",
            dtype.value,
            prolog_arguments.shape,
            typed_prolog.program,
            int(has_prolog),
            prolog_arguments.arrays,
            prolog_arguments.loaded,
            prolog_arguments.scalars,
            typed_epilog.program,
            int(has_epilog),
            epilog_arguments.arrays[1:],
            epilog_arguments.loaded,
            epilog_arguments.scalars,
            result.spec,
        )
        return Planned(spec, result, is_checked=True)


def _expression(operation: str, text: str, element: str) -> Elementwise[AccelRef]:
    """Parse an expression with the element as its first argument."""
    expression = Elementwise[AccelRef](text, operation=operation, library=_LIBRARY)
    if element not in expression.inputs:
        raise ValueError(f"{operation}: {text!r} does not read {element}")
    other_inputs = [name for name in expression.inputs if name != element]
    return Elementwise[AccelRef](text, inputs=(element, *other_inputs), operation=operation, library=_LIBRARY)
