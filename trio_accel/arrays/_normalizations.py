"""Normalizations along axes: each is one launch, as the memory is what they wait for."""

from __future__ import annotations

from ..devices import AccelRef, Operand
from ..expressions import Axis, ExpressionArgument, Out, like, rows, scaled, squares

__all__ = ["cosine_similarity", "layer_norm", "log_softmax", "rms_norm", "softmax"]


@rows(
    f"a = sqrt(sum({squares('x1')})); b = sqrt(sum({squares('x2')}));"
    "y = sum(conj(x1) * x2) / (maximum(a, eps) * maximum(b, eps))",
    wide=scaled("x1", "u", "k")
    + scaled("x2", "v", "m")
    + f"a = sqrt(sum({squares('u')})); b = sqrt(sum({squares('v')}));"
    "y = sum(conj(u) * v) / maximum(a, eps * k) / maximum(b, eps * m)",
    precision="float64",
)
async def cosine_similarity(
    x1: Operand, x2: Operand, axis: Axis = -1, *, eps: float = 1e-8, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Compute the cosine of the angle between vectors, as `torch.nn.functional.cosine_similarity` does.

    The arrays broadcast against each other. The first of complex vectors is conjugated. It is computed in
    float64 and rounded once. See `softmax` for few long rows.

    Args:
        x1: Vectors.
        x2: Vectors.
        axis: Axis or axes that make a vector; None for all.
        eps: The least that each norm counts as, so that a vector of zeros has 0.
        keepdims: Whether those axes stay, with one element.
        out: Array to write to.

    Returns:
        The cosines.

    Raises:
        TypeError: No array, or dtypes that do not become that of `out`.
        ValueError: Shapes that do not broadcast, an axis that there is not, or `out` has another shape or
            shares memory with an argument.
        NotSupportedError: float8.
    """
    ...


@rows(
    f"d = x - mean(x); v = mean({squares('d')}); y = d / sqrt(v + eps) * weight + bias",
    wide=f"{scaled('x', 'u', 'k', raises=False)} d = u - mean(u); v = mean({squares('d')});"
    "y = d / sqrt(v + eps * k * k) * weight + bias",
    precision="float64",
)
async def layer_norm(
    x: Operand,
    weight: ExpressionArgument = 1,
    bias: ExpressionArgument = 0,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    out: Out = None,
) -> AccelRef:
    """Bring elements along axes to mean 0 and variance 1, then scale and shift them.

    That is ``(x - mean) / sqrt(var + eps) * weight + bias``. `torch.nn.functional.layer_norm` takes the
    shape of the last axes, as `normalized_shape`; here the axes are named, and `weight` and `bias` broadcast
    to `x`. It is computed in float64 and rounded once. See `softmax` for few long rows.

    Args:
        x: The array.
        weight: Factors, in an array or one for all.
        bias: Added behind that.
        axis: Axis or axes of the mean and the variance; None for all.
        eps: Added to the variance.
        out: Array to write to; it may be `x`.

    Returns:
        An array of the shape of `x`, of the dtype that `x`, `weight` and `bias` are promoted to, at least
        a floating one.

    Raises:
        TypeError: `x` is no array, or dtypes that do not become that of `out`.
        ValueError: Shapes that do not broadcast, an axis that there is not, or `out` has another shape or
            shares memory with an argument that is not the same array.
        NotSupportedError: float8.
    """
    ...


@rows("d = x - max(x); y = d - log(sum(exp(d)))")
async def log_softmax(x: Operand, axis: Axis = None, *, out: Out = None) -> AccelRef:
    """Compute the logarithm of the softmax along axes, as `scipy.special.log_softmax` does.

    Nothing is lost where the softmax is too small for its dtype. Arguments and errors are those of `softmax`.
    """
    ...


@rows(
    f"y = x / sqrt(mean({squares('x')}) + eps) * weight",
    wide=scaled("x", "u", "k", raises=False) + f"y = u / sqrt(mean({squares('u')}) + eps * k * k) * weight",
    precision="float64",
)
async def rms_norm(
    x: Operand, weight: ExpressionArgument = 1, *, axis: Axis = -1, eps: float = 1e-6, out: Out = None
) -> AccelRef:
    """Divide elements by the root of their mean square along axes, then scale them.

    That is ``x / sqrt(mean(x**2) + eps) * weight``. Arguments and errors are those of `layer_norm`.
    """
    ...


@like(log_softmax, "e = exp(x - max(x)); y = e / sum(e)")
def softmax() -> None:
    """Compute exponentials, divided by their sum along axes, as `scipy.special.softmax` does.

    It is one launch: a row is read three times, of which the device's memory sees one as long as the row is
    in its caches. Fewer than 256 rows of more than 131072 elements each are made in three launches instead:
    one for each reduction and one for the result, so that the whole device makes a row. float16 and
    bfloat16 are computed in float32, the sum is made in float64, and the result is rounded once.

    >>> import trio, numpy as np, trio_accel as ta
    >>> async def main() -> None:
    ...     async with ta.open_system("odds") as system, system.open_device("cpu") as device:
    ...         x = await device.put(np.log([[1.0, 3.0], [2.0, 2.0]]))
    ...         print(await ta.arrays.softmax(x, axis=1).to_host())
    >>> trio.run(main)
    [[0.25 0.75]
     [0.5  0.5 ]]

    Args:
        x: The array, real. The result of whole numbers is float64.
        axis: Axis or axes whose elements make 1; None for all.
        out: Array to write to; it may be `x`.

    Returns:
        An array of the shape of `x`. It is NaN along the axes where an element is NaN or infinite, or where
        all are ``-inf``.

    Raises:
        TypeError: `x` is no array or complex, or `out` is of a dtype that the result does not become.
        ValueError: An axis that there is not, or `out` has another shape or shares memory with `x` and is not
            the same array.
        NotSupportedError: float8.
    """
