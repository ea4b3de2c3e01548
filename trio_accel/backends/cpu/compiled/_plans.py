"""Which expressions are compiled, the kernel of each layout, and its threads (D186).

The expression and the machine decide what runs, never the time, so exact results have the same bits either
way.
"""

from __future__ import annotations

import _thread
import math
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import attrs

from ...base.contract.device_array import merged
from ...base.contract.dtypes import DType, Ints
from ...base.contract.ops import ArraySpec, ExpressionSpec
from ...base.expressions import (
    SCALAR_BYTES,
    EncodedProgram,
    TypedExpression,
    TypedStep,
    decode_program,
    needed_steps,
    reduced_groups,
)
from ...base.expressions.compiled import is_reduction
from ...base.kit.host import usable_cores
from ...base.kit.kernels import HostCall
from ..runtime.blas_threads import NUMPY
from ._compiler import Entry, compile_text, compiler, counts, has_fma, mode
from ._functions import NOT_IN_NUMPY, VECTOR
from ._loops import text_of
from ._text import Access, LoopLayout, depths_of

Call: TypeAlias = "HostCall[Any]"

# Bytes, for all steps and elements, that NumPy computes while a compiler runs: 0.1 to 0.3 s.
_WORTH = 1 << 29
# The least share of a thread, in such bytes. It takes a millisecond; waking a thread may take part of that.
_SHARE = 1 << 26
LINE = 64
"""Elements of a share are a multiple of this, so that no two threads write to one line of a cache."""
# How often the steps of a loop count.
_ROUNDS = 16
_MOST_PLANS = 4096
_NO_FORM = struct.Struct("")
_PASSES = struct.pack("=q", 0), struct.pack("=q", 1)

# These have NumPy's bits, and the others of real numbers only.
_EXACT = frozenset([
    "argument", "constant", "count", "index", "load", "cast", "where", "carried", "loop", "break", "end",
    "result", "negative", "positive", "stop_gradient", "conjugate", "real", "imag", "add", "subtract",
    "equal", "not_equal", "logical_not", "logical_and", "logical_or", "logical_xor", "isnan", "isinf",
    "isfinite",
])  # fmt: skip
_EXACT_REAL = frozenset([
    "multiply", "divide", "sqrt", "absolute", "fabs", "sign", "floor", "ceil", "trunc", "rint", "maximum",
    "minimum", "fmax", "fmin", "square", "reciprocal", "less", "less_equal", "greater", "greater_equal",
    "signbit", "copysign", "fmod", "floor_divide", "remainder", "nextafter", "bitwise_and", "bitwise_or",
    "bitwise_xor", "invert", "left_shift", "right_shift", "gcd", "lcm",
])  # fmt: skip
# These are made in NumPy's order. Of zeros with different signs NumPy may find either as the least.
_ORDERED = ("reduce_sum", "reduce_prod")
# Whether groups of neighbouring axes are reduced.
_PATTERNS = ([True], [False, True], [True, False], [False, True, False])
_SQUARED = (DType.float32, DType.float64)
# With more steps than this, a function of NumPy's no longer dominates the time of an expression.
_MAX_NUMPY_STEPS, _NO_WORK = 3, ("argument", "constant", "cast", "count")
_VECTORS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)


@attrs.define(eq=False)
class LoopPlan:
    """How one layout of an expression is computed. It holds no array.

    Attributes:
        text: Makes the source; None if NumPy computes.
        is_exact: Whether NumPy makes the same bits.
        count: Elements.
        weight: Bytes of all steps of all elements.
        form: Packs addresses.
        rest: Bytes after the addresses and the scalars.
        is_checked: Whether indices may be out of range.
        entry: The function, once it exists.
    """

    text: Callable[[], str] | None = None
    is_exact: bool = True
    count: int = 0
    weight: int = 0
    form: struct.Struct = _NO_FORM
    rest: bytes = b""
    is_checked: bool = False
    entry: Entry | None = None
    _is_begun: bool = False
    _cost: int = 0

    def find(self) -> Entry | None:
        """Return the function; None where NumPy computes. Blocks if it has to be compiled first."""
        if self._is_begun or self.text is None:
            return self.entry
        if not self.is_exact or mode() == "always":
            # Another thread may be at it: then this one waits.
            self.compile()
            self._is_begun = True
        else:
            self._cost += self.weight
            if self._cost >= _WORTH:
                self._is_begun = True
                threading.Thread(target=self.compile, name="accel compiler", daemon=True).start()
        return self.entry

    def compile_soon(self) -> None:
        """Compile it soon, because it is used repeatedly."""
        if not self._is_begun and self.text is not None:
            self._is_begun = True
            threading.Thread(target=self.compile, name="accel compiler", daemon=True).start()

    def compile(self) -> None:
        """Compile it; blocks."""
        assert self.text is not None
        entry = compile_text(self.text())
        counts.kernels += entry is not None
        self.entry = entry

    def data(self, addresses: Sequence[int], scalars: bytes, *, is_second: bool = False) -> bytes:
        """Pack the arguments of a run, the first or the second one."""
        return self.form.pack(*addresses, scalars) + self.rest + _PASSES[is_second]

    def run(self, entry: Entry, data: bytes, *, is_split: bool = True) -> bool:
        """Compute all elements, in threads if there are many; return whether an index was out of range."""
        threads = min(usable_cores(), NUMPY.started) if is_split else 1
        return run_split(entry, data, self.count, min(threads, self.weight // _SHARE))


def run_split(entry: Entry, data: bytes, count: int, parts: int) -> bool:
    """Call a function for `parts` ranges of elements at once; return whether a result is nonzero."""
    if parts < 2:
        return bool(entry(data, 0, count))
    edges = [*(count * part // parts // LINE * LINE for part in range(parts)), count]
    results, locks = [0] * parts, [_thread.allocate_lock() for _ in range(parts - 1)]

    def share(part: int) -> None:
        try:
            results[part] = entry(data, edges[part], edges[part + 1])
        finally:
            locks[part - 1].release()

    for part, lock in enumerate(locks, 1):
        lock.acquire()
        try:
            # A thread that lives as long as its part: there is none to be idle, or lost by a fork.
            _thread.start_new_thread(share, (part,))
        except RuntimeError:
            share(part)
    results[0] = entry(data, 0, edges[1])
    for lock in locks:
        lock.acquire()
    return any(results)


_plans: dict[tuple[object, ...], LoopPlan] = {}
_key_of = ExpressionSpec.described.plan_key


def compute(spec: ExpressionSpec, call: Call) -> bool:
    """Compute a program by compiled code; False where NumPy is to do it, or reports which index is wrong."""
    plan = find_plan(spec)
    entry, is_done = plan.find(), False
    if entry is not None and not (plan.is_checked and _is_in_place(spec)):
        arrays, loaded = (*spec.results, *spec.arrays), (*spec.loaded, *spec.stored)
        addresses = [call.address_of(array) for array in (*arrays, *(loaded or arrays[:1]))]
        is_done = not plan.run(entry, plan.data(addresses, spec.scalars))
        if is_done and spec.stored:
            plan.run(entry, plan.data(addresses, spec.scalars, is_second=True), is_split=False)
    counts.add(is_done)
    return is_done


def bind(spec: ExpressionSpec, call: Call) -> Callable[[], object] | None:
    """Return the compiled code with its addresses, if it runs by itself in one thread; else None."""
    plan = find_plan(spec)
    plan.compile_soon()
    entry = plan.entry
    if entry is None or plan.is_checked or spec.stored or plan.weight >= 2 * _SHARE:
        return None
    arrays = (*spec.results, *spec.arrays)
    addresses = [call.address_of(array) for array in (*arrays, *(spec.loaded or arrays[:1]))]
    return partial(entry, plan.data(addresses, spec.scalars), 0, plan.count)


def find_plan(spec: ExpressionSpec) -> LoopPlan:
    """Return the plan of an operation's layout."""
    key = _key_of(spec)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _make(spec)
    return plan


def forget() -> None:
    """Drop all plans, as if nothing had run; for tests."""
    _plans.clear()


@attrs.frozen
class LoopNest:
    """The axes that loops run along.

    Attributes:
        shape: The extents.
        strides: The strides of each array.
        reduced: Which axis is reduced, counted from the end; 0 for none.
    """

    shape: Ints
    strides: Sequence[Ints]
    reduced: int = 0


def _make(spec: ExpressionSpec) -> LoopPlan:
    decoded = decode_program(spec.program)
    program, chosen, has_bits = decoded.program, mode(), are_exact(decoded.program)
    arrays, loaded = (*spec.results, *spec.arrays), (*spec.loaded, *spec.stored)
    if (
        chosen == "never"
        or not (has_bits or are_vectors(program, chosen))
        or not _are_printed(spec, decoded, has_bits=has_bits)
        or not all(map(is_aligned, (*arrays, *loaded)))
        or any(0 in array.shape for array in loaded)
        or compiler() is None
    ):
        return LoopPlan()
    nest = _nest_of_rows(spec) if program.reductions else _nest_of_elements(program, spec.shape, arrays)
    if nest is None or 0 in nest.shape:
        return LoopPlan()
    is_across = [bool(steps[-2]) for steps in nest.strides] if nest.reduced == 2 else []
    layout = LoopLayout(
        len(nest.shape),
        tuple(_access(steps[-1], array) for steps, array in zip(nest.strides, arrays, strict=True)),
        tuple(tuple(step == array.dtype.itemsize for step in array.strides) for array in loaded),
        nest.reduced,
        tuple(is_across),
    )
    numbers = [*nest.shape, *(step for steps in nest.strides for step in steps)]
    numbers += [
        number for array in loaded for pair in zip(array.shape, array.strides, strict=True) for number in pair
    ] or [0]
    scalars = sum(not argument.is_array for argument in decoded.arguments)
    addresses = len(arrays) + max(len(loaded), 1)
    elements, depths = math.prod(nest.shape), depths_of(program.steps)
    steps = [(program.steps[number], depths[number]) for number in _computed(program)]
    # A reduced row is a line, and a column is one element.
    unit = LINE if nest.reduced == 1 else 1
    return LoopPlan(
        text=partial(text_of, spec.program, layout),
        is_exact=has_bits,
        count=elements // nest.shape[-nest.reduced] * unit if nest.reduced else elements,
        weight=elements * sum(step.dtype.itemsize * _ROUNDS**depth for step, depth in steps),
        form=struct.Struct(f"={addresses}Q{SCALAR_BYTES * max(scalars, 1)}s"),
        rest=struct.pack(f"={len(numbers)}q", *numbers),
        is_checked=bool(program.checked and program.loads),
    )


def _are_printed(spec: ExpressionSpec, decoded: EncodedProgram, *, has_bits: bool) -> bool:
    """Return whether there are loops for a program; if its steps have NumPy's bits, the loops must also."""
    program = decoded.program
    reductions = [program.steps[number] for number in program.reductions]
    if decoded.usual is not None:
        return False
    if is_reduction(spec, decoded) and program.steps[reductions[0].steps[0]].function == "argument":
        # NumPy has nothing to make before.
        return False
    for step in reductions:
        is_index = step.function in ("reduce_argmin", "reduce_argmax")
        if step.function == "fold" or is_index or step.dtype.kind == "complex":
            return False
        if has_bits and step.function not in _ORDERED and step.dtype.kind not in ("int", "uint"):
            return False
    return not reductions or not (program.loads or program.axes)


def _nest_of_elements(program: TypedExpression, shape: Ints, arrays: Sequence[ArraySpec]) -> LoopNest | None:
    strides: Sequence[Ints] = [array.strides for array in arrays]
    if not program.axes and not program.loads:
        shape, strides = merged(shape, tuple(strides))
    return LoopNest(shape or (1,), [steps or (0,) for steps in strides])


def _nest_of_rows(spec: ExpressionSpec) -> LoopNest | None:
    """Find the axes of a reduction; None if the layout is too complex, or NumPy takes another order."""
    shape, results = spec.shape, spec.results
    is_whole = results[0].shape == shape
    arrays = (*results, *spec.arrays) if is_whole else spec.arrays
    _, order = reduced_groups(shape, spec.axes, [array.strides for array in spec.arrays])
    axes = [axis for axis in order if shape[axis] > 1]
    outer_axes = [axis for axis in axes if axis not in spec.axes]
    groups = [(is_reduced, list(group)) for is_reduced, group in groupby(axes, spec.axes.__contains__)]
    kinds = [is_reduced for is_reduced, _ in groups]
    if (
        kinds not in _PATTERNS
        or outer_axes != sorted(outer_axes)
        or 0 in shape
        or not (is_whole or all(out.is_contiguous for out in results))
    ):
        return None
    neighbours = [pair for _, group in groups for pair in pairwise(group)]
    for array in arrays:
        steps = [array.strides[axis] for axis in axes if array.strides[axis]]
        if steps != sorted(map(abs, steps), reverse=True):
            return None
        if any(array.strides[a] != array.strides[b] * shape[b] for a, b in neighbours):
            return None
    reduced_index = kinds.index(True)
    parts = [
        groups[k][1] if 0 <= k < len(groups) else []
        for k in (reduced_index - 1, reduced_index, reduced_index + 1)
    ]
    # Columns are side by side along a third axis.
    count = 3 if parts[2] else 2
    extents = [math.prod(shape[axis] for axis in part) for part in parts]
    strides = [tuple(array.strides[part[-1]] if part else 0 for part in parts[:count]) for array in arrays]
    if not is_whole:
        sizes = [out.dtype.itemsize for out in results]
        strides = [*[(size * extents[2], 0, size)[:count] for size in sizes], *strides]
    return LoopNest(tuple(extents[:count]), strides, count - 1)


def is_exact(step: TypedStep, steps: Sequence[TypedStep]) -> bool:
    """Return whether NumPy makes the same bits, except for NaN."""
    if step.function in _EXACT or step.is_reduction or step.function.startswith("store_"):
        return True
    dtypes = (step.dtype, *(steps[number].dtype for number in step.steps))
    if step.function == "power":
        # Both have a product for the second power.
        exponent = steps[step.steps[1]]
        is_square = exponent.function == "constant" and exponent.value == 2
        return step.dtype.kind in ("int", "uint") or (is_square and step.dtype in _SQUARED)
    if step.function == "sign" and step.dtype is DType.bfloat16:
        # The sign of a zero is that zero by ml_dtypes, and 0 by NumPy.
        return False
    return step.function in _EXACT_REAL and all(dtype.kind != "complex" for dtype in dtypes)


def are_exact(program: TypedExpression) -> bool:
    """Return whether NumPy makes the same bits for a program, except for NaN."""
    return all(is_exact(step, program.steps) for step in program.steps)


def are_vectors(program: TypedExpression, chosen: str) -> bool:
    """Return whether an inexact program is compiled."""
    steps = [program.steps[number] for number in _computed(program)]
    inexact = [step for step in steps if not is_exact(step, program.steps)]
    if not all(step.function in VECTOR and step.dtype in _VECTORS for step in inexact):
        return False
    # A single function has NumPy's bits, because it is as fast, and nobody waits for a compiler.
    is_long = len(inexact) > 1 or any(
        step.function in ("load", "loop", *NOT_IN_NUMPY) or step.function.startswith("store_")
        for step in steps
    )
    is_long = is_long or sum(step.function not in _NO_WORK for step in steps) > _MAX_NUMPY_STEPS
    return has_fma() and (chosen == "always" or is_long)


def _computed(program: TypedExpression) -> Sequence[int]:
    """Return the computed steps, each as often as there are loops over all elements that need it."""
    reductions = program.reductions
    if not reductions:
        return range(len(program.steps))
    loops = [*(program.steps[number].steps for number in reductions), program.outputs]
    return [
        number for read in loops for number in needed_steps(program.steps, read) if number not in reductions
    ]


def is_aligned(array: ArraySpec) -> bool:
    """Return whether elements are aligned for the processor."""
    size = array.dtype.itemsize
    return array.offset % size == 0 and all(step % size == 0 for step in array.strides)


def _access(step: int, array: ArraySpec) -> Access:
    return "same" if not step else "dense" if step == array.dtype.itemsize else "strided"


def _is_in_place(spec: ExpressionSpec) -> bool:
    """Return whether NumPy would read elements that it had already overwritten."""
    written = {array.block for array in spec.results}
    return any(array.block in written for array in (*spec.arrays, *spec.loaded))
