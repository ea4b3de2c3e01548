"""Distributions: of numbers with a fixed count of words each, and of numbers drawn by rejection."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import numpy as np
import numpy.typing as npt

from ..actors import binder
from ..backends.base import DType, DTypeLike, Ints, NotSupportedError
from ..backends.base.contract.ops import Rejection
from ..devices import AccelRef, Call, Operand, composed
from ..expressions import Elementwise, ExpressionArgument, Out, Reduction, like
from ._messages import Exponential, Lognormal, Normal, Rejected, Uniform
from ._stream import Shape, Stream, checked_dtype, real

ParametersP = ParamSpec("ParametersP")

_TRIANGULAR = (
    "w = right - left; below = left + sqrt(u * w * (mode - left));"
    "above = right - sqrt((1.0 - u) * w * (right - mode)); t = below if u * w < mode - left else above;"
    "y = t if (left <= mode) & (mode <= right) & (left < right) else nan"
)
# Bounds of parameters that such an expression has.
_LOWER_BOUNDS = {"scale": ">= 0", "a": "> 0"}
# Means and counts up to here are integers of float64, with room for the next ones.
_LARGEST = 1 << 52
_SHARES = Reduction(
    "e = exp(x - max(x)); y = e / sum(e)", inputs=["x"], operation="random.dirichlet", precision="float64"
)


def _formed(
    text: str,
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], Callable[ParametersP, Call[AccelRef]]]:
    """Declare a draw by an expression of a uniform number `u`: NaN where a parameter is below its bound.

    The signature only has the parameters of the expression, besides those of every draw.
    """

    def declare(function: Any) -> Any:
        name = function.__name__
        bound = binder(f"random.{name}", function)

        async def draw(*values: Any, **options: Any) -> AccelRef:
            arguments = bound(values, options)
            self, shape, dtype, out = [
                arguments.pop(parameter) for parameter in ("self", "shape", "dtype", "out")
            ]
            extents, kind = self._extents(shape), checked_dtype(name, dtype)
            numbers = {
                parameter: real(name, parameter, number, condition=_LOWER_BOUNDS.get(parameter, ""))
                for parameter, number in arguments.items()
            }
            [condition] = [
                f"{parameter} {condition}"
                for parameter, condition in _LOWER_BOUNDS.items()
                if parameter in arguments
            ]
            formed = f"y = where({condition}, {text}, nan)"
            result: AccelRef = await self._computed(name, formed, extents, kind, out, **numbers)
            return result

        declared: Any = functools.wraps(function)(draw)
        declared.again = _formed
        return declared

    return declare


class Distributions(Stream):
    """Numbers that are functions of uniform and normal numbers, and numbers drawn by rejection.

    The latter take as many words as it happens, from counters of their own (D159).
    """

    @composed
    async def uniform(
        self,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        low: float = 0.0,
        high: float = 1.0,
        out: Out = None,
    ) -> AccelRef:
        """Draw numbers with a uniform distribution over an interval (cuRAND ``curandGenerateUniform``).

        Args:
            shape: Shape of the result.
            dtype: float32 (24 random bits a number) or float64 (53).
            low: Lower bound, not drawn itself but by rounding.
            high: Upper bound, which may be drawn: the numbers come from above 0 up to 1, as in cuRAND.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        extents, kind = self._extents(shape), DType.of(dtype)
        if self._kind == "philox4x32_10":
            return await self._device.ask(Uniform(*self._placed(extents), kind, low, high, out))
        kind, lower, upper = checked_dtype("uniform", kind), _number("uniform", "low", low), float(high)
        if not (lower <= upper and math.isfinite(upper - lower)):
            raise ValueError(
                f"random.uniform: low must not be above high, and both finite, got {low} and {high}"
            )
        return await self._computed(
            "uniform", "y = low + width * u", extents, kind, out, low=lower, width=np.float64(upper - lower)
        )

    @composed
    async def normal(
        self,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        loc: float = 0.0,
        scale: float = 1.0,
        out: Out = None,
    ) -> AccelRef:
        """Draw normally distributed numbers by Box and Muller (cuRAND ``curandGenerateNormal``).

        Args:
            shape: Shape of the result.
            dtype: float32 or float64.
            loc: Mean.
            scale: Standard deviation.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        extents, kind = self._extents(shape), DType.of(dtype)
        if self._kind == "philox4x32_10":
            return await self._device.ask(Normal(*self._placed(extents), kind, loc, scale, out))
        return await self._moved_normals("normal", "loc + scale * x", extents, kind, loc, scale, out)

    @composed
    async def exponential(
        self, shape: Shape, dtype: DTypeLike = "float32", *, scale: float = 1.0, out: Out = None
    ) -> AccelRef:
        """Draw exponentially distributed numbers: minus the logarithms of uniform ones.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64.
            scale: Mean.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        extents, kind = self._extents(shape), DType.of(dtype)
        if self._kind == "philox4x32_10":
            return await self._device.ask(Exponential(*self._placed(extents), kind, scale, out))
        kind = checked_dtype("exponential", kind)
        factor = _number("exponential", "scale", scale, condition=">= 0")
        return await self._computed("exponential", "y = -scale * log(u)", extents, kind, out, scale=factor)

    @composed
    async def lognormal(
        self,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        mean: float = 0.0,
        sigma: float = 1.0,
        out: Out = None,
    ) -> AccelRef:
        """Draw numbers with normally distributed logarithms (cuRAND ``curandGenerateLogNormal``).

        Args:
            shape: Shape of the result.
            dtype: float32 or float64.
            mean: Mean of the logarithms.
            sigma: Standard deviation of the logarithms.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        extents, kind = self._extents(shape), DType.of(dtype)
        if self._kind == "philox4x32_10":
            return await self._device.ask(Lognormal(*self._placed(extents), kind, mean, sigma, out))
        return await self._moved_normals("lognormal", "exp(loc + scale * x)", extents, kind, mean, sigma, out)

    @_formed("loc + scale * tan(pi * (u - 0.5))")
    async def cauchy(
        self,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        loc: ExpressionArgument = 0.0,
        scale: ExpressionArgument = 1.0,
        out: Out = None,
    ) -> AccelRef:
        """Draw numbers of a Cauchy distribution, which lacks a mean.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            loc: Its middle.
            scale: Its width, of at least 0.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        ...

    @like(cauchy, "loc - scale * log(-log(u))")
    def gumbel(self) -> None:
        """Draw numbers of a Gumbel distribution for largest values, as `numpy.random.Generator.gumbel`.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            loc: Its mode.
            scale: Its width, of at least 0.
            out: Array of this shape and dtype to write to; by default a new one.
        """

    @like(cauchy, "loc - scale * sign(u - 0.5) * log1p(-2.0 * abs(u - 0.5))")
    def laplace(self) -> None:
        """Draw numbers of a Laplace distribution, exponential to both sides.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            loc: Its middle.
            scale: Its width, of at least 0.
            out: Array of this shape and dtype to write to; by default a new one.
        """

    @like(cauchy, "loc + scale * log(u / (1.0 - u))")
    def logistic(self) -> None:
        """Draw numbers of a logistic distribution.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            loc: Its middle.
            scale: Its width, of at least 0.
            out: Array of this shape and dtype to write to; by default a new one.
        """

    @_formed("expm1(-log(u) / a)")
    async def pareto(
        self, shape: Shape, dtype: DTypeLike = "float32", *, a: ExpressionArgument, out: Out = None
    ) -> AccelRef:
        """Draw numbers of a Lomax distribution, as `numpy.random.Generator.pareto`.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            a: Shape, above 0.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        ...

    @_formed("scale * sqrt(-2.0 * log(u))")
    async def rayleigh(
        self, shape: Shape, dtype: DTypeLike = "float32", *, scale: ExpressionArgument = 1.0, out: Out = None
    ) -> AccelRef:
        """Draw numbers of a Rayleigh distribution.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            scale: Its mode, at least 0.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        ...

    @composed
    async def triangular(
        self,
        shape: Shape,
        dtype: DTypeLike = "float32",
        *,
        left: ExpressionArgument,
        mode: ExpressionArgument,
        right: ExpressionArgument,
        out: Out = None,
    ) -> AccelRef:
        """Draw numbers with a triangular density, as `numpy.random.Generator.triangular`.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            left: Lower bound.
            mode: Its mode, from `left` to `right`.
            right: Upper bound, above `left`.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        bounds = {
            name: real("triangular", name, bound)
            for name, bound in (("left", left), ("mode", mode), ("right", right))
        }
        host_bounds = [bound for bound in bounds.values() if not isinstance(bound, AccelRef)]
        if len(host_bounds) == len(bounds) and not _ascend(*host_bounds):
            raise ValueError(
                "random.triangular: mode must be from left to right, and right above left, got "
                f"{left}, {mode} and {right}"
            )
        kind, extents = checked_dtype("triangular", dtype), self._extents(shape)
        return await self._computed("triangular", _TRIANGULAR, extents, kind, out, **bounds)

    @like(pareto, "(-log(u)) ** (1.0 / a)")
    def weibull(self) -> None:
        """Draw numbers of a Weibull distribution with scale 1, as `numpy.random.Generator.weibull`.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            a: Shape, above 0.
            out: Array of this shape and dtype to write to; by default a new one.
        """

    async def _moved_normals(
        self, name: str, text: str, extents: Ints, dtype: DType, loc: float, scale: float, out: Out
    ) -> AccelRef:
        """Compute an expression of normal numbers `x`, a mean and a deviation."""
        kind, mean = checked_dtype(name, dtype), _number(name, "mean" if name == "lognormal" else "loc", loc)
        deviation = _number(name, "sigma" if name == "lognormal" else "scale", scale, condition=">= 0")
        numbers = await self._normals(extents)
        return await after(name, text, kind.value, "x", "loc", "scale")(numbers, mean, deviation, out=out)

    def _placed(self, extents: Ints) -> tuple[int, int, Ints]:
        """Take a part of Philox's sequence for an array: seed, first row and shape."""
        return *self._rows(math.prod(extents)), extents

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
        kind, factor = checked_dtype("gamma", dtype), real("gamma", "scale", scale, condition=">= 0")
        shape_parameter = real("gamma", "a", a, condition=">= 0")
        if isinstance(factor, np.generic) and factor == 1:
            return await self._drawn("gamma", "gamma", shape, kind, shape_parameter, out=out)
        x = await self._drawn("gamma", "gamma", shape, DType.float64, shape_parameter)
        expression = after("gamma", "where(scale >= 0, scale * x, nan)", kind.value, "x", "scale")
        return await expression(x, factor, shape=x.shape, out=out)

    @composed
    async def chisquare(
        self, shape: Shape, dtype: DTypeLike = "float32", *, df: ExpressionArgument, out: Out = None
    ) -> AccelRef:
        """Draw sums of squared normal numbers: twice a number of a gamma distribution.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            df: Degrees of freedom, at least 0: a number, or an array that broadcasts to `shape`.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        kind = checked_dtype("chisquare", dtype)
        freedom = real("chisquare", "df", df, condition=">= 0")
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
        kind, freedom = checked_dtype("standard_t", dtype), real("standard_t", "df", df, condition="> 0")
        x = await self._drawn("standard_t", "gamma", shape, DType.float64, freedom, factor=0.5)
        expression = after(
            "standard_t", "where(df > 0, z / sqrt(2.0 * x / df), nan)", kind.value, "x", "z", "df"
        )
        return await expression(x, await self._normals(x.shape), freedom, shape=x.shape, out=out)

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
        """Draw numbers of a beta distribution: one gamma-distributed number divided by the sum of two.

        They are made of logarithms, so that small `a` and `b` leave no 0 over 0.

        Args:
            shape: Shape of the result.
            dtype: float32 or float64. It is computed in float64.
            a: First shape of the distribution, above 0: a number, or an array that broadcasts to `shape`.
            b: Second shape, likewise.
            out: Array of this shape and dtype to write to; by default a new one.
        """
        kind = checked_dtype("beta", dtype)
        first, second = (real("beta", name, value, condition="> 0") for name, value in (("a", a), ("b", b)))
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
            An array with a last axis as long as `alpha`.
        """
        kind, alphas = checked_dtype("dirichlet", dtype), real("dirichlet", "alpha", alpha, condition="> 0")
        if not isinstance(alphas, np.ndarray) or alphas.ndim != 1 or not alphas.size:
            raise ValueError(f"random.dirichlet: alpha must be a vector with elements, got {alpha!r}")
        extents = (*self._extents(shape), alphas.size)
        logs = await self._drawn("dirichlet", "log_gamma", extents, DType.float64, alphas)
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
            raise ValueError(f"random.binomial: n must be an integer, got {n!r}")
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

    async def _parameter(self, name: str, value: Any, extents: Ints, factor: float) -> Operand:
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


@functools.lru_cache(256)
def after(name: str, text: str, dtype: str, *inputs: str) -> Elementwise[AccelRef]:
    """Make an expression of drawn numbers."""
    return Elementwise(text, inputs=inputs, dtypes=dtype, operation=f"random.{name}")


def _ascend(lower: Any, mode: Any, upper: Any) -> bool:
    return bool(np.all((lower <= mode) & (mode <= upper) & (lower < upper)))


def _number(name: str, argument: str, value: Any, *, condition: str = "") -> np.float64:
    """Return one number, checked as `real` does."""
    number = real(name, argument, value, condition=condition)
    if not isinstance(number, np.float64):
        raise TypeError(f"random.{name}: {argument} must be one number, got {value!r}")
    return number


def _bounded(name: str, argument: str, value: Any, maximum: int) -> Any:
    """Check a parameter from 0 to a bound."""
    parameter: Any = real(name, argument, value, condition=">= 0")
    if not isinstance(parameter, AccelRef) and (parameter > maximum).any():
        raise ValueError(f"random.{name}: {argument} must be at most {maximum}, got {value!r}")
    return parameter
