"""Generators of random numbers, and the draws that they ask for."""

from __future__ import annotations

import functools
import math
import operator

import numpy as np
import numpy.typing as npt

from ..actors import run_in_thread
from ..backends.base import DType, DTypeLike
from ..devices import AccelRef, Operand, bounded_integer, composed
from ..devices.operations._named import named_methods
from ..expressions import Elementwise, Out
from ._distributions import Distributions, after
from ._messages import Integers, Multiply, Order, Search
from ._stream import Shape, checked_dtype, real

__all__ = ["Generator"]

# Integers up to here are floats, and rows of this many are multiplied by 64 bits.
_EXACT, _NARROW = 1 << 53, 1 << 32


class Generator(Distributions):
    """Draws random numbers on a device from one sequence.

    The position in the sequence is kept here and not on the device, and each draw takes its part of the
    sequence before anything is sent. So no part is drawn twice, even if draws run concurrently, fail, are
    cancelled, or the device is rebuilt in between. The same seed and the same draws in the same order give
    the same numbers, on every backend with the generator: bits and integers to the last bit, floating numbers
    up to rounding. A number drawn by rejection may differ if the last bit of a logarithm decides.

    Each draw of Philox begins a new row of the sequence, so two draws of 10 numbers differ from one draw of
    20. The other kinds continue with the next word. They lack gamma, Poisson and binomial numbers, and
    distributions made of these, because rejection needs words of its own for each number.

    A draw raises `ValueError` for a negative size, bounds in the wrong order, a negative deviation, values
    that the dtype cannot hold, and an `out` with another shape or dtype. It raises `TypeError` for a
    parameter that is not a real number, or not an integer if it must be, and `NotSupportedError` for dtypes
    other than float32 and float64. Parameters in a device array are not checked here: one out of range fails
    the draws by rejection with a `LibraryError`, and is NaN in the result of other draws. See `Device.ask`
    for cancellation and the errors that any operation can end with.

    >>> import trio, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("dice") as system, system.open_device("cpu") as device:
    ...         generator = ta.random.Generator(device, seed=1)
    ...         saved = generator.state
    ...         print(await generator.integers(8, 1, 6, endpoint=True).to_host())
    ...         generator.state = saved
    ...         print(await generator.integers(8, 1, 6, endpoint=True).to_host())
    >>> trio.run(main)
    [6 5 6 4 2 3 6 3]
    [6 5 6 4 2 3 6 3]

    Args:
        device: The device of the numbers.
        kind: ``"philox4x32_10"`` (Salmon et al., SC 2011; cuRAND ``PHILOX4_32_10``), ``"mrg32k3a"``
            (L'Ecuyer, Operations Research 47, 1999) or ``"xorwow"`` (Marsaglia, Journal of Statistical
            Software 8, 2003).
        seed: Integer of 64 bits; by default a fresh one from the operating system. It is the key of Philox;
            the other kinds derive their states from it by NumPy's `SeedSequence`.

    Raises:
        NotSupportedError: The kind of generator is unknown.
        ValueError: The seed does not fit into 64 bits.
        TypeError: The seed is not an integer, or `device` is not a device.
    """

    @composed
    async def integers(
        self,
        shape: Shape,
        low: int,
        high: int,
        dtype: DTypeLike = "int64",
        *,
        endpoint: bool = False,
        out: Out = None,
    ) -> AccelRef:
        """Draw integers with a uniform distribution from `low` on, below `high`.

        Each is the upper part of a product, without rejection: with 64 random bits for at most 2**32
        different numbers, and with 128 bits for more. So their probabilities differ by at most 2**-64.

        Args:
            shape: Shape of the result.
            low: The least number.
            high: The number above the greatest.
            dtype: A dtype of integers that holds all of them.
            endpoint: Whether `high` itself may be drawn.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        kind = DType.of(dtype)
        if kind.kind not in ("int", "uint"):
            raise TypeError(f"random.integers: dtype must be an integer dtype, got {kind}")
        first, end, info = operator.index(low), operator.index(high) + bool(endpoint), np.iinfo(kind.dtype)
        if not info.min <= first < end <= int(info.max) + 1:
            raise ValueError(
                f"random.integers: high must be above low, and both within {kind}, got {low} and {high}"
            )
        width, extents = end - first, self._extents(shape)
        is_old = self._kind == "philox4x32_10" and kind is DType.int64 and width <= _NARROW
        if is_old and -_EXACT <= first < end <= _EXACT:
            return await self._device.ask(Integers(*self._placed(extents), first, end, out))
        return await self._bounded_integers("integers", extents, width, first, kind, out)

    @composed
    async def permutation(self, x: int | Operand) -> AccelRef:
        """Bring numbers or rows into a random order, as `numpy.random.Generator.permutation`.

        They are sorted by 64 random bits each. Equal bits keep the order, so some order of n numbers is more
        frequent by at most n**2 in 2**65.

        Args:
            x: An array with elements to permute along the first axis; or n for the numbers below n.

        Returns:
            A new array, of int64 for a number.

        Raises:
            ValueError: A negative number, or a 0-d array.
            NotSupportedError: The device cannot sort; on CUDA it comes from the package ``cuda-cccl``.
        """
        count, rows = self._source("permutation", x)
        order = await self._device.ask(Order(await self._keys(count), count, False))
        return order if rows is None else await self._taken("permutation", rows, order)

    @composed
    async def choice(
        self, a: int | Operand, shape: Shape = (), replace: bool = True, p: npt.ArrayLike | None = None
    ) -> AccelRef:
        """Draw numbers or rows, as `numpy.random.Generator.choice`.

        Args:
            a: An array with elements to draw along the first axis; or n for the numbers below n.
            shape: Shape of the draw.
            replace: Whether an element may be drawn again. Otherwise the elements with the largest random
                keys are taken. With weights, the keys are Gumbel numbers plus the logarithms of the weights
                (Efraimidis and Spirakis 2006), which is equivalent to drawing one after another.
            p: Probability of each, in host memory; by default all are equal.

        Returns:
            A new array, of int64 for a number.

        Raises:
            ValueError: There are no elements, or too few; or `p` is not a distribution over them.
            TypeError: `a` or `p` is not an array of this kind.
            NotSupportedError: The device cannot sort, which draws without replacement and draws with weights
                need; on CUDA it comes from the package ``cuda-cccl``.
        """
        count, rows = self._source("choice", a)
        extents, weights = self._extents(shape), None if p is None else _weights(p, count)
        draw_count = math.prod(extents)
        there = count if weights is None else int(np.count_nonzero(weights))
        if draw_count and (not there or (not replace and draw_count > there)):
            raise ValueError(
                f"random.choice: {draw_count} must be drawn of only {there}, replace={bool(replace)}"
            )
        if not replace:
            indices = (await self._without(count, draw_count, weights)).reshape(extents)
        elif weights is None:
            indices = await self.integers(extents, 0, max(count, 1))
        else:
            edges = np.cumsum(weights)
            u = await self._computed("choice", "y = u", extents, DType.float64, None)
            indices = await self._device.ask(Search(edges / edges[-1], u))
        return indices if rows is None else await self._taken("choice", rows, indices)

    @composed
    async def multivariate_normal(
        self, mean: npt.ArrayLike, cov: npt.ArrayLike, shape: Shape = (), dtype: DTypeLike = "float32"
    ) -> AccelRef:
        """Draw vectors of normal numbers that depend on each other.

        The root of the covariance is made of its eigenvalues, in a thread; it may be singular.

        Args:
            mean: Mean, a vector in host memory.
            cov: Covariance, a symmetric matrix in host memory, without negative eigenvalues.
            shape: Shape of the result, without its last axis.
            dtype: float32 or float64.

        Returns:
            An array with a last axis as long as `mean`.

        Raises:
            ValueError: The shapes do not fit, or `cov` is not a covariance matrix.
        """
        kind = checked_dtype("multivariate_normal", dtype)
        middle, matrix = (
            np.asarray(real("multivariate_normal", *named_value))
            for named_value in (("mean", mean), ("cov", cov))
        )
        if middle.ndim != 1 or matrix.shape != 2 * middle.shape:
            raise ValueError(
                "random.multivariate_normal: mean must be a vector of n numbers and cov n x n, got "
                f"{middle.shape} and {matrix.shape}"
            )
        root = await run_in_thread(_root, matrix)
        extents = self._extents(shape)
        z = await self.normal((math.prod(extents), middle.size), kind)
        x = (await self._device.ask(Multiply(z, root.astype(kind.dtype)))).reshape((*extents, middle.size))
        return await after("multivariate_normal", "x + mean", kind.value, "x", "mean")(x, middle)

    def _source(self, name: str, x: int | Operand) -> tuple[int, Operand | None]:
        """Read what is drawn from: how many there are, and their rows."""
        if isinstance(x, (AccelRef, np.ndarray)):
            if not x.ndim:
                raise ValueError(f"random.{name}: an array must have an axis, got one without")
            return x.shape[0], x
        count = bounded_integer(f"random.{name}", "the number", x)
        if count < 0:
            raise ValueError(f"random.{name}: the number must be at least 0, got {x!r}")
        return count, None

    async def _taken(self, name: str, rows: Operand, indices: AccelRef) -> AccelRef:
        if not math.prod((*indices.shape, *rows.shape[1:])):
            return await self._device.empty((*indices.shape, *rows.shape[1:]), rows.dtype)
        row_ndim = len(rows.shape) - 1
        expression = _take(name, indices.ndim, row_ndim)
        spread = indices.reshape((*indices.shape, *[1] * row_ndim))
        return await expression(rows, spread, shape=(*indices.shape, *rows.shape[1:]))

    async def _without(
        self, count: int, draw_count: int, weights: npt.NDArray[np.float64] | None
    ) -> AccelRef:
        """Draw places without replacement: the places of the largest keys."""
        if weights is None:
            return await self._device.ask(Order(await self._keys(count), draw_count, True))
        with np.errstate(divide="ignore"):
            logs = np.log(weights)
        keys = await self._computed(
            "choice", "y = logs - log(-log(u))", (count,), DType.float64, None, logs=logs
        )
        return await self._device.ask(Order(keys, draw_count, True))


named_methods("random", Generator)


@functools.cache
def _take(name: str, axes: int, row_ndim: int) -> Elementwise[AccelRef]:
    """Make the expression that takes rows at places, which have `axes` axes."""
    text = ", ".join(["places", *[f"i({axes + axis})" for axis in range(row_ndim)]])
    return Elementwise(f"x[{text}]", inputs=("x", "places"), operation=f"random.{name}")


def _weights(p: npt.ArrayLike, count: int) -> npt.NDArray[np.float64]:
    if isinstance(p, AccelRef):
        raise TypeError("random.choice: p must be in host memory, got an AccelRef; use p.to_host()")
    weights = np.asarray(real("choice", "p", p, condition=">= 0"))
    if weights.shape != (count,):
        raise ValueError(f"random.choice: p must have shape {(count,)}, got {weights.shape}")
    if count and abs(weights.sum() - 1) > math.sqrt(np.finfo(np.float64).eps):
        raise ValueError(f"random.choice: p must add up to 1, got {weights.sum()}")
    return weights


def _root(cov: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a root of a covariance matrix: its transpose times itself is the covariance."""
    largest = np.abs(cov).max(initial=0)
    if not np.allclose(cov, cov.T, rtol=0, atol=1e-8 * largest):
        raise ValueError("random.multivariate_normal: cov must be symmetric")
    values, vectors = np.linalg.eigh(cov)
    if values.min(initial=0) < -1e-8 * largest:
        raise ValueError(
            "random.multivariate_normal: cov must be positive semidefinite, got the eigenvalue "
            f"{values.min()}"
        )
    root: npt.NDArray[np.float64] = (vectors * np.sqrt(np.maximum(values, 0))).T
    return root
