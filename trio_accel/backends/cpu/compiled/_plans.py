"""Which expressions are compiled, the kernel of each layout, and its threads (D186).

The expression and the machine decide what runs, never the time: what is exact has the same bits either way.
"""

from __future__ import annotations

import _thread
import math
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs

from ...base.contract.device_array import merged
from ...base.contract.dtypes import DType
from ...base.contract.ops import DESCRIPTORS, ArraySpec, ElementwiseSpec, ScatterSpec
from ...base.expressions import SCALAR_BYTES, SpecializedExpression, Step, TypedExpression
from ...base.kit.host import usable_cores
from ...base.kit.kernels import HostCall
from ..runtime.blas_threads import NUMPY
from ._compiler import Entry, compile_text, compiler, counts, has_fma, mode
from ._functions import ALONE, VECTOR
from ._text import Access, RowLayout, depths_of, elementwise_text, scatter_text

Spec: TypeAlias = "ElementwiseSpec | ScatterSpec"
Call: TypeAlias = "HostCall[Any]"

# Bytes of all steps of all elements: NumPy computes so many in as long as a compiler takes, 0.1 to 0.3 s.
_WORTH = 1 << 29
# A thread has so many at least, which take a millisecond: to wake one may take a part of that.
_SHARE = 1 << 26
LINE = 64
"""Elements of a share are a multiple of this, so that no two threads write to one line of a cache."""
# The steps of a loop count so often.
_ROUNDS = 16
_MOST_PLANS = 4096
_NO_FORM = struct.Struct("")
_PASSES = struct.pack("=q", 0), struct.pack("=q", 1)

# These have NumPy's bits, and the others of real numbers only.
_EXACT = frozenset([
    "argument", "constant", "index", "load", "cast", "where", "carried", "loop", "break", "end", "result",
    "negative", "positive", "stop_gradient", "conjugate", "real", "imag", "add", "subtract", "equal",
    "not_equal", "logical_not", "logical_and", "logical_or", "logical_xor", "isnan", "isinf", "isfinite",
])  # fmt: skip
_EXACT_REAL = frozenset([
    "multiply", "divide", "sqrt", "absolute", "fabs", "sign", "floor", "ceil", "trunc", "rint", "maximum",
    "minimum", "fmax", "fmin", "square", "reciprocal", "less", "less_equal", "greater", "greater_equal",
    "signbit", "copysign", "fmod", "floor_divide", "remainder", "nextafter", "bitwise_and", "bitwise_or",
    "bitwise_xor", "invert", "left_shift", "right_shift", "gcd", "lcm",
])  # fmt: skip
_SQUARED = (DType.float32, DType.float64)
# Beside so many steps, a function of NumPy's decides no longer how long an expression takes.
_FEW, _NO_WORK = 3, ("argument", "constant", "cast")
_VECTORS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)


@attrs.define(eq=False)
class Plan:
    """How one layout of an expression is computed. It holds no array.

    Attributes:
        text: Makes the source; None where NumPy computes.
        is_exact: Whether NumPy makes the same bits.
        count: Elements.
        weight: Bytes of all steps of all elements.
        form: Packs addresses.
        rest: Bytes behind those and the scalars.
        is_checked: Whether indices may be outside.
        entry: The function, once there is one.
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
        """Compute all elements, in threads where these are many; tell whether an index was outside."""
        threads = min(usable_cores(), NUMPY.started) if is_split else 1
        return run_split(entry, data, self.count, min(threads, self.weight // _SHARE))


def run_split(entry: Entry, data: bytes, count: int, parts: int) -> bool:
    """Call a function for elements in so many parts at once; tell whether one of its results is not zero."""
    if parts < 2:
        return bool(entry(data, 0, count))
    edges = [*(count * part // parts // LINE * LINE for part in range(parts)), count]
    found, locks = [0] * parts, [_thread.allocate_lock() for _ in range(parts - 1)]

    def share(part: int) -> None:
        try:
            found[part] = entry(data, edges[part], edges[part + 1])
        finally:
            locks[part - 1].release()

    for part, lock in enumerate(locks, 1):
        lock.acquire()
        try:
            # A thread that lives as long as its part: there is none to be idle, or lost by a fork.
            _thread.start_new_thread(share, (part,))
        except RuntimeError:
            share(part)
    found[0] = entry(data, 0, edges[1])
    for lock in locks:
        lock.acquire()
    return any(found)


_plans: dict[tuple[object, ...], Plan] = {}


def elementwise(spec: ElementwiseSpec, call: Call) -> bool:
    """Compute an expression by compiled code; False where NumPy does it, or tells which index is wrong."""
    plan = find_plan(spec)
    entry = plan.find()
    is_done = entry is not None and not (plan.is_checked and _is_in_place(spec))
    if entry is not None and is_done:
        addresses = [
            call.at(array) for array in (*spec.results, *spec.arrays, *(spec.loaded or spec.results[:1]))
        ]
        is_done = not plan.run(entry, plan.data(addresses, spec.scalars))
    counts.add(is_done)
    return is_done


def scatter(spec: ScatterSpec, call: Call) -> bool:
    """Combine values with elements by compiled code; False as in `elementwise`."""
    plan = find_plan(spec)
    entry, is_done = plan.find(), False
    if entry is not None:
        addresses = [call.at(array) for array in (*spec.arrays, spec.out)]
        is_done = not plan.run(entry, plan.data(addresses, spec.scalars))
        if is_done:
            plan.run(entry, plan.data(addresses, spec.scalars, is_second=True), is_split=False)
    counts.add(is_done)
    return is_done


def find_plan(spec: Any, make: Callable[[Any], Plan] | None = None) -> Plan:
    """Return the plan of an operation's layout; `make` makes it, for others than expressions of elements."""
    key = DESCRIPTORS[type(spec)].plan_key(spec)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = (make or _make)(spec)
    return plan


def forget() -> None:
    """Drop all plans, as if nothing had run; for tests."""
    _plans.clear()


def _make(spec: Spec) -> Plan:
    decoded = SpecializedExpression.decode(spec.expression)
    typed, arrays = decoded.typed, (*spec.results, *spec.arrays)
    chosen = mode()
    has_bits = are_exact([typed])
    if (
        chosen == "never"
        or not (has_bits or are_vectors([typed], chosen))
        or not math.prod(spec.shape)
        or not all(map(is_aligned, (*arrays, *spec.loaded)))
        or any(0 in array.shape for array in spec.loaded)
        or compiler() is None
    ):
        return Plan()
    shape, strides = spec.shape, tuple(array.strides for array in arrays)
    if not typed.axes and not typed.loads:
        shape, strides = merged(shape, strides)
    shape, strides = shape or (1,), tuple(each or (0,) for each in strides)
    layout = RowLayout(
        len(shape),
        tuple(_access(steps[-1], array) for steps, array in zip(strides, arrays, strict=True)),
        tuple(tuple(step == array.dtype.itemsize for step in array.strides) for array in spec.loaded),
    )
    if isinstance(spec, ScatterSpec):
        text = partial(scatter_text, spec.expression, spec.reduce, layout)
    else:
        text = partial(elementwise_text, spec.expression, layout)
    numbers = [*shape, *(step for steps in strides for step in steps)]
    numbers += [
        number
        for array in spec.loaded
        for pair in zip(array.shape, array.strides, strict=True)
        for number in pair
    ] or [0]
    scalars = sum(not argument.is_array for argument in decoded.arguments)
    addresses = len(arrays) + max(len(spec.loaded), 1)
    count = math.prod(shape)
    return Plan(
        text=text,
        is_exact=has_bits,
        count=count,
        weight=count
        * sum(
            step.dtype.itemsize * _ROUNDS**depth
            for step, depth in zip(typed.steps, depths_of(typed.steps), strict=True)
        ),
        form=struct.Struct(f"={addresses}Q{SCALAR_BYTES * max(scalars, 1)}s"),
        rest=struct.pack(f"={len(numbers)}q", *numbers),
        is_checked=bool(typed.checked and typed.loads),
    )


def is_exact(step: Step, steps: Sequence[Step]) -> bool:
    """Tell whether NumPy makes the same bits, but for those of NaN."""
    if step.function in _EXACT:
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


def are_exact(parts: Sequence[TypedExpression]) -> bool:
    """Tell whether NumPy makes the same bits of all expressions, but for those of NaN."""
    return all(is_exact(step, typed.steps) for typed in parts for step in typed.steps)


def are_vectors(parts: Sequence[TypedExpression], chosen: str) -> bool:
    """Tell whether expressions that are not exact are compiled."""
    steps = [step for typed in parts for step in typed.steps]
    others = [step for typed in parts for step in typed.steps if not is_exact(step, typed.steps)]
    if not all(step.function in VECTOR and step.dtype in _VECTORS for step in others):
        return False
    # A function alone has NumPy's bits: it is as fast, and no compiler is waited for.
    is_long = len(others) > 1 or any(step.function in ("load", "loop", *ALONE) for step in steps)
    is_long = is_long or sum(step.function not in _NO_WORK for step in steps) > _FEW
    return has_fma() and (chosen == "always" or is_long)


def is_aligned(array: ArraySpec) -> bool:
    """Tell whether elements are where a processor expects them."""
    size = array.dtype.itemsize
    return array.offset % size == 0 and all(step % size == 0 for step in array.strides)


def _access(step: int, array: ArraySpec) -> Access:
    return "same" if not step else "dense" if step == array.dtype.itemsize else "strided"


def _is_in_place(spec: ElementwiseSpec) -> bool:
    """Tell whether NumPy would find what was written, in place of what was to be read."""
    written = {array.block for array in spec.results}
    return any(array.block in written for array in (*spec.arrays, *spec.loaded))
