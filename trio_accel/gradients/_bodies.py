"""Gradients of composed functions by the functions' own bodies.

A composed function awaits other operations. `OpenDevice.body_of` runs its body without a launch and returns
the operations that it asked for; this module makes calls of them, and the rules of these calls are the
gradient. So such a function needs no rule.

Operations know arrays by blocks and layouts. `_Calls` knows the call that has made each block, and
`_viewed` composes the call of any layout in it. An operation must be known in full: as the message of a
public function whose parameters are its fields, or as an expression. Any other operation is repeated as it
is, if no operand of the gradient can reach it, and refused otherwise.

`BODIES` lists the functions. The tests hold each of them against differences, because a body can be right
and not smooth: it may select elements by a comparison, or divide by a distance that is 0.
"""

# Operands are calls and arrays, and a call's result is untyped before it is awaited.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import attrs
import numpy as np

from .. import arrays as _arrays
from ..backends.base import ArraySpec, NotSupportedError
from ..devices import AccelRef, ArrayFunction, Call, arguments_of, gather
from ..devices.front._layout import map_tree
from ..devices.front._memory import Copy
from ..devices.front._slots import Slot
from ..devices.operations._chain import device_of_call
from ..devices.operations._declared import DECLARED as OPERATIONS
from ..expressions import DECLARED, Compute, Contract, Reduction
from ._backward import KINDS, REASONS, STEP_NAMES, bound, is_operand, is_public, put_like, rule_of
from ._elementwise import Rule
from ._memo import memoized
from ._rules import composition

__all__ = ["BODIES", "through_body", "value_by_body"]

# These functions are typed by the results of awaited calls, but the rules compose calls.
arrays: Any = _arrays

_NAMES = {
    "arrays": (
        "average corrcoef cov diag diff gather_nd gradient interp median nan_to_num nanmedian "
        "nanpercentile nanquantile percentile polyval quantile repeat select take_along_axis tile "
        "trapezoid tril triu vander"
    ),
    "fft": (
        "convolve correlate dct dctn dst dstn fftconvolve fftshift hilbert idct idctn idst idstn "
        "ifftshift oaconvolve"
    ),
    "linalg": "cross kron matrix_power multi_dot outer tensordot trace vecdot",
    "ndimage": (
        "affine_transform gaussian_filter gaussian_filter1d gaussian_laplace laplace "
        "map_coordinates maximum_filter maximum_filter1d median_filter minimum_filter "
        "minimum_filter1d percentile_filter prewitt rank_filter rotate shift sobel uniform_filter "
        "uniform_filter1d zoom"
    ),
    "nn": (
        "batch_norm batch_norm_training_grad binary_cross_entropy binary_cross_entropy_grad "
        "binary_cross_entropy_with_logits_grad conv_bias_grad cosine_embedding_loss "
        "cross_entropy_grad dropout_grad gaussian_nll_loss gaussian_nll_loss_grad gelu gelu_grad "
        "glu_grad group_norm group_norm_grad hinge_embedding_loss hinge_embedding_loss_grad "
        "huber_loss_grad instance_norm instance_norm_grad kl_div kl_div_grad l1_loss l1_loss_grad "
        "layer_norm_grad margin_ranking_loss margin_ranking_loss_grad mse_loss mse_loss_grad "
        "nll_loss poisson_nll_loss_grad rms_norm_grad smooth_l1_loss_grad soft_margin_loss "
        "soft_margin_loss_grad triplet_margin_loss"
    ),
    "signal": "resample stft welch",
    "tensor": "contract permute reduce",
}
BODIES: frozenset[str] = frozenset(
    f"{room}.{name}" for room, names in _NAMES.items() for name in names.split()
)
"""The names of the functions."""


def _of_listed(call: Any, g: Any) -> Iterator[Rule] | None:
    """Yield gradients of a listed function; return None for other functions."""
    function = call.function
    return through_body(call, g) if function.name in BODIES and is_public(function) else None


def through_body(call: Any, g: Any) -> Iterator[Rule]:
    """Yield gradients of a composed function by its body.

    Raises:
        NotSupportedError: The body changes an array, reads elements on the host, or asks for an operation
            that no public function has.
    """
    return composition(partial(_composed, call.function))(call, g)


def value_by_body(call: Any, like: Any) -> Any:
    """Return a call with the result of another one, by its function's body.

    Host operands are put on the device of `like`.
    """
    return _composed(call.function, **bound(call, like))


def _composed(function: ArrayFunction, **named: Any) -> Any:
    """Return a call with a function's result, made from the operations of its body."""
    args = _by_place(inspect.signature(function.make).parameters, named)
    step = Call[Any](function, args, named)
    step.silence()
    try:
        _check_numbers(step)
        device: Any = device_of_call(step)
        body = device.body_of(step, _is_whole)
        return _Calls(body).result()
    except NotSupportedError as error:
        message = f"{function.name} has no gradient here, because of its body: {error.message}"
        raise NotSupportedError(message, operation=function.name) from None


def _check_numbers(step: Any) -> None:
    """Refuse numbers of a step: a body may compute with a number, and this one changes."""
    if any(isinstance(argument, Slot) for argument in arguments_of(step)):
        raise NotSupportedError("a number of the step is an argument; pass it as an array")


def _by_place(parameters: Mapping[str, inspect.Parameter], named: dict[str, Any]) -> tuple[Any, ...]:
    """Take the arguments that are not keywords out of named ones."""
    args = list[Any]()
    for name, parameter in parameters.items():
        if name not in named or parameter.kind is parameter.KEYWORD_ONLY:
            break
        args.append(named.pop(name))
    return tuple(args)


def _is_whole(function: ArrayFunction) -> bool:
    """Return whether calls of a composed function are kept, because it has its own gradient."""
    name = function.name
    return rule_of(function) is not None or name in BODIES or name in STEP_NAMES or name in REASONS


class _Calls:
    """The calls of a body.

    Args:
        body: The body.
    """

    def __init__(self, body: Any) -> None:
        self._body = body
        # The call that makes each block, and the layout of its result. The body keeps the blocks.
        self._known: dict[int, tuple[Any, ArraySpec]] = {}
        # The blocks that change with an operand of the gradient.
        self._active: set[int] = set()
        self._like = next(operand for operand, _ in body.operands)
        # The memory of every result in the body.
        self._table = body.operands[0][1].block.table
        for operand, placeholder in body.operands:
            self._note(operand, placeholder, is_active=is_operand(operand))
        for asked, result in body.steps:
            if result is None:
                # It only checks.
                continue
            is_active = any(id(ref.block) in self._active for ref in _refs_of(asked))
            call = self._call_of(asked)
            if call is None and is_active:
                raise NotSupportedError(f"no function is known for {asked.operation}")
            call = self._repeated(asked) if call is None else call
            call.silence()
            if isinstance(asked, Call):
                # It was found for the same function.
                call.layouts = map_tree(result, _spec_of)
            self._note(call, result, is_active=is_active)

    def result(self) -> Any:
        """Return a call with the function's result, or with all its results."""
        result = self._body.result
        if isinstance(result, (tuple, list)):
            return gather(*[put_like(self._with_calls(part), self._like) for part in result])
        if not isinstance(result, AccelRef):
            raise NotSupportedError(f"its result is of type {type(result).__name__}")
        value = self._with_calls(result)
        return value if isinstance(value, Call) else arrays.reshape(value, value.shape)

    def _note(self, call: Any, result: Any, *, is_active: bool) -> None:
        if isinstance(result, AccelRef):
            # The array that the body has written to may have another dtype, and more elements.
            if call.dtype != result.dtype:
                call = call.cast(result.dtype)
            if call.shape != result.shape:
                call = arrays.broadcast_to(call, result.shape)
            call.silence()
            self._known[id(result.block)] = call, result.spec
            # The block may have had other elements before.
            self._active.discard(id(result.block))
            if is_active and result.dtype.kind in ("float", "complex"):
                self._active.add(id(result.block))
        elif isinstance(result, (tuple, list)):
            for number, part in enumerate(result):
                if part is not None:
                    of_part = call[number]
                    of_part.silence()
                    self._note(of_part, part, is_active=is_active)

    def _with_calls(self, value: Any) -> Any:
        """Return a value with calls in place of the arrays of the body."""
        if isinstance(value, AccelRef):
            if id(value.block) not in self._known:
                if value.block.table is self._table:
                    raise NotSupportedError("it reads memory of an unknown operation")
                # An array of the program, which is a constant.
                return value
            call, spec = self._known[id(value.block)]
            view = _viewed(call, spec, value.spec)
            # The body may not use it.
            view.silence()
            return view
        if type(value) in (list, tuple):
            return type(value)([self._with_calls(item) for item in value])
        return value

    def _call_of(self, asked: Any) -> Any:
        """Return the call of a function with the same result as an operation; None without one."""
        if isinstance(asked, Call):
            named = {name: self._with_calls(value) for name, value in (asked.named or {}).items()}
            return Call[Any](asked.function, tuple(map(self._with_calls, asked.args)), named or None)
        if isinstance(asked, Compute):
            return self._computed(asked)
        if type(asked) is Copy:
            source = self._with_calls(asked.source)
            return source.copy() if asked.dtype is None else source.cast(asked.dtype)
        if type(asked) is Contract:
            return self._contracted(asked)
        fields = _fields(asked)
        declared = next(
            (function for function in OPERATIONS.values() if function.message is type(asked)), None
        )
        if declared is None:
            # A private message of a public function may also say which of several functions it is.
            fields.pop("function", None)
            room, _, base = asked.operation.partition(".")
            declared = getattr(sys.modules.get(f"trio_accel.{room}"), base, None)
            if declared is None or {*inspect.signature(declared).parameters} != {*fields, "out"}:
                return None
        named = {name: self._with_calls(value) for name, value in fields.items()}
        return declared(*_by_place(inspect.signature(declared).parameters, named), **named)

    def _computed(self, asked: Any) -> Any:
        """Return the call of an expression, or of the public function that is declared by it."""
        expression, arguments = asked.expression, [self._with_calls(argument) for argument in asked.arguments]
        if isinstance(expression, Reduction):
            options = {"axis": asked.axis, "keepdims": asked.keepdims}
        else:
            options = {} if asked.shape is None else {"shape": asked.shape}
        public = _public_of(expression)
        if public is None:
            return expression(*arguments, **options)
        named = dict(zip(expression.inputs, arguments, strict=True))
        args = _by_place(inspect.signature(public).parameters, named)
        return public(*args, **named, **options)

    def _contracted(self, asked: Any) -> Any:
        linalg: Any = import_module("trio_accel.linalg")
        product = linalg.einsum(asked.subscripts, self._with_calls(asked.a), self._with_calls(asked.b))
        product = product if asked.alpha == 1 else product * asked.alpha
        # Without a factor, the elements of `c` are not read, and may be NaN.
        return product + self._with_calls(asked.c) * asked.beta if asked.beta else product

    def _repeated(self, asked: Any) -> Any:
        """Return a call that asks for the same operation, of which a gradient needs no derivative."""
        refs = list(_refs_of(asked))
        function = ArrayFunction("gradients.repeated", partial(_with_arrays, asked), "message")
        return Call[Any](function, tuple(map(self._with_calls, refs)) or (self._like,))


def _fields(asked: Any) -> dict[str, Any]:
    """Return the fields of a message, but for the arrays to write to."""
    fields: dict[str, Any] = attrs.asdict(asked, recurse=False)
    fields.pop("out", None)
    return fields


def _spec_of(ref: Any) -> Any:
    return ref.spec


def _refs_of(asked: Any) -> Iterator[AccelRef]:
    """Yield the arrays of an operation, or of a call."""
    if isinstance(asked, AccelRef):
        yield asked
    elif isinstance(asked, (list, tuple)):
        for item in asked:
            yield from _refs_of(item)
    elif isinstance(asked, Call):
        yield from _refs_of([*asked.args, *(asked.named or {}).values()])
    elif attrs.has(type(asked)):
        for value in _fields(asked).values():
            if isinstance(value, (AccelRef, list, tuple)):
                yield from _refs_of(value)


def _with_arrays(asked: Any, *refs: Any) -> Any:
    """Return an operation with other arrays."""
    remaining = iter(refs)

    def replaced(value: Any) -> Any:
        if isinstance(value, AccelRef):
            return next(remaining)
        return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

    fields = {name: replaced(value) for name, value in _fields(asked).items()}
    if hasattr(asked, "out"):
        out: Any = asked.out
        fields["out"] = (None,) * len(out) if isinstance(out, tuple) else None
    return attrs.evolve(asked, **fields)


@memoized
def _public_of(expression: Any) -> Any:
    """Return the public function that an expression declares; None for other expressions."""
    for function in DECLARED.values():
        if getattr(function, "expression", None) is expression:
            return function
    return None


# Layouts.


def _viewed(x: Any, base: ArraySpec, spec: ArraySpec) -> Any:
    """Return the elements of a call at a layout's places.

    Args:
        x: The call.
        base: The layout of its result.
        spec: Another layout in the same memory.
    """
    if (spec.dtype, spec.shape, spec.strides, spec.offset) == (
        base.dtype,
        base.shape,
        base.strides,
        base.offset,
    ):
        return x
    if spec.dtype is not base.dtype:
        raise NotSupportedError(f"it views {base.dtype} as {spec.dtype}")
    if 0 in spec.shape:
        return arrays.reshape(arrays.reshape(x, (-1,))[0:0], spec.shape)
    size = base.dtype.itemsize
    # In the order of memory, in which the elements have no gaps.
    order = sorted(range(base.ndim), key=lambda axis: (-base.strides[axis], axis))
    extents = [base.shape[axis] for axis in order]
    if list(_strides(extents)) != [
        stride if extent == 1 else base.strides[axis] // size
        for axis, extent, stride in zip(order, extents, _strides(extents), strict=True)
    ]:
        raise NotSupportedError("it views an array with gaps")
    if order != list(range(base.ndim)):
        x = arrays.permute_dims(x, tuple(order))
    first = (spec.offset - base.offset) // size
    axes = [
        (extent, stride // size)
        for extent, stride in zip(spec.shape, spec.strides, strict=True)
        if extent > 1 and stride
    ]
    # An axis with stride 0 repeats its elements.
    narrow = tuple(
        1 if not stride else extent for extent, stride in zip(spec.shape, spec.strides, strict=True)
    )
    part = _part(x, extents, first, axes)
    if tuple(part.shape) != narrow:
        part = arrays.reshape(part, narrow)
    return part if narrow == spec.shape else arrays.broadcast_to(part, spec.shape)


def _strides(extents: Sequence[int]) -> list[int]:
    return [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]


def _part(x: Any, extents: Sequence[int], first: int, axes: Sequence[tuple[int, int]]) -> Any:
    """Return the elements at the places `first` + a multiple of a step for each axis, without axes of 1.

    Args:
        x: A call, of an array without gaps.
        extents: Its shape.
        first: The place of the first element.
        axes: The extent, and the step in elements, of each axis of the result.
    """
    total = math.prod(extents)
    if not first and math.prod(extent for extent, _ in axes) == total:
        sizes = [extent for extent, _ in axes]
        if [step for _, step in axes] == _strides(sizes):
            return arrays.reshape(x, tuple(sizes))
    for shape in (extents, _refined(extents, axes)):
        if shape is not None and (keys := _keys(shape, first, axes)) is not None:
            slices, order = keys
            if list(x.shape) != list(shape):
                x = arrays.reshape(x, tuple(shape))
            if any(key != slice(0, extent, 1) for key, extent in zip(slices, shape, strict=True)):
                x = x[tuple(slices)]
            # Axes of 1 come last.
            order += [axis for axis in range(len(shape)) if axis not in order]
            if order != sorted(order):
                x = arrays.permute_dims(x, tuple(order))
            return arrays.reshape(x, tuple([extent for extent, _ in axes]))
    indices = np.full((1,) * len(axes), first, np.int64)
    for axis, (extent, step) in enumerate(axes):
        line = [1] * len(axes)
        line[axis] = extent
        indices = indices + (np.arange(extent) * step).reshape(line)
    return arrays.take(arrays.reshape(x, (-1,)), indices)


def _refined(extents: Sequence[int], axes: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return a shape with the same elements in which each step is along an axis; None if there is none."""
    total = math.prod(extents)
    steps = sorted({*_strides(extents), *[abs(step) for _, step in axes], 1, total}, reverse=True)
    shape = list[int]()
    for step, next_step in itertools.pairwise(steps):
        if step % next_step:
            return None
        shape.append(step // next_step)
    return shape


def _keys(
    extents: Sequence[int], first: int, axes: Sequence[tuple[int, int]]
) -> tuple[list[slice], list[int]] | None:
    """Return a slice for each axis of an array, and the axis that each axis of the result is along."""
    strides = _strides(extents)
    start = [int(index) for index in np.unravel_index(first, tuple(extents))] if extents else []
    slices = [slice(index, index + 1, 1) for index in start]
    order = list[int]()
    for extent, step in axes:
        for axis, stride in enumerate(strides):
            count, rest = divmod(abs(step), stride)
            count = count if step > 0 else -count
            end = start[axis] + count * (extent - 1)
            if not rest and count and axis not in order and 0 <= end < extents[axis]:
                stop = end + (1 if count > 0 else -1)
                slices[axis] = slice(start[axis], stop if stop >= 0 else None, count)
                order.append(axis)
                break
        else:
            return None
    return slices, order


STEP_NAMES.add("gradients.repeated")
KINDS.append(_of_listed)
