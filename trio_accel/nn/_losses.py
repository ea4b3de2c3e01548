"""Losses, and their gradients.

Elements are computed in float32 at least, and summed in float64. A result is rounded once, to the dtype of
the predictions, or float64 for integers. A term with a factor of 0 adds nothing, even if it is infinite: a
class with probability 0, or one without weight.

`reduction` is ``"none"`` for the loss of each element, ``"mean"`` or ``"sum"``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias

import attrs
import numpy as np

from ..actors import arguments_of
from ..backends.base import DType, Ints, Strs
from ..devices import AccelRef, Call, Operand, composed, device_of
from ..expressions import Elementwise, ExpressionArgument, Reduction, check_array, like, promoted_dtype
from ._library import check_choice, check_range, check_real, naming
from ._slopes import DERIVED, slope_of, slope_text

__all__ = [
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy_with_logits_grad",
    "cross_entropy",
    "cross_entropy_grad",
    "huber_loss",
    "huber_loss_grad",
    "kl_div",
    "kl_div_grad",
    "l1_loss",
    "l1_loss_grad",
    "mse_loss",
    "mse_loss_grad",
    "nll_loss",
    "smooth_l1_loss",
    "smooth_l1_loss_grad",
]

ParametersP = ParamSpec("ParametersP")

LossReduction: TypeAlias = Literal["none", "mean", "sum"]
_REDUCTIONS = ("none", "mean", "sum")
# Options with plain numbers, and the options among them that must be at least 0.
_NUMBERS, _FROM_ZERO = ("beta", "delta", "eps", "full", "margin"), ("beta", "delta")

LOSSES: dict[str, Callable[..., Loss]] = {}
"""By the names of functions, what returns the loss of each element by their arguments."""


class Loss:
    """A loss that is computed for each element.

    Args:
        operation: Name of the operation.
        inputs: Names of the inputs: the prediction first, `target`, and options.
        text: Statements that make the loss of an element.
        slopes: The text of its slope by the prediction, see `Elementwise`.
    """

    def __init__(
        self, operation: str, inputs: Sequence[str], text: str, slopes: Mapping[str, str] | None = None
    ) -> None:
        self._elementwise = Elementwise[AccelRef](
            text, inputs=inputs, operation=operation, precision="float32", slopes=slopes
        )

    async def reduced(self, *, reduction: str, **arguments: Any) -> AccelRef:
        """Compute the loss: one launch."""
        values = self._checked(self._elementwise.operation, reduction, arguments).values()
        if reduction == "none":
            return await self._elementwise(*values)
        rows = self._rows(reduction)
        return await rows.ask(rows.compute(*values))

    async def derived(self, *, grad: ExpressionArgument, reduction: str, **arguments: Any) -> AccelRef:
        """Compute the gradient by the prediction: one launch."""
        name = f"{self._elementwise.operation}_grad"
        values = self._checked(name, reduction, arguments)
        _check_grad(name, grad, values[self._elementwise.inputs[0]].shape if reduction == "none" else ())
        return await self.slope(grad=grad, reduction=reduction, **values)

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the inputs, the prediction first."""
        return self._elementwise.inputs

    def elementwise(self, **arguments: Any) -> Call[AccelRef]:
        """Return the loss of each element as a call of an expression, without checks."""
        return self._elementwise(
            *[float(arguments[name]) if name in _NUMBERS else arguments[name] for name in self.inputs]
        )

    def slope(self, *, grad: ExpressionArgument, reduction: str, **arguments: Any) -> Call[AccelRef]:
        """Return the gradient by the prediction as a call of an expression, without checks."""
        arguments |= {name: float(arguments[name]) for name in _NUMBERS if name in arguments}
        x = arguments[self._elementwise.inputs[0]]
        scale = 1.0 / x.size if reduction == "mean" and x.size else 1.0
        arguments |= {"grad": grad, "scale": scale}
        return self._slope(*[arguments[name] for name in self._slope.inputs])

    def _checked(self, name: str, reduction: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check all arguments, and return the inputs in their order."""
        inputs = self._elementwise.inputs
        for option in inputs:
            if option in _FROM_ZERO:
                check_range(name, 0, np.inf, **{option: arguments[option]})
        values: dict[str, Any]
        values = {
            input_name: float(arguments[input_name]) if input_name in _NUMBERS else arguments[input_name]
            for input_name in inputs
        }
        first, *other_inputs = inputs
        _check_pair(name, values[first], **{input_name: values[input_name] for input_name in other_inputs})
        check_choice(name, "reduction", reduction, _REDUCTIONS)
        return values

    @functools.cached_property
    def _slope(self) -> Elementwise[AccelRef]:
        elementwise = self._elementwise
        text = f"g = grad * scale\n{slope_text(elementwise, _NUMBERS)}"
        return Elementwise(text, operation=f"{elementwise.operation}_grad", precision="float32")

    @functools.cache  # noqa: B019  there is one for each loss
    def _rows(self, reduction: str) -> Reduction:
        elementwise = self._elementwise
        text = f"{elementwise.text}; y = {reduction}({elementwise.outputs[0]})"
        return Reduction(
            text, inputs=elementwise.inputs, precision="float32", operation=elementwise.operation
        )


def _itself(loss: Loss, **_: object) -> Loss:
    return loss


def loss(
    text: str, *, slopes: Mapping[str, str] | None = None
) -> Callable[[Callable[ParametersP, Coroutine[Any, Any, AccelRef]]], Callable[ParametersP, Call[AccelRef]]]:
    """Declare a loss that is computed for each element.

    The parameters of the function, except `reduction`, are the inputs of the expression, in order. Its body
    consists of a docstring.

    Args:
        text: See `Loss`.
        slopes: See `Loss`; None if the slope is derived.
    """

    def declare(function: Any) -> Any:
        inputs = [name for name in inspect.signature(function).parameters if name != "reduction"]
        instance = Loss(f"nn.{function.__name__}", inputs, text, slopes)
        if slopes is None:
            DERIVED.add(f"nn.{function.__name__}")
        LOSSES[f"nn.{function.__name__}"] = functools.partial(_itself, instance)
        wrapper: Any = arguments_of(function, instance.reduced)(function)
        wrapper.derived, wrapper.again = instance.derived, loss
        return wrapper

    return declare


_DIVERGENCES = {
    False: Loss(
        "nn.kl_div",
        ("x", "target"),
        "v = where((target == 0) and (x == x), 0, target * (log(target) - x))",
        {"x": "s = g * where(x == x, -target, x)"},
    ),
    True: Loss(
        "nn.kl_div",
        ("x", "target"),
        "p = exp(target); v = where((p == 0) and (x == x), 0, p * (target - x))",
        {"x": "s = g * where(x == x, -exp(target), x)"},
    ),
}


@loss("d = x - target; v = d * d")
async def mse_loss(x: Operand, target: Operand, *, reduction: LossReduction = "mean") -> AccelRef:
    """Compute squares of differences, as `torch.nn.functional.mse_loss`: one launch.

    Args:
        x: The predictions.
        target: The targets, of the same shape.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss, with shape (), or with the shape of `x` for ``"none"``. The mean of no elements is NaN.

    Raises:
        TypeError: An argument is not an array, or is complex, or the dtypes do not promote to one.
        ValueError: The shapes differ, or `reduction` is unknown.
        NotSupportedError: float8.
    """
    ...


@slope_of(mse_loss)
def mse_loss_grad() -> None:
    """Compute the gradient of `mse_loss` by `x`: one launch.

    Args:
        grad: Gradient of the result: a number, or an array of its shape.
        x: The predictions.
        target: The targets.
        reduction: See the loss.

    Returns:
        The gradient, with the shape of `x`.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `mse_loss`; or `grad` has another shape.
    """


@like(mse_loss, "v = abs(x - target)")
def l1_loss() -> None:
    """Compute sizes of differences, as `torch.nn.functional.l1_loss`: one launch.

    See `mse_loss` for arguments and errors.
    """


@slope_of(l1_loss)
def l1_loss_grad() -> None:
    """Compute the gradient of `l1_loss` by `x`: 0 without a difference. One launch.

    See `mse_loss_grad` for arguments and errors.
    """


@loss(
    "d = abs(x - target); v = where(d < beta, 0.5 * d * (d / beta), d - 0.5 * beta)",
    slopes={
        "x": "d = x - target; s = g * where(abs(d) < beta, d / beta, sign(d))",
        "target": "d = x - target; s = -g * where(abs(d) < beta, d / beta, sign(d))",
    },
)
async def smooth_l1_loss(
    x: Operand, target: Operand, *, reduction: LossReduction = "mean", beta: float = 1.0
) -> AccelRef:
    """Compute `l1_loss`, with a parabola below `beta`, as `torch.nn.functional.smooth_l1_loss`: one launch.

    That is ``0.5 * d**2 / beta`` of differences d below `beta`, and ``d - 0.5 * beta`` of others. See
    `mse_loss` for arguments and errors; `beta` is 0 at least.
    """
    ...


@slope_of(smooth_l1_loss)
def smooth_l1_loss_grad() -> None:
    """Compute the gradient of `smooth_l1_loss` by `x`: one launch.

    See `mse_loss_grad` for arguments and errors and `smooth_l1_loss`.
    """


@loss(
    "d = abs(x - target); v = where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta))",
    slopes={
        "x": "d = x - target; s = g * minimum(maximum(d, -delta), delta)",
        "target": "d = x - target; s = -g * minimum(maximum(d, -delta), delta)",
    },
)
async def huber_loss(
    x: Operand, target: Operand, *, reduction: LossReduction = "mean", delta: float = 1.0
) -> AccelRef:
    """Compute Huber's loss, as `torch.nn.functional.huber_loss`: one launch.

    That is ``0.5 * d**2`` of differences d up to `delta`, and ``delta * (d - 0.5 * delta)`` of others. See
    `mse_loss` for arguments and errors; `delta` is 0 at least.
    """
    ...


@slope_of(huber_loss)
def huber_loss_grad() -> None:
    """Compute the gradient of `huber_loss` by `x`: one launch.

    See `mse_loss_grad` for arguments and errors and `huber_loss`.
    """


# No exponent is positive, and nothing is subtracted. A term with a factor of 0 adds nothing, because its
# other factor may be infinite.
@loss(
    "a = log1p(exp(-abs(x))); c = weight * (1 - target); d = weight * pos_weight * target;"
    "v = where(c == 0, 0, c * (maximum(x, 0) + a)) + where(d == 0, 0, d * (maximum(-x, 0) + a))",
    slopes={
        "x": "e = exp(where(x >= 0, -x, x));"
        "s = g * (weight * ((1 - target) * (where(x >= 0, 1, e) / (1 + e))"
        " - pos_weight * target * (where(x >= 0, e, 1) / (1 + e))))",
        # Both parts differ by x, so only a factor other than 1 leaves a logarithm.
        "target": "f = where(pos_weight == 1, 0, (pos_weight - 1) * (maximum(x, 0) + log1p(exp(-abs(x)))));"
        "s = g * weight * (f - pos_weight * x)",
    },
)
async def binary_cross_entropy_with_logits(
    x: Operand,
    target: Operand,
    weight: ExpressionArgument = 1,
    *,
    reduction: LossReduction = "mean",
    pos_weight: ExpressionArgument = 1,
) -> AccelRef:
    """Compute the cross entropy of truth values, of logits: one launch.

    That is ``-weight * (pos_weight * target * log(sigmoid(x)) + (1 - target) * log(1 - sigmoid(x)))``, as
    `torch.nn.functional.binary_cross_entropy_with_logits`, but never the logarithm of 0.

    Args:
        x: Logits.
        target: Probabilities, from 0 to 1, of the same shape.
        weight: Factors of the elements: a number, or an array that broadcasts to `x`.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        pos_weight: Factors of the part with `target`, likewise.

    Returns:
        The loss, with shape (), or with the shape of `x` for ``"none"``.

    Raises:
        TypeError, NotSupportedError: As of `mse_loss`.
        ValueError: See `mse_loss`; or a factor that does not broadcast to `x`.
    """
    ...


@slope_of(binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits_grad() -> None:
    """Compute the gradient of `binary_cross_entropy_with_logits` by `x`: one launch.

    See the loss and `mse_loss_grad` for arguments and errors.
    """


@composed
async def kl_div(
    x: Operand,
    target: Operand,
    *,
    reduction: Literal["none", "mean", "sum", "batchmean"] = "mean",
    log_target: bool = False,
) -> AccelRef:
    """Compute the divergence of Kullback and Leibler, as `torch.nn.functional.kl_div`.

    That is ``target * (log(target) - x)`` of each element, and 0 where `target` is. It is one launch, and
    with ``"batchmean"`` two.

    Args:
        x: Logarithms of probabilities.
        target: Probabilities, of the same shape; or their logarithms.
        reduction: ``"none"``, ``"mean"``, ``"sum"``, or ``"batchmean"`` for the sum, divided by the length of
            the first axis: that is the divergence by its definition.
        log_target: Whether `target` holds logarithms.

    Returns:
        The loss, with shape (), or with the shape of `x` for ``"none"``.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `mse_loss`.
    """
    return await _divergence(x, reduction, log_target, target=target)


async def _divergence(x: Operand, reduction: str, log_target: bool, **arguments: Any) -> AccelRef:
    """Compute the divergence; or with `grad` its gradient."""
    divergence = _DIVERGENCES[bool(log_target)]
    name, run = (
        ("nn.kl_div_grad", divergence.derived) if "grad" in arguments else ("nn.kl_div", divergence.reduced)
    )
    check_choice(name, "reduction", reduction, (*_REDUCTIONS, "batchmean"))
    if reduction != "batchmean":
        return await run(x=x, reduction=reduction, **arguments)
    return await _scaled(await run(x=x, reduction="sum", **arguments), _batch(name, x))


@slope_of(kl_div, _divergence)
def kl_div_grad() -> None:
    """Compute the gradient of `kl_div` by `x`.

    See `kl_div` for arguments and errors and `mse_loss_grad`.
    """


def _divergence_of(log_target: bool, **_: object) -> Loss:
    return _DIVERGENCES[bool(log_target)]


LOSSES["nn.kl_div"] = _divergence_of


_scaled = Elementwise[AccelRef]("y = x / count", inputs=("x", "count"), operation="nn.kl_div")


def _batch(name: str, x: Operand) -> float:
    if not x.ndim or not x.shape[0]:
        raise ValueError(f"{name}: batchmean needs a first axis with elements, got x of shape {x.shape}")
    return float(x.shape[0])


def _check_pair(name: str, x: Operand, target: Operand, **options: ExpressionArgument) -> None:
    check_array(name, x=x, target=target)
    check_real(name, x=x, target=target, **options)
    promoted_dtype(name, {"x": DType.of(x.dtype), "target": DType.of(target.dtype)})
    if x.shape != target.shape:
        raise ValueError(
            f"{name}: x and target must have the same shape, got shapes {x.shape} and {target.shape}"
        )
    for argument, value in options.items():
        if not isinstance(value, (AccelRef, np.ndarray)):
            continue
        ends = zip(value.shape[::-1], x.shape[::-1], strict=False)
        if value.ndim > x.ndim or any(extent not in (1, x_extent) for extent, x_extent in ends):
            raise ValueError(
                f"{name}: {argument} of shape {value.shape} does not broadcast to {x.shape} of x"
            )


def _check_grad(name: str, grad: ExpressionArgument, shape: Ints) -> None:
    """Require a number, or an array with the shape of a result."""
    check_real(name, grad=grad)
    if isinstance(grad, (AccelRef, np.ndarray)) and grad.shape != shape:
        raise ValueError(f"{name}: grad must have the shape {shape} of the loss, got shape {grad.shape}")


# A label below 0 is moved down far enough that it cannot count from the end; `naming` restores it.
_LABEL_INDEX = "l = int64(labels); k = l == ignore_index; at = where(k, 0, where(l < 0, l - classes, l))"


@attrs.frozen
class _Case:
    """The computation of a cross entropy, apart from the elements.

    Attributes:
        name: Name of the operation.
        ndim: Axes of the logits.
        axis: The axis of the classes.
        dtype: Dtype of the result.
        has_weight: Whether classes have factors.
        is_smoothed: Whether labels are smoothed.
    """

    name: str
    ndim: int
    axis: int
    dtype: DType
    has_weight: bool
    is_smoothed: bool

    @property
    def logit(self) -> str:
        """The logit of a label."""
        axes = [axis for axis in range(self.ndim) if axis != self.axis]
        subscripts = {axis: f"i({number})" for number, axis in enumerate(axes)} | {self.axis: "at"}
        return f"float64(logits[{', '.join(subscripts[axis] for axis in range(self.ndim))}])"

    @property
    def weight(self) -> str:
        """The factor of a label's class."""
        return "float64(weight[at])" if self.has_weight else "1.0"


@functools.cache
def _terms(case: _Case, loss: str, is_smoothed: bool) -> Elementwise[Any]:
    """Make what a label has: of the logit ``t``, and the factor of its class; 0 where it is ignored."""
    smoothed = "(1 - label_smoothing) * loss + label_smoothing / classes * smooth" if is_smoothed else "loss"
    weights = ("weight",) if case.has_weight else ()
    return Elementwise(
        f"{_LABEL_INDEX}; w = {case.weight}; t = {case.logit}; loss = {loss};"
        f"first = where(k, 0.0, {smoothed}); factor = where(k, 0.0, w); counted = where(k, 0.0, 1.0)",
        inputs=(
            *("logits", "labels", "ignore_index", "classes", *weights),
            *(("lse",) if "lse" in loss else ()),
            *(("smooth", "label_smoothing") if is_smoothed else ()),
        ),
        outputs=("first", "factor", "counted"),
        operation=case.name,
        is_checked=True,
    )


@functools.cache
def _slopes(case: _Case) -> Elementwise[tuple[AccelRef]]:
    """Make the gradient of each logit. `rest` is the softmax less 1, for the class of the label."""
    wide = DType.float64 if case.dtype is DType.float64 else DType.float32
    slope = (
        f"p = exp({wide}(logits - lse)); scale = grad / total;"
        f"s = {wide}(scale * factor) * where(i({case.axis}) == int64(labels), {wide}(rest), p)"
    )
    smoothing_inputs: Strs = ()
    if case.is_smoothed:
        slope += (
            f"; s = {wide}(1 - label_smoothing) * s + {wide}(scale * counted * (label_smoothing / classes))"
            f" * (p * {wide}(total_weight) - {wide}(weight))"
        )
        smoothing_inputs = ("counted", "label_smoothing", "classes", "total_weight", "weight")
    return Elementwise(
        f"{slope}; y = +s",
        inputs=("grad", "logits", "lse", "labels", "rest", "factor", "total", *smoothing_inputs),
        outputs=("y",),
        dtypes=case.dtype,
        operation=case.name,
    )


# Exponentials have the digits of x. Their sum and its logarithm have more, so that a small loss has some.
_LSE = "m = max(x); s = log(sum(float64(exp(x - m)))) + float64(m)"
_ROWS = {
    "lse": (f"{_LSE}; y = +s", ("x",)),
    # The part that smoothing adds: the sum of losses over all classes.
    "smooth": (f"{_LSE}; y = sum(where(weight == 0, 0, weight * (s - x)))", ("x", "weight")),
    "sum": ("y = sum(x)", ("x",)),
    "mean": ("y = sum(x) / sum(factor)", ("x", "factor")),
}


@functools.cache
def _row(name: str, part: str, dtype: DType = DType.float64) -> Reduction:
    text, inputs = _ROWS[part]
    return Reduction(f"{text}; z = {dtype}(y)", inputs=inputs, precision="float32", operation=name)


async def _rowwise(
    row: Reduction, *operands: ExpressionArgument, axis: int | None = None, keepdims: bool = False
) -> AccelRef:
    return await row.ask(row.compute(*operands, axis=axis, keepdims=keepdims))


@composed
async def cross_entropy(
    logits: Operand,
    labels: Operand,
    weight: Operand | None = None,
    *,
    ignore_index: int = -100,
    reduction: LossReduction = "mean",
    label_smoothing: float = 0.0,
) -> AccelRef:
    """Compute the cross entropy of labels and the softmax of logits, as `torch.nn.functional.cross_entropy`.

    The logarithm of the softmax is not made: it is three launches, four with `label_smoothing`, and one less
    with ``"none"``. The device checks labels before it uses them.

    Args:
        logits: Array of shape (N, C, ...) with C classes; or (C,), for one label.
        labels: Integers from 0 to C - 1, of shape (N, ...); or ().
        weight: Factors of the classes, of shape (C,). The mean is divided by the sum of the labels' factors.
        ignore_index: Label with loss 0, which the mean does not count.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        label_smoothing: Share of each label that is distributed over all classes, from 0 to 1.

    Returns:
        The loss, with shape (), or with the shape of `labels` for ``"none"``. The mean is NaN if no label
        counts.

    Raises:
        TypeError: An argument is not an array, `labels` are not integers, or other arguments are complex.
        ValueError: The shapes do not fit, there are no classes, or `reduction` or `label_smoothing` is not
            valid.
        OutOfRangeError: A label is neither from 0 to C - 1 nor `ignore_index`. It is also an `IndexError`.
        NotSupportedError: float8.
    """
    case = _case("nn.cross_entropy", logits, labels, weight, reduction, ignore_index, label_smoothing)
    logits, labels, weight = await _placed(case.name, logits, labels, weight)
    lse = await _rowwise(_row(case.name, "lse"), logits, axis=case.axis)
    classes, operands = logits.shape[case.axis], list[ExpressionArgument]([] if weight is None else [weight])
    operands.append(lse)
    if case.is_smoothed:
        factors = 1.0 if weight is None else _along(weight, case)
        operands.append(await _rowwise(_row(case.name, "smooth"), logits, factors, axis=case.axis))
        operands.append(float(label_smoothing))
    with naming(case.name, "label", classes):
        loss, factor, _ = await _terms(case, "where(w == 0, 0.0, w * (lse - t))", case.is_smoothed)(
            logits, labels, int(ignore_index), classes, *operands
        )
    return await _finished(case, reduction, loss, factor)


@composed
async def nll_loss(
    log_probs: Operand,
    labels: Operand,
    weight: Operand | None = None,
    *,
    ignore_index: int = -100,
    reduction: LossReduction = "mean",
) -> AccelRef:
    """Take the negative logarithms of the labels' probabilities, as `torch.nn.functional.nll_loss`.

    It is two launches. `cross_entropy` computes it from logits, with fewer.

    Args:
        log_probs: Logarithms of probabilities, of shape (N, C, ...), or (C,).
        labels: See `cross_entropy`.
        weight: See `cross_entropy`.
        ignore_index: See `cross_entropy`.
        reduction: See `cross_entropy`.

    Returns:
        See `cross_entropy`.

    Raises:
        TypeError, ValueError, OutOfRangeError, NotSupportedError: As of `cross_entropy`.
    """
    case = _case("nn.nll_loss", log_probs, labels, weight, reduction, ignore_index, 0.0)
    log_probs, labels, weight = await _placed(case.name, log_probs, labels, weight)
    classes, operands = log_probs.shape[case.axis], [] if weight is None else [weight]
    with naming(case.name, "label", classes):
        loss, factor, _ = await _terms(case, "where(w == 0, 0.0, -(w * t))", False)(
            log_probs, labels, int(ignore_index), classes, *operands
        )
    return await _finished(case, reduction, loss, factor)


@composed
async def cross_entropy_grad(
    grad: ExpressionArgument,
    logits: Operand,
    labels: Operand,
    weight: Operand | None = None,
    *,
    ignore_index: int = -100,
    reduction: LossReduction = "mean",
    label_smoothing: float = 0.0,
) -> AccelRef:
    """Compute the gradient of `cross_entropy` by the logits: the softmax, less 1 for the class of each label.

    It is three launches, and with ``"mean"`` four.

    Args:
        grad: Gradient of the loss: a number, or an array of its shape.
        logits: The same as there, and so are the others.
        labels: The labels, which the device checks again.
        weight: Factors of the classes.
        ignore_index: Label whose gradient is 0.
        reduction: The same as there.
        label_smoothing: The same as there.

    Returns:
        The gradient, with the shape of `logits`.

    Raises:
        TypeError, OutOfRangeError, NotSupportedError: As of `cross_entropy`.
        ValueError: See `cross_entropy`; or `grad` has another shape.
    """
    name = "nn.cross_entropy_grad"
    case = _case(name, logits, labels, weight, reduction, ignore_index, label_smoothing)
    _check_grad(name, grad, labels.shape if reduction == "none" else ())
    logits, labels, weight = await _placed(name, logits, labels, weight)
    classes, weight_operands = logits.shape[case.axis], [] if weight is None else [weight]
    lse = await _rowwise(_row(name, "lse"), logits, axis=case.axis)
    with naming(name, "label", classes):
        rest, factor, counted = await _terms(case, "expm1(t - lse)", False)(
            logits, labels, int(ignore_index), classes, *weight_operands, lse
        )
    total = await _rowwise(_row(name, "sum"), factor) if reduction == "mean" else 1.0
    expanding_index = (*(slice(None),) * case.axis, None)
    smoothing_operands: list[ExpressionArgument] = []
    if case.is_smoothed:
        total_weight = classes if weight is None else await _rowwise(_row(name, "sum"), weight)
        smoothing_operands += [counted[expanding_index], float(label_smoothing), classes, total_weight]
        smoothing_operands.append(1.0 if weight is None else _along(weight, case))
    if isinstance(grad, (AccelRef, np.ndarray)) and reduction == "none":
        grad = grad[expanding_index]
    apart = [array[expanding_index] for array in (lse, labels, rest, factor)]
    (slope,) = await _slopes(case)(grad, logits, *apart, total, *smoothing_operands)
    return slope


async def _finished(case: _Case, reduction: str, loss: AccelRef, factor: AccelRef) -> AccelRef:
    if reduction == "none":
        return loss if loss.dtype is case.dtype else await loss.cast(case.dtype)
    operands = (loss, factor) if reduction == "mean" else (loss,)
    return await _rowwise(_row(case.name, reduction, case.dtype), *operands)


def _case(
    name: str,
    logits: Operand,
    labels: Operand,
    weight: Operand | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> _Case:
    """Check the arguments of a cross entropy."""
    logits_name = "log_probs" if name == "nn.nll_loss" else "logits"
    check_array(
        name, **{logits_name: logits}, labels=labels, **({} if weight is None else {"weight": weight})
    )
    check_real(name, **{logits_name: logits}, **({} if weight is None else {"weight": weight}))
    check_choice(name, "reduction", reduction, _REDUCTIONS)
    check_range(name, 0, 1, is_closed=True, label_smoothing=label_smoothing)
    index: object = ignore_index
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
        raise TypeError(f"{name}: ignore_index must be an integer, got {ignore_index!r}")
    if DType.of(labels.dtype).kind not in ("int", "uint"):
        raise TypeError(f"{name}: labels must be integers, got {labels.dtype}")
    if not logits.ndim:
        raise ValueError(f"{name}: {logits_name} must have shape (N, C, ...) or (C,), got shape ()")
    axis = min(1, logits.ndim - 1)
    classes, rest = logits.shape[axis], (*logits.shape[:axis], *logits.shape[axis + 1 :])
    if labels.shape != rest:
        raise ValueError(
            f"{name}: labels must have shape {rest}, one for each place of {logits_name} of shape "
            f"{logits.shape}, got shape {labels.shape}"
        )
    if not classes:
        raise ValueError(
            f"{name}: {logits_name} of shape {logits.shape} needs an axis of classes that is not empty"
        )
    if weight is not None and weight.shape != (classes,):
        raise ValueError(f"{name}: weight must have shape {(classes,)}, got shape {weight.shape}")
    dtype = DType.of(logits.dtype)
    result_dtype = dtype if dtype.is_inexact else DType.float64
    return _Case(name, logits.ndim, axis, result_dtype, weight is not None, label_smoothing > 0)


async def _placed(
    name: str, logits: Operand, labels: Operand, weight: Operand | None
) -> tuple[AccelRef, AccelRef, AccelRef | None]:
    """Bring arrays of NumPy to the device, as several operations read them."""
    device = device_of(name, logits, labels, weight)
    placed: list[Any] = [
        await device.put(operand) if isinstance(operand, np.ndarray) else operand
        for operand in (logits, labels, weight)
    ]
    x, y, z = placed
    return x, y, z


def _along(weight: Operand, case: _Case) -> Operand:
    """Spread factors of classes over the axes after these."""
    return weight.reshape((weight.shape[0], *(1,) * (case.ndim - case.axis - 1)))
