"""Einstein's convention: subscripts of summed products, and the order of the multiplications."""

from __future__ import annotations

import importlib
import math
import operator
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import attrs

from .dtypes import Ints, Strs

Search: TypeAlias = Literal[
    "auto",
    "auto-hq",
    "branch-1",
    "branch-2",
    "branch-all",
    "dp",
    "greedy",
    "optimal",
    "random-greedy",
    "random-greedy-128",
]
"""The searches of opt_einsum, by its names."""

Optimize: TypeAlias = Search | Sequence[Sequence[int]]
"""How a path is found; or the path itself, as opt_einsum and `numpy.einsum_path` write it."""

OPTIMIZERS: Strs = get_args(Search)
"""All searches."""

# With more operands, the search for the smallest arrays takes longer than a second.
_MOST_FOR_LEAST = 10
# Limits of the searches with the same growth: at these numbers they take a tenth of a second at most.
_MOST_OPERANDS = {"optimal": 6, "branch-all": 6, "branch-2": 14, "dp": 14}


@attrs.frozen(kw_only=True)
class ContractionPath:
    """The order in which the operands of a summed product are multiplied, two at a time.

    Attributes:
        steps: The indices of both factors in the list of remaining arrays. The factors are removed, and their
            product is appended. opt_einsum takes such a path.
        flops: Multiplications and additions.
        largest: Bytes of the largest array made, including the result.
        peak: The most bytes that arrays made take at the same time.
    """

    steps: tuple[tuple[int, int], ...]
    flops: int
    largest: int
    peak: int


def parse_subscripts(
    name: str, subscripts: str, shapes: Sequence[Ints], arguments: Sequence[str] = ()
) -> tuple[list[str], str]:
    """Parse subscripts; unused letters are placeholders for the axes of ``...``.

    Args:
        name: Name of the function, for errors.
        subscripts: The subscripts.
        shapes: Shapes of the operands.
        arguments: Names of the operands, for errors; by default ``operands[0]`` and so on.

    Returns:
        The terms of the operands, and the term of the result.

    Raises:
        TypeError: The subscripts are not a string.
        ValueError: A term does not fit its operand, or a letter after ``->`` is in no term, or twice.
    """
    if not isinstance(subscripts, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # by untyped callers
        raise TypeError(f"{name}: subscripts must be a text such as 'ij,jk->ik', got {subscripts!r}")
    context = f"{name}: subscripts {subscripts!r}"
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(shapes):
        raise ValueError(f"{context} have {len(terms)} terms, got {len(shapes)} operands")
    spare = "".join(letter for letter in string.ascii_letters if letter not in subscripts)
    max_missing = 0
    for number, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        letters = _letters(context, term)
        missing = len(shape) - len(letters)
        if missing < 0 or (missing and letters == term):
            raise ValueError(
                f"{context}: the term {term!r} does not fit {_argument(arguments, number)} of shape {shape}"
            )
        if missing > len(spare):
            raise ValueError(f"{context}: more than {len(string.ascii_letters)} axes")
        terms[number] = term.replace("...", spare[:missing][::-1])
        max_missing = max(max_missing, missing)
    ellipsis_letters = spare[:max_missing][::-1]
    used = "".join(terms)
    if not arrow:
        free_letters = sorted(
            letter for letter in used if used.count(letter) == 1 and letter not in ellipsis_letters
        )
        return terms, ellipsis_letters + "".join(free_letters)
    letters = _letters(context, output)
    if len(set(letters)) < len(letters) or not set(letters) <= set(used):
        raise ValueError(
            f"{context}: letters behind -> must each be in a term, and there once, got {output!r}"
        )
    if ellipsis_letters and letters == output:
        raise ValueError(
            f"{context}: behind -> there is no ..., which stands for {max_missing} axes of the operands"
        )
    return terms, output.replace("...", ellipsis_letters)


def _letters(context: str, term: str) -> str:
    """Return the letters of a term, without ``...``."""
    letters = term.replace("...", "", 1)
    for letter in letters:
        if letter not in string.ascii_letters:
            raise ValueError(f"{context}: in the term {term!r} {letter!r} is not a letter")
    return letters


def _argument(arguments: Sequence[str], number: int) -> str:
    return arguments[number] if arguments else f"operands[{number}]"


def extents_of(
    name: str, terms: Sequence[str], shapes: Sequence[Ints], arguments: Sequence[str] = ()
) -> dict[str, int]:
    """Find how many elements there are along each letter; one element broadcasts.

    Raises:
        ValueError: Lengths that differ.
    """
    extents: dict[str, int] = {}
    for number, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        for letter, extent in zip(term, shape, strict=True):
            previous = extents.get(letter, 1)
            if 1 not in (previous, extent) and previous != extent:
                raise ValueError(
                    f"{name}: {_argument(arguments, number)} of shape {shape} has {extent} elements along an "
                    f"axis of the term {term!r} where others have {previous}"
                )
            extents[letter] = extent if previous == 1 else previous
    return extents


def find_path(
    name: str,
    terms: Sequence[str],
    output: str,
    extents: Mapping[str, int],
    *,
    itemsize: int,
    optimize: Optimize = "auto",
    memory_limit: int | None = None,
) -> ContractionPath:
    """Find the order in which arrays are multiplied, by opt_einsum if there are more than two.

    Args:
        name: Name of the function, for errors.
        terms: Letters of the arrays; no letter is twice in one term.
        output: Letters of the result.
        extents: Elements along each letter.
        itemsize: Bytes of an element.
        optimize: The search, or the path.
        memory_limit: The most bytes that intermediate arrays may take at a time; None for any. If the path
            found takes more, the path with the smallest arrays is tried.

    Returns:
        The path. It takes more than `memory_limit` only if no path within the limit was found.

    Raises:
        ValueError: There is no such search, it would take too long for this number of arrays, or the path
            does not fit the arrays.
    """
    if isinstance(optimize, str):
        if optimize not in OPTIMIZERS:
            raise ValueError(f"{name}: optimize must be one of {OPTIMIZERS}, or a path, got {optimize!r}")
        max_operands = _MOST_OPERANDS.get(optimize, len(terms))
        if len(terms) > max_operands:
            raise ValueError(
                f"{name}: optimize={optimize!r} searches too long for more than {max_operands} operands, got "
                f"{len(terms)}; write optimize='auto', 'auto-hq' or the path itself"
            )
        is_hq = optimize == "auto-hq" and len(terms) > _MOST_OPERANDS["dp"]
        search: Any = "random-greedy-128" if is_hq else optimize
    else:
        search = _steps_of(name, optimize, len(terms))
    return _find(tuple(terms), output, tuple(extents.items()), itemsize, search, memory_limit)


def _steps_of(name: str, path: Sequence[Sequence[int]], count: int) -> tuple[Ints, ...]:
    """Check a path."""
    remaining, steps = count, list[Ints]()
    problem = f"{name}: optimize must be 'auto', another name, or pairs of places, got {path!r}"
    for step in path:
        try:
            positions = tuple(sorted(map(operator.index, step)))
        except TypeError:
            raise TypeError(f"{problem}: step {len(steps)} is {step!r}") from None
        is_there = not positions or 0 <= positions[0] <= positions[-1] < remaining
        if not is_there or len(set(positions)) < len(positions) or len(positions) < min(count, 2):
            raise ValueError(
                f"{problem}: step {len(steps)} is {step!r}, and {remaining} arrays are left there"
            )
        steps.append(positions)
        remaining += 1 - len(positions)
    if remaining > 1:
        raise ValueError(f"{problem}: {remaining} arrays are left at its end")
    return tuple(steps)


@lru_cache
def _find(
    terms: Strs,
    output: str,
    extents: tuple[tuple[str, int], ...],
    itemsize: int,
    optimize: str | tuple[Ints, ...],
    memory_limit: int | None,
) -> ContractionPath:
    sizes = dict(extents)
    if not isinstance(optimize, str):
        return _costs(terms, output, sizes, itemsize, _in_pairs(optimize, len(terms)))
    if len(terms) < 3:
        return _costs(terms, output, sizes, itemsize, ((0, 1),) * (len(terms) - 1))
    # The import waits for the first use: most programs multiply two arrays, or none.
    searches: Any = importlib.import_module("opt_einsum")
    shapes = [tuple(sizes[letter] for letter in term) for term in terms]
    limit = None if memory_limit is None else max(memory_limit // itemsize, 1)
    # The requested search may find no path within the limit.
    tried: list[tuple[Any, int | None]] = [(optimize, limit), ("auto", limit)]
    if len(terms) <= _MOST_FOR_LEAST:
        tried.append((searches.DynamicProgramming(minimize="size", search_outer=True), None))
    paths: list[ContractionPath] = []
    for search, bound in tried:
        with suppress(RuntimeError):
            path, _ = searches.contract_path(
                f"{','.join(terms)}->{output}", *shapes, shapes=True, optimize=search, memory_limit=bound
            )
            paths.append(_costs(terms, output, sizes, itemsize, _in_pairs(path, len(terms))))
            if memory_limit is None or paths[-1].peak <= memory_limit:
                return paths[-1]
    return min(paths, key=lambda candidate: candidate.peak)


def _in_pairs(path: Sequence[Sequence[int]], count: int) -> tuple[tuple[int, int], ...]:
    """Split steps of more than two arrays, and leave out steps of one."""
    pairs: list[tuple[int, int]] = []
    for step in path:
        positions = sorted(step)
        if len(positions) == 1:
            # With a single operand there is nothing to multiply.
            continue
        *rest, low, high = positions
        pairs.append((low, high))
        count -= 1
        for position in reversed(rest):
            pairs.append((position, count - 1))
            count -= 1
    return tuple(pairs)


def _costs(
    terms: Sequence[str],
    output: str,
    sizes: Mapping[str, int],
    itemsize: int,
    steps: tuple[tuple[int, int], ...],
) -> ContractionPath:
    """Follow a path, and count."""

    def bytes_of(letters: frozenset[str]) -> int:
        return math.prod(sizes[letter] for letter in letters) * itemsize

    # Letters of the remaining arrays, and the bytes of each new array.
    remaining = [(frozenset(term), 0) for term in terms]
    result = frozenset(output)
    flops = live = peak = largest = 0
    for low, high in steps:
        (rhs, rhs_bytes), (lhs, lhs_bytes) = remaining.pop(high), remaining.pop(low)
        rest = result.union(*(letters for letters, _ in remaining))
        # Each operand is summed first along labels that only it has.
        summed = [mine & (rest | partner) for mine, partner in ((lhs, rhs), (rhs, lhs))]
        sums = [bytes_of(less) for less, mine in zip(summed, (lhs, rhs), strict=True) if less != mine]
        union = summed[0] | summed[1]
        retained = union & rest
        flops += math.prod(sizes[letter] for letter in union) * (1 if union == retained else 2)
        nbytes = bytes_of(retained)
        largest = max(largest, nbytes, *sums)
        peak = max(peak, live + sum(sums) + nbytes)
        live += nbytes - lhs_bytes - rhs_bytes
        remaining.append((retained, nbytes))
    if not steps:
        flops = math.prod(sizes[letter] for letter in remaining[0][0])
        largest = peak = bytes_of(result)
    return ContractionPath(steps=steps, flops=flops, largest=largest, peak=peak)
