"""Activations, and their gradients: one expression each, so one launch (D155).

All are computed in float32 at least, and rounded once to the dtype of the arguments, so float16 and bfloat16
lose no digits in between. Integers become float64, except for `relu` and `relu6`. No exponential overflows,
because no exponent is positive. NaN stays NaN, and infinite elements have the limits.

A gradient is a function of `grad`, the gradient of the activation's result, and of `x`, its argument.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import partial
from typing import Literal, TypeAlias

from ..devices import AccelRef, Operand, composed
from ..expressions import Axis, Elementwise, ExpressionArgument, Out, axis_of, check_array, expression, like
from ._library import check_choice
from ._slopes import slope_of

__all__ = [
    "celu",
    "celu_grad",
    "elu",
    "elu_grad",
    "gelu",
    "gelu_grad",
    "glu",
    "glu_grad",
    "hardshrink",
    "hardshrink_grad",
    "hardsigmoid",
    "hardsigmoid_grad",
    "hardswish",
    "hardswish_grad",
    "hardtanh",
    "hardtanh_grad",
    "leaky_relu",
    "leaky_relu_grad",
    "log_sigmoid",
    "log_sigmoid_grad",
    "log_softmax_grad",
    "mish",
    "mish_grad",
    "prelu",
    "prelu_grad",
    "relu",
    "relu6",
    "relu6_grad",
    "relu_grad",
    "selu",
    "selu_grad",
    "sigmoid",
    "sigmoid_grad",
    "silu",
    "silu_grad",
    "softmax_grad",
    "softmin",
    "softplus",
    "softplus_grad",
    "softshrink",
    "softshrink_grad",
    "softsign",
    "softsign_grad",
    "tanh_grad",
    "tanhshrink",
    "tanhshrink_grad",
    "threshold",
    "threshold_grad",
]

_expression = partial(expression, precision="float32")

# The sigmoid of x, and 1 minus that, from an exponential with an exponent of 0 or less. Here and below it is
# not -abs(x), because the derivative of abs is 0 at 0, so second derivatives would be wrong there.
_SIGMOID = "e = exp(where(x >= 0, -x, x)); s = where(x >= 0, 1, e) / (1 + e)"
_COMPLEMENT_SIGMOID = f"{_SIGMOID}; t = where(x >= 0, e, 1) / (1 + e)"
# tanh(softplus(x)).
_MISH = (
    "e = exp(where(x >= 0, -x, x)); w = where(x >= 0, 1 + 2 * e, e * e + 2 * e)"
    " / where(x >= 0, 1 + 2 * e + 2 * e * e, e * e + 2 * e + 2)"
)
# Klambauer et al., Self-Normalizing Neural Networks (2017).
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
# sqrt(1/2), 1/sqrt(2 pi), and 2 sqrt(2/pi).
_ROOT_HALF, _DENSITY, _TANH_SCALE = 0.7071067811865476, 0.3989422804014327, 1.5957691216057308
# Far from 0, factors are multiplied by zero, so bounds keep them finite; outside of the bounds derivatives
# are 0 or 1.
_FROM_BELOW = "maximum(x, -1e30)"
_CLAMP = "z = minimum(maximum(x, -1000), 1000)"


@_expression("y = maximum(x, 0)", precision=None)
async def relu(x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Replace negative elements by 0, in the dtype of `x`.

    Args:
        x: Real numbers.
        out: Array to write to; it may be `x`.

    Returns:
        The elements, with the shape of `x`.

    Raises:
        TypeError: `x` is neither an array nor a number, or complex; or the result does not convert to the
            dtype of `out`.
        ValueError: `out` has another shape, or shares memory with `x` and is not the same array.
        NotSupportedError: float8.
    """
    ...


@slope_of(relu)
def relu_grad() -> None:
    """Compute the gradient of `relu`: 0 where `x` is 0.

    Args:
        grad: Gradient of the result.
        x: The argument of the function; both broadcast.
        out: Array to write to; it may be `grad` or `x`.

    Returns:
        The gradient of `x`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `relu`; or shapes that do not broadcast.
    """


@like(relu, "y = minimum(maximum(x, 0), 6)")
def relu6() -> None:
    """Bring elements between 0 and 6, in the dtype of `x`.

    See `relu` for arguments and errors.
    """


@slope_of(relu6)
def relu6_grad() -> None:
    """Compute the gradient of `relu6`.

    See `relu_grad` for arguments and errors.
    """


@_expression(
    "y = where(x > 0, x, where((x < 0) and (negative_slope == 0), 0, x * negative_slope))",
    slopes={"x": "s = where(x > 0, g, g * negative_slope)"},
)
async def leaky_relu(x: ExpressionArgument, negative_slope: float = 0.01, *, out: Out = None) -> AccelRef:
    """Multiply negative elements by `negative_slope`.

    See `relu` for arguments and errors.
    """
    ...


@slope_of(leaky_relu)
def leaky_relu_grad() -> None:
    """Compute the gradient of `leaky_relu`.

    See `relu_grad` for arguments and errors.
    """


@_expression(
    "y = where(x > 0, x, where((x < 0) and (weight == 0), 0, x * weight))",
    slopes={"x": "s = where(x > 0, g, g * weight)", "weight": "s = where(x < 0, g * x, 0)"},
)
async def prelu(x: ExpressionArgument, weight: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Multiply negative elements by learned factors.

    `weight` broadcasts to `x`: for channels along axis 1 of images, it has the shape (C, 1, 1). See `relu`
    for other arguments and errors.
    """
    ...


@slope_of(prelu)
def prelu_grad() -> None:
    """Compute the gradient of `prelu` by `x`. That of the factors is the sum of ``grad * minimum(x, 0)``.

    See `relu_grad` for arguments and errors.
    """


@_expression("y = where(x <= threshold, value, x)")
async def threshold(x: ExpressionArgument, threshold: float, value: float, *, out: Out = None) -> AccelRef:
    """Replace elements up to `threshold` by `value`.

    See `relu` for arguments and errors.
    """
    ...


@slope_of(threshold)
def threshold_grad() -> None:
    """Compute the gradient of `threshold`.

    See `relu_grad` for arguments and errors.
    """


@_expression("y = where(abs(x) <= lambd, 0, x)")
async def hardshrink(x: ExpressionArgument, lambd: float = 0.5, *, out: Out = None) -> AccelRef:
    """Replace elements from ``-lambd`` to `lambd` by 0.

    See `relu` for arguments and errors.
    """
    ...


@slope_of(hardshrink)
def hardshrink_grad() -> None:
    """Compute the gradient of `hardshrink`, which is also the gradient of `softshrink`.

    See `relu_grad` for arguments and errors.
    """


@like(
    hardshrink, "y = x - minimum(maximum(x, -lambd), lambd)", slopes={"x": "s = where(abs(x) <= lambd, 0, g)"}
)
def softshrink() -> None:
    """Move elements towards 0 by `lambd`, and to 0 if they are nearer than that.

    See `relu` for arguments and errors.
    """


@slope_of(softshrink)
def softshrink_grad() -> None:
    """Compute the gradient of `softshrink`.

    See `relu_grad` for arguments and errors.
    """


# The sum makes 0 of -0, and `minimum` would hide the slope at 0.
@_expression("y = where(x > 0, x, alpha * expm1(x + 0))")
async def elu(x: ExpressionArgument, alpha: float = 1.0, *, out: Out = None) -> AccelRef:
    """Replace negative elements by ``alpha * (exp(x) - 1)``.

    See `relu` for arguments and errors.
    """
    ...


@slope_of(elu)
def elu_grad() -> None:
    """Compute the gradient of `elu`.

    See `relu_grad` for arguments and errors.
    """


@like(
    relu,
    f"y = {_SELU_SCALE} * where(x > 0, x, {_SELU_ALPHA} * expm1(x + 0))",
    precision="float32",
)
def selu() -> None:
    """Compute the scaled `elu` of self-normalizing networks (Klambauer et al., 2017).

    See `relu` for arguments and errors.
    """


@slope_of(selu)
def selu_grad() -> None:
    """Compute the gradient of `selu`.

    See `relu_grad` for arguments and errors.
    """


@like(
    elu,
    "y = where(x > 0, x, alpha * expm1(minimum(x, 0) / alpha))",
    slopes={"x": "s = where(x > 0, g, g * exp(minimum(x, 0) / alpha))"},
)
def celu() -> None:
    """Replace negative elements by ``alpha * (exp(x / alpha) - 1)``.

    See `relu` for arguments and errors.
    """


@slope_of(celu)
def celu_grad() -> None:
    """Compute the gradient of `celu`.

    See `relu_grad` for arguments and errors.
    """


@like(
    selu,
    f"{_SIGMOID}; y = {_FROM_BELOW} * s",
    slopes={"x": f"{_COMPLEMENT_SIGMOID}; {_CLAMP}; s = g * s * (1 + z * t)"},
)
def silu() -> None:
    """Compute ``x * sigmoid(x)``, also known as swish.

    See `relu` for arguments and errors.
    """


@slope_of(silu)
def silu_grad() -> None:
    """Compute the gradient of `silu`.

    See `relu_grad` for arguments and errors.
    """


@like(
    selu,
    f"{_MISH}; y = {_FROM_BELOW} * w",
    slopes={"x": f"{_MISH}; {_CLAMP}; s = g * (w + z * (where(x >= 0, 1, e) / (1 + e)) * (1 - w * w))"},
)
def mish() -> None:
    """Compute ``x * tanh(softplus(x))``.

    See `relu` for arguments and errors.
    """


@slope_of(mish)
def mish_grad() -> None:
    """Compute the gradient of `mish`.

    See `relu_grad` for arguments and errors.
    """


@_expression(
    "y = where(beta > 0, maximum(x, 0), minimum(x, 0)) + log1p(exp(-abs(beta * x))) / beta",
    slopes={"x": "b = beta * x; e = exp(where(b >= 0, -b, b)); s = g * where(b >= 0, 1, e) / (1 + e)"},
)
async def softplus(x: ExpressionArgument, beta: float = 1.0, *, out: Out = None) -> AccelRef:
    """Compute ``log(1 + exp(beta * x)) / beta``.

    It is also exact for large elements, so there is no `threshold`.

    See `relu` for arguments and errors.
    """
    ...


@slope_of(softplus)
def softplus_grad() -> None:
    """Compute the gradient of `softplus`.

    See `relu_grad` for arguments and errors.
    """


@like(
    selu,
    "a = abs(x); y = where(a == inf, sign(x), x / (1 + a))",
    slopes={"x": "a = 1 + abs(x); s = g / a / a"},
)
def softsign() -> None:
    """Compute ``x / (1 + abs(x))``.

    See `relu` for arguments and errors.
    """


@slope_of(softsign)
def softsign_grad() -> None:
    """Compute the gradient of `softsign`.

    See `relu_grad` for arguments and errors.
    """


@_expression("y = minimum(maximum(x, min_val), max_val)")
async def hardtanh(
    x: ExpressionArgument, min_val: float = -1.0, max_val: float = 1.0, *, out: Out = None
) -> AccelRef:
    """Bring elements between `min_val` and `max_val`.

    See `relu` for arguments and errors.
    """
    ...


@slope_of(hardtanh)
def hardtanh_grad() -> None:
    """Compute the gradient of `hardtanh`.

    See `relu_grad` for arguments and errors.
    """


# In this order GCC makes vectors of float16, and bounds of `x` itself do not round.
@like(selu, "y = (minimum(maximum(-3, x), 3) + 3) / 6")
def hardsigmoid() -> None:
    """Compute ``relu6(x + 3) / 6``.

    See `relu` for arguments and errors.
    """


@slope_of(hardsigmoid)
def hardsigmoid_grad() -> None:
    """Compute the gradient of `hardsigmoid`.

    See `relu_grad` for arguments and errors.
    """


@like(
    selu,
    f"y = {_FROM_BELOW} * (minimum(maximum(x + 3, 0), 6) / 6)",
    slopes={"x": "s = where(x <= -3, 0, where(x >= 3, g, g * (x / 3 + 0.5)))"},
)
def hardswish() -> None:
    """Compute ``x * relu6(x + 3) / 6``.

    See `relu` for arguments and errors.
    """


@slope_of(hardswish)
def hardswish_grad() -> None:
    """Compute the gradient of `hardswish`.

    See `relu_grad` for arguments and errors.
    """


@like(
    selu,
    f"{_SIGMOID}; y = +s",
    slopes={"x": "e = exp(where(x >= 0, -x, x)); s = g * (e / (1 + e) / (1 + e))"},
)
def sigmoid() -> None:
    """Compute ``1 / (1 + exp(-x))``.

    See `relu` for arguments and errors.
    """


@slope_of(sigmoid)
def sigmoid_grad() -> None:
    """Compute the gradient of `sigmoid`.

    See `relu_grad` for arguments and errors.
    """


@like(
    selu,
    "y = minimum(x, 0) - log1p(exp(-abs(x)))",
    slopes={"x": "e = exp(where(x >= 0, -x, x)); s = g * where(x >= 0, e, 1) / (1 + e)"},
)
def log_sigmoid() -> None:
    """Compute the logarithm of `sigmoid`.

    See `relu` for arguments and errors.
    """


@slope_of(log_sigmoid)
def log_sigmoid_grad() -> None:
    """Compute the gradient of `log_sigmoid`.

    See `relu_grad` for arguments and errors.
    """


@like(relu, "y = x - tanh(x)", precision="float64", slopes={"x": "t = tanh(x); s = g * (t * t)"})
def tanhshrink() -> None:
    """Compute ``x - tanh(x)``, in float64.

    See `relu` for arguments and errors.
    """


@slope_of(tanhshrink)
def tanhshrink_grad() -> None:
    """Compute the gradient of `tanhshrink`.

    See `relu_grad` for arguments and errors.
    """


@_expression("e = exp(-2 * abs(x)); y = grad * (4 * e / (1 + e) / (1 + e))")
async def tanh_grad(grad: ExpressionArgument, x: ExpressionArgument, *, out: Out = None) -> AccelRef:
    """Compute the gradient of `ta.arrays.tanh`.

    See `relu_grad` for arguments and errors.
    """
    ...


_Approximate: TypeAlias = Literal["none", "tanh"]

# Hendrycks and Gimpel, Gaussian Error Linear Units (2016). Above 30 the derivative is 0 or 1 in any dtype.
_INNER = f"{_TANH_SCALE} * (z + 0.044715 * z * z * z)"


def _promoted(
    name: str, inputs: tuple[str, ...], text: str, slopes: Mapping[str, str] | None = None
) -> Elementwise[AccelRef]:
    return Elementwise(
        text, inputs=inputs, operation=name, promoted=inputs, precision="float32", slopes=slopes
    )


_gelus = {
    "none": _promoted(
        "nn.gelu",
        ("x",),
        f"y = {_FROM_BELOW} * (0.5 * erfc(-{_ROOT_HALF} * x))",
        {
            "x": f"{_CLAMP}; s = g * (0.5 * erfc(-{_ROOT_HALF} * x) + z * ({_DENSITY} * exp(-0.5 * z * z)))",
        },
    ),
    "tanh": _promoted(
        "nn.gelu",
        ("x",),
        f"z = +x; u = {_INNER}; e = exp(where(u >= 0, -u, u));"
        f"y = {_FROM_BELOW} * (where(u >= 0, 1, e) / (1 + e))",
        {
            "x": (
                f"z = minimum(maximum(x, -30), 30); u = {_INNER}; e = exp(where(u >= 0, -u, u));"
                "s = where(u >= 0, 1, e) / (1 + e);"
                f"s = g * (s + z * (e / (1 + e) / (1 + e)) * ({_TANH_SCALE} * (1 + 0.134145 * z * z)))"
            ),
        },
    ),
}
_gelu_grads = {
    key: _promoted("nn.gelu_grad", ("grad", "x"), f"g = grad; {elementwise.slopes['x']}")
    for key, elementwise in _gelus.items()
}


@composed
async def gelu(x: ExpressionArgument, approximate: _Approximate = "none", *, out: Out = None) -> AccelRef:
    """Multiply elements by the distribution function of the normal distribution there.

    Args:
        x: Real numbers.
        approximate: ``"none"``, or ``"tanh"`` for the approximation by a hyperbolic tangent.
        out: Array to write to; it may be `x`.

    Returns:
        The elements, with the shape of `x`.

    Raises:
        TypeError, NotSupportedError: As of `relu`.
        ValueError: See `relu`; or another `approximate`.
    """
    check_choice("nn.gelu", "approximate", approximate, _gelus)
    return await _gelus[approximate](x, out=out)


async def _gelu_grad(grad: ExpressionArgument, x: ExpressionArgument, approximate: str, out: Out) -> AccelRef:
    check_choice("nn.gelu_grad", "approximate", approximate, _gelu_grads)
    return await _gelu_grads[approximate](grad, x, out=out)


@slope_of(gelu, _gelu_grad)
def gelu_grad() -> None:
    """Compute the gradient of `gelu`.

    See `gelu` for arguments and errors and `relu_grad`.
    """


@expression("e = exp(min(x) - x); y = e / sum(e)", axes=True, precision="float32")
async def softmin(x: Operand, axis: Axis = None, *, out: Out = None) -> AccelRef:
    """Compute the `ta.arrays.softmax` of ``-x``, which has the same arguments and errors."""
    ...


@expression(
    "e = exp(x - max(x)); p = e / sum(e); y = p * (grad - sum(p * grad))",
    axes=True,
    precision="float64",
    arrays=["grad"],
)
async def softmax_grad(grad: Operand, x: Operand, axis: Axis = None, *, out: Out = None) -> AccelRef:
    """Compute the gradient of `ta.arrays.softmax` along the same axes, in one launch.

    Args:
        grad: Gradient of the result, an array.
        x: The argument of the function; both broadcast.
        axis: Axis or axes along which the results add up to 1; None for all.
        out: Array to write to; it may be `grad` or `x`.

    Returns:
        The gradient of `x`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `ta.arrays.softmax`.
    """
    ...


@like(softmax_grad, "d = x - max(x); e = exp(d); s = sum(e); y = grad - e / s * sum(grad)")
def log_softmax_grad() -> None:
    """Compute the gradient of `ta.arrays.log_softmax` along the same axes, in one launch.

    See `softmax_grad` for arguments and errors.
    """


_GLU = _promoted("nn.glu", ("a", "x"), f"{_SIGMOID}; y = a * s")


@functools.cache
def _glu_grad(axis: int) -> Elementwise[AccelRef]:
    """Make the gradient for halves along a new axis, which is counted from the end: one for each number."""
    text = f"{_COMPLEMENT_SIGMOID}; y = grad * s * where(i({axis}) == 0, 1, a * t)"
    return _promoted("nn.glu_grad", ("grad", "a", "x"), text)


@composed
async def glu(x: Operand, axis: int = -1, *, out: Out = None) -> AccelRef:
    """Multiply the first half along an axis by the `sigmoid` of the second: one launch.

    Args:
        x: Real numbers.
        axis: The axis; it has an even number of elements.
        out: Array to write to.

    Returns:
        An array with the shape of `x`, with half as many elements along the axis.

    Raises:
        TypeError, NotSupportedError: As of `relu`.
        ValueError: See `relu`; or an axis out of range, or has an odd number of elements.
    """
    axis_index, half = _halves("nn.glu", x, axis)
    prefix = (slice(None),) * axis_index
    return await _GLU(x[(*prefix, slice(half))], x[(*prefix, slice(half, None))], out=out)


@composed
async def glu_grad(grad: Operand, x: Operand, axis: int = -1) -> AccelRef:
    """Compute the gradient of `glu`: one launch.

    Args:
        grad: Gradient of the result.
        x: The argument of the function.
        axis: The halved axis.

    Returns:
        The gradient of `x`, of its shape.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `glu`; or `grad` has another shape than its result.
    """
    axis_index, half = _halves("nn.glu_grad", x, axis)
    shape, result_shape = x.shape, (*x.shape[:axis_index], half, *x.shape[axis_index + 1 :])
    check_array("nn.glu_grad", grad=grad)
    if grad.shape != result_shape:
        raise ValueError(f"nn.glu_grad: grad must have shape {result_shape}, got shape {grad.shape}")
    apart = (*shape[:axis_index], 2, half, *shape[axis_index + 1 :])
    prefix, halves = (slice(None),) * axis_index, x.reshape(apart)
    first, second = halves[(*prefix, slice(0, 1))], halves[(*prefix, slice(1, 2))]
    gradient = await _glu_grad(axis_index - len(shape) - 1)(
        grad.reshape((*shape[:axis_index], 1, half, *shape[axis_index + 1 :])), first, second, shape=apart
    )
    return gradient.reshape(shape)


def _halves(name: str, x: Operand, axis: int) -> tuple[int, int]:
    """Return the axis, and half of its length."""
    check_array(name, x=x)
    axis_index = axis_of(name, x, axis)
    half, odd = divmod(x.shape[axis_index], 2)
    if odd:
        raise ValueError(f"{name}: axis {axis} must have an even number of elements, got shape {x.shape}")
    return axis_index, half
