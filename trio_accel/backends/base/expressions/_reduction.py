"""Reductions by expressions: what is mapped, how it is combined, and in which types."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias, cast, get_args

import attrs
import numpy as np

from ..contract.dtypes import DType, Strs
from ..contract.foreign_names import instead_of
from ._builder import Builder
from ._expression import Expression
from ._parse import parse
from ._steps import ArgumentType, Step, TypedExpression, Weak
from ._typing import typed
from ._unroll import unrolled

__all__ = [
    "REDUCTIONS", "WIDER", "Reduction", "TypedReduction", "typed_reduction",
]  # fmt: skip

ReductionName: TypeAlias = Literal[
    "sum", "prod", "mean", "min", "max", "nanmin", "nanmax", "any", "all", "argmin", "argmax", "expression"
]

REDUCTIONS: Strs = get_args(ReductionName)[:-1]
"""Reductions that have names."""

_IDENTITIES: dict[str, complex] = {"sum": 0, "prod": 1, "mean": 0, "any": False, "all": True}
_ADDED_UP = ("sum", "prod", "mean")
_ORDERED = ("min", "max", "nanmin", "nanmax", "argmin", "argmax")
# Sums and products of these are made in a wider type, and rounded once. By their names, because to hash a
# dtype of low precision imports ml_dtypes.
WIDER = {
    "float16": DType.float64,
    "bfloat16": DType.float64,
    "float32": DType.float64,
    "complex64": DType.complex128,
}
_MOST_ROUNDS = 4
_SIDES = {"a": "left", "b": "right"}


@attrs.frozen
class Reduction:
    """A reduction as it is declared.

    Attributes:
        map: The values to reduce: an expression with one result.
        name: One of `REDUCTIONS`, or ``"expression"``.
        combine: For ``"expression"``, an expression of ``a`` and ``b``.
        identity: For ``"expression"``, the result of no elements; None if there is none.
        post: Last step of the result: an expression of ``a``, and ``n``, how many elements were reduced.
    """

    map: Expression
    name: ReductionName
    combine: Expression | None = None
    identity: complex | None = None
    post: Expression | None = None

    @staticmethod
    def parse(
        text: str,
        reduce: str,
        *,
        identity: complex | None = None,
        post: str | None = None,
        inputs: tuple[str, ...] | None = None,
    ) -> Reduction:
        """Parse its expressions.

        Raises:
            ValueError: One of them is wrong; the message says which, and shows where.
        """
        mapped = _parsed("map", text, inputs)
        after = None if post is None else _parsed("post", post)
        if after is not None and not set(after.inputs) <= {"a", "n"}:
            raise ValueError(f"post: reads {', '.join(after.inputs)}; it has a, the result, and n, the count")
        if reduce == "mean":
            if post is not None:
                raise ValueError("post: mean has its own; write reduce='sum', and a / n in the post")
            after = parse("a / n")
        if reduce in REDUCTIONS:
            if identity is not None:
                raise ValueError(f"identity: {reduce} has its own; give one with an expression only")
            return Reduction(mapped, reduce, post=after)  # type: ignore[arg-type]  # one of the names
        if reduce.isidentifier():
            raise ValueError(
                f"reduce: there is no {reduce!r}{instead_of(reduce)}; there are {', '.join(REDUCTIONS)}, "
                "or an expression of a and b"
            )
        combine = _parsed("reduce", reduce)
        if sorted(combine.inputs) != ["a", "b"]:
            raise ValueError(
                f"reduce: must be an expression of a and b, it reads {', '.join(combine.inputs)}"
            )
        value = cast("Any", identity).item() if isinstance(identity, np.generic) else identity
        return Reduction(mapped, "expression", combine, value, after)

    @property
    def takes_nothing(self) -> bool:
        """Whether there is a result of no elements."""
        return self.name in _IDENTITIES or self.identity is not None

    @property
    def is_index(self) -> bool:
        """Whether the result is the number of an element."""
        return self.name in ("argmin", "argmax")


def _parsed(what: str, text: str, inputs: Strs | None = None) -> Expression:
    try:
        parsed = parse(text, inputs)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if len(parsed.outputs) != 1:
        raise ValueError(f"{what}: must have one result, it has {', '.join(parsed.outputs)}")
    if parsed.has_index or parsed.loads:
        raise ValueError(f"{what}: has i(axis) or x[...], which only functions of each element have")
    return parsed


@attrs.frozen
class TypedReduction:
    """A reduction of arguments of certain types.

    Attributes:
        reduction: The declared reduction.
        map: Makes a value of `reduced` of each element.
        accumulator: Type that the values are converted to and combined in.
        combine: Of an expression: makes one value of two, both of `accumulator`.
        reduced: Type that the combined value is converted to: with a `post` that of `accumulator`, so that
            the result is rounded once.
        post: Of the converted value, and of the count, makes the result; None for nothing.
        dtype: Type of the result.
    """

    reduction: Reduction
    map: TypedExpression
    accumulator: DType
    combine: TypedExpression | None
    reduced: DType
    post: TypedExpression | None
    dtype: DType

    @functools.cached_property
    def program(self) -> TypedExpression:
        """The reduction as a list of steps."""
        builder = Builder(self.reduction.map.inputs)
        return builder.finish(self.added_to(builder), self.map.elements)

    def added_to(self, builder: Builder) -> int:
        """Add the steps to a program, and return the number of the result."""
        declared, dtype = self.reduction, self.accumulator
        mapped = builder.copied(self.map, declared.map.inputs, builder.read)
        value = builder.cast(mapped[self.map.outputs[0]], dtype)
        if self.combine is not None and declared.combine is not None:
            fold = builder.append(Step("fold", dtype, (value,)))
            pair = {name: builder.append(Step(side, dtype, (fold,))) for name, side in _SIDES.items()}
            both = builder.copied(
                self.combine, declared.combine.inputs, lambda name, _: pair[name], is_apart=True
            )
            ends = fold, both[self.combine.outputs[0]]
            value = builder.append(Step("folded", dtype, ends, declared.identity or 0))
        else:
            name = "sum" if declared.name == "mean" else declared.name
            value = builder.step(
                Step(f"reduce_{name}", DType.int64 if declared.is_index else dtype, (value,))
            )
        value = builder.cast(value, self.reduced)
        if self.post is None:
            return value
        inputs = ("a",) if declared.post is None else declared.post.inputs
        after = builder.copied(self.post, inputs, lambda name, _: value if name == "a" else builder.count())
        return after[self.post.outputs[0]]


@functools.lru_cache(1024)
def typed_reduction(
    reduction: Reduction,
    arguments: tuple[ArgumentType, ...],
    dtype: DType | None = None,
    result: DType | None = None,
) -> TypedReduction:
    """Find the types of a reduction, as NumPy's functions of these names have them.

    Args:
        reduction: The reduction.
        arguments: Types of the inputs of `Reduction.map`.
        dtype: Type that the values are converted to before they are combined; None for NumPy's choice.
        result: Type that the result is converted to; None for no conversion.

    Raises:
        TypeError: There is no such reduction of these types.
        NotSupportedError, ValueError: See `typed`.
    """
    (value,) = typed(reduction.map, arguments).dtypes
    chosen = value if dtype is None else dtype
    combine: TypedExpression | None = None
    reduced = accumulator = _accumulated(reduction.name, chosen, is_chosen=dtype is not None)
    if reduction.name in _ADDED_UP:
        accumulator = WIDER.get(reduced.value, reduced)
    if reduction.combine is not None:
        combine = _combined(reduction.combine, chosen, is_chosen=dtype is not None)
        (reduced,) = (accumulator,) = combine.dtypes
    mapped = unrolled(typed(reduction.map, arguments, (reduced,)))
    final = DType.int64 if reduction.is_index else reduced
    after = None
    if reduction.post is not None or result is not None:
        post = parse("a") if reduction.post is None else reduction.post
        kinds: dict[str, ArgumentType] = {"a": final, "n": Weak.int}
        (found,) = typed(post, tuple(kinds[name] for name in post.inputs), (result,)).dtypes
        if not reduction.is_index:
            kinds["a"] = final = accumulator
        after = typed(post, tuple(kinds[name] for name in post.inputs), (found,))
    return TypedReduction(
        reduction, mapped, accumulator, combine, final, after, final if after is None else after.dtypes[0]
    )


def _accumulated(name: str, value: DType, *, is_chosen: bool) -> DType:
    """Return the type that values are combined to, before it is widened."""
    if name in ("any", "all"):
        return DType.bool
    if name in _ORDERED and value.kind == "complex":
        raise TypeError(f"{name} of {value}: complex numbers have no order")
    if name in _ADDED_UP and not is_chosen and not value.is_inexact:
        # Short whole numbers would overflow: NumPy takes the platform's, which is 64 bits.
        return DType.float64 if name == "mean" else DType.uint64 if value.kind == "uint" else DType.int64
    return value


def _combined(combine: Expression, value: DType, *, is_chosen: bool) -> TypedExpression:
    """Type an expression of ``a`` and ``b`` so that its result has the type of its arguments."""
    for _ in range(_MOST_ROUNDS):
        found = typed(combine, (value, value))
        (result,) = found.dtypes
        if result is value:
            return found
        if is_chosen:
            return typed(combine, (value, value), (value,))
        value = result
    raise TypeError(
        f"reduce: the result of {combine.text!r} is never of the type that it takes; give a dtype"
    )
