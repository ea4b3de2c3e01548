"""Distributions whose numbers take as many words as it happens, from counters of their own (D159)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.base import DType, DTypeLike, NotSupportedError
from ..backends.base.contract.ops import Rejection
from ..devices import AccelRef, Operand
from ..devices.operations._calls import composed
from ..expressions import ExpressionArgument, Out, Rowwise
from ._continuous import Continuous, after
from ._messages import Rejected
from ._stream import Shape
from ._words import checked_dtype, real

# Means and counts up to here are whole numbers of float64, with room for the next ones.
_LARGEST = 1 << 52
_SHARES = Rowwise(
    "e = exp(x - max(x)); y = e / sum(e)", ["x"], operation="random.dirichlet", precision="float64"
)


class Rejections(Continuous):
    """Gamma, Poisson and binomial numbers, and what is made of them."""

    @composed
    async def gamma(
        self,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        a: ExpressionArgument,
        scale: ExpressionArgument = 1.0,
        out: Out = None,
    ) -> AccelRef:
        """Draw numbers of a gamma distribution, by Marsaglia and Tsang (2000).

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            a: Shape of the distribution, at least 0: a number, or an array that broadcasts to `shape`.
            scale: Factor, at least 0.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        kind, factor = checked_dtype("gamma", dtype), real("gamma", "scale", scale, least=">= 0")
        if isinstance(factor, np.generic) and factor == 1:
            return await self._drawn(
                "gamma", "gamma", shape, kind, real("gamma", "a", a, least=">= 0"), out=out
            )
        x = await self._drawn("gamma", "gamma", shape, DType.float64, real("gamma", "a", a, least=">= 0"))
        made = after("gamma", "where(scale >= 0, scale * x, nan)", kind.value, "x", "scale")
        return await made(x, factor, shape=x.shape, out=out)

    @composed
    async def chisquare(
        self, shape: Shape, dtype: DTypeLike = "float32", *, df: ExpressionArgument, out: Out = None
    ) -> AccelRef:
        """Draw sums of squares of normal numbers: twice a number of a gamma distribution.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            df: Degrees of freedom, at least 0: a number, or an array that broadcasts to `shape`.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        kind = checked_dtype("chisquare", dtype)
        freedom = real("chisquare", "df", df, least=">= 0")
        x = await self._drawn("chisquare", "gamma", shape, DType.float64, freedom, factor=0.5)
        return await after("chisquare", "2.0 * x", kind.value, "x")(x, out=out)

    @composed
    async def standard_t(
        self, shape: Shape, dtype: DTypeLike = "float32", *, df: ExpressionArgument, out: Out = None
    ) -> AccelRef:
        """Draw numbers of Student's t: a normal one over the root of a mean square.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            df: Degrees of freedom, above 0: a number, or an array that broadcasts to `shape`.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        kind, freedom = checked_dtype("standard_t", dtype), real("standard_t", "df", df, least="> 0")
        x = await self._drawn("standard_t", "gamma", shape, DType.float64, freedom, factor=0.5)
        made = after("standard_t", "where(df > 0, z / sqrt(2.0 * x / df), nan)", kind.value, "x", "z", "df")
        return await made(x, await self._normals(x.shape), freedom, shape=x.shape, out=out)

    @composed
    async def beta(
        self,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        a: ExpressionArgument,
        b: ExpressionArgument,
        out: Out = None,
    ) -> AccelRef:
        """Draw numbers of a beta distribution: the share of one number of a gamma distribution in two.

        They are made of logarithms, so that small `a` and `b` leave no 0 over 0.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            a: First shape of the distribution, above 0: a number, or an array that broadcasts to `shape`.
            b: Second shape, likewise.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        kind = checked_dtype("beta", dtype)
        first, second = (real("beta", name, one, least="> 0") for name, one in (("a", a), ("b", b)))
        x = await self._drawn("beta", "log_gamma", shape, DType.float64, first)
        y = await self._drawn("beta", "log_gamma", shape, DType.float64, second)
        return await after("beta", "1.0 / (1.0 + exp(y - x))", kind.value, "x", "y")(x, y, out=out)

    @composed
    async def dirichlet(self, shape: Shape, alpha: npt.ArrayLike, dtype: DTypeLike = "float32") -> AccelRef:
        """Draw shares that add up to 1, of a Dirichlet distribution.

        Args:
            shape: Shape of the result, without its last axis.
            alpha: A vector of the distribution's parameters, above 0.
            dtype: float32 or float64. It is computed in float64.

        Returns:
            An array whose last axis is as long as `alpha`.
        """
        kind, given = checked_dtype("dirichlet", dtype), real("dirichlet", "alpha", alpha, least="> 0")
        if not isinstance(given, np.ndarray) or given.ndim != 1 or not given.size:
            raise ValueError(f"random.dirichlet: alpha must be a vector with elements, got {alpha!r}")
        extents = (*self._extents(shape), given.size)
        logs = await self._drawn("dirichlet", "log_gamma", extents, DType.float64, given)
        shares = await _SHARES.ask(_SHARES.compute(logs, axis=-1, keepdims=False, out=None))
        return shares if kind is DType.float64 else await shares.cast(kind)

    @composed
    async def poisson(self, shape: Shape, lam: ExpressionArgument = 1.0, *, out: Out = None) -> AccelRef:
        """Draw counts of a Poisson distribution: an array of int64, by Hörmann's PTRS (1993).

        Args:
            shape: Shape of the result.
            lam: Mean, from 0 to 2**52: a number, or an array that broadcasts to `shape`.
            out: int64 array of this shape to write to; by default a new one.
        """
        mean = _bounded("poisson", "lam", lam, _LARGEST)
        return await self._drawn("poisson", "poisson", shape, DType.int64, mean, out=out)

    @composed
    async def binomial(
        self, shape: Shape, n: ExpressionArgument, p: ExpressionArgument, *, out: Out = None
    ) -> AccelRef:
        """Draw how many of some trials succeed: an array of int64, by Hörmann's BTRS (1993).

        Args:
            shape: Shape of the result.
            n: Trials, from 0 to 2**52: a number, or an array that broadcasts to `shape`.
            p: Probability of a success, from 0 to 1, likewise.
            out: int64 array of this shape to write to; by default a new one.
        """
        trials, chance = _bounded("binomial", "n", n, _LARGEST), _bounded("binomial", "p", p, 1)
        if not isinstance(trials, AccelRef) and (np.floor(trials) != trials).any():
            raise ValueError(f"random.binomial: n must be a whole number, got {n!r}")
        return await self._drawn("binomial", "binomial", shape, DType.int64, trials, chance, out=out)

    async def _drawn(
        self,
        name: str,
        distribution: Rejection,
        shape: Shape,
        dtype: DType,
        a: Any,
        b: Any = None,
        *,
        factor: float = 1.0,
        out: Out = None,
    ) -> AccelRef:
        """Draw numbers by rejection."""
        if self._kind != "philox4x32_10":
            raise NotSupportedError(
                f"random.{name}: {self._kind} has no words of its own for each number, which rejection "
                "needs; use kind='philox4x32_10'"
            )
        extents = self._extents(shape)
        # A number has a counter, and with it the 2**32 blocks of that.
        seed, row = self._rows(4 * math.prod(extents))
        first = await self._parameter(name, a, extents, factor)
        second = None if b is None else await self._parameter(name, b, extents, 1.0)
        return await self._device.ask(Rejected(distribution, seed, row, extents, dtype, first, second, out))

    async def _parameter(self, name: str, value: Any, extents: tuple[int, ...], factor: float) -> Operand:
        """Bring a checked parameter into float64, one number or one for each element."""
        if isinstance(value, AccelRef):
            return await after(name, "factor * x", "float64", "x", "factor")(value, factor, shape=extents)
        numbers: npt.NDArray[np.float64] = np.asarray(value * factor)
        if not numbers.ndim:
            return np.reshape(numbers, 1)
        if numbers.shape == extents:
            return np.ascontiguousarray(numbers)
        try:
            np.broadcast_to(numbers, extents)
        except ValueError:
            raise ValueError(
                f"random.{name}: parameters must broadcast to shape {extents}, got {numbers.shape}"
            ) from None
        spread = after(name, "+x", "float64", "x").compute(numbers, shape=extents)
        return await self._device.ask(spread)


def _bounded(name: str, argument: str, value: Any, most: int) -> Any:
    """Check a parameter from 0 to a bound."""
    found: Any = real(name, argument, value, least=">= 0")
    if not isinstance(found, AccelRef) and (found > most).any():
        raise ValueError(f"random.{name}: {argument} must be at most {most}, got {value!r}")
    return found
