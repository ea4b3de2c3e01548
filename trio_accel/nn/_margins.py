"""Losses of margins and likelihoods, and their gradients; and distances of vectors.

See `mse_loss` for the common rules of all losses: dtypes, `reduction`, shapes, errors.
"""

from __future__ import annotations

from typing import Any

from ..devices import AccelRef, Operand, composed
from ..expressions import (
    Axis,
    ExpressionArgument,
    Out,
    Reduction,
    check_array,
    expression,
    like,
    scaled,
    squares,
)
from ._library import check_choice
from ._losses import LOSSES, Loss, LossReduction, loss, mse_loss
from ._slopes import slope_of

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_grad",
    "cosine_embedding_loss",
    "gaussian_nll_loss",
    "gaussian_nll_loss_grad",
    "hinge_embedding_loss",
    "hinge_embedding_loss_grad",
    "margin_ranking_loss",
    "margin_ranking_loss_grad",
    "normalize",
    "pairwise_distance",
    "poisson_nll_loss",
    "poisson_nll_loss_grad",
    "soft_margin_loss",
    "soft_margin_loss_grad",
    "triplet_margin_loss",
]


# A count of 0 may be multiplied by something infinite. An infinite count outweighs its logarithm.
_STIRLING = (
    "s = where((full == 1) and (target > 1), target * log(target) - target + 0.5 * log(2 * pi * target), 0)"
)
_POISSON_VALUE = "v = where(x == inf, x, {} - where(target == 0, 0, target * {}) + s"
_OF_POISSON = ("x", "target", "full", "eps")
_POISSON = {
    True: Loss(
        "nn.poisson_nll_loss",
        _OF_POISSON,
        f"{_STIRLING}; {_POISSON_VALUE.format('exp(x)', 'x')} + 0 * eps)",
        {"x": "s = g * (exp(x) - target)"},
    ),
    False: Loss(
        "nn.poisson_nll_loss",
        _OF_POISSON,
        f"{_STIRLING}; {_POISSON_VALUE.format('x', 'log(x + eps)')})",
        {"x": "s = g * (1 - where((target == 0) and (x == x), 0, target / (x + eps)))"},
    ),
}
_COSINE = Loss(
    "nn.cosine_embedding_loss",
    ("x", "target", "margin"),
    "v = where(target > 0, 1 - x, maximum(x - margin, 0))",
)
_MEANT = Loss("nn.triplet_margin_loss", ("x", "target", "margin"), "v = maximum(x - target + margin, 0)")
_COSINES = Reduction(
    "y = sum(x1 * x2) / sqrt((sum(x1 * x1) + 1e-12) * (sum(x2 * x2) + 1e-12))",
    inputs=("x1", "x2"),
    wide=scaled("x1", "u", "k", raises=False)
    + scaled("x2", "v", "m", raises=False)
    + "y = sum(u * v) / sqrt(sum(u * u) + 1e-12 * k * k) / sqrt(sum(v * v) + 1e-12 * m * m)",
    precision="float64",
    operation="nn.cosine_embedding_loss",
)


# Logarithms are at least -100, and products at least 1e-12, as in PyTorch, so all results are finite.
@loss(
    "v = -weight * (target * maximum(log(x), -100) + (1 - target) * maximum(log1p(-x), -100))",
    slopes={"x": "s = g * (weight * (x - target) / maximum(x * (1 - x), 1e-12))"},
)
async def binary_cross_entropy(
    x: Operand, target: Operand, weight: ExpressionArgument = 1, *, reduction: LossReduction = "mean"
) -> AccelRef:
    """Compute the cross entropy of truth values, of probabilities: one launch.

    `binary_cross_entropy_with_logits` is more exact, and takes logits. `weight` are factors of the elements.
    See that function for arguments and errors.
    """
    ...


@slope_of(binary_cross_entropy)
def binary_cross_entropy_grad() -> None:
    """Compute the gradient of `binary_cross_entropy` by `x`: one launch.

    See the loss and `mse_loss_grad` for arguments and errors.
    """


@like(
    mse_loss,
    "m = -target * x; v = maximum(m, 0) + log1p(exp(-abs(m)))",
    slopes={
        "x": "m = -target * x; e = exp(where(m >= 0, -m, m));"
        "s = g * (-target * (where(m >= 0, 1, e) / (1 + e)))"
    },
)
def soft_margin_loss() -> None:
    """Compute ``log(1 + exp(-target * x))`` for targets of 1 or -1: one launch.

    See `mse_loss` for arguments and errors.
    """


@slope_of(soft_margin_loss)
def soft_margin_loss_grad() -> None:
    """Compute the gradient of `soft_margin_loss` by `x`: one launch.

    See `mse_loss_grad` for arguments and errors.
    """


@loss(
    "v = where(target > 0, x, maximum(margin - x, 0))",
    slopes={"x": "s = g * where(target > 0, 1, where(x < margin, -1, where(x == x, 0, x)))"},
)
async def hinge_embedding_loss(
    x: Operand, target: Operand, *, reduction: LossReduction = "mean", margin: float = 1.0
) -> AccelRef:
    """Take distances where the target is 1, and ``max(0, margin - x)`` where it is -1: one launch.

    See `mse_loss` for arguments and errors.
    """
    ...


@slope_of(hinge_embedding_loss)
def hinge_embedding_loss_grad() -> None:
    """Compute the gradient of `hinge_embedding_loss` by `x`: one launch.

    See `mse_loss_grad` for arguments and errors.
    """


@loss(
    "v = maximum(margin - target * (x1 - x2), 0)",
    slopes={"x1": "s = g * where(margin - target * (x1 - x2) > 0, -target, 0)"},
)
async def margin_ranking_loss(
    x1: Operand, x2: Operand, target: Operand, *, reduction: LossReduction = "mean", margin: float = 0.0
) -> AccelRef:
    """Compute ``max(0, margin - target * (x1 - x2))`` for targets of 1 or -1: one launch.

    Args:
        x1: Scores that shall be larger where the target is 1.
        x2: Scores that shall be larger where it is -1; of the same shape, as is `target`.
        target: The targets.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        margin: How much larger.

    Returns:
        The loss, with shape (), or with the shape of `x1` for ``"none"``.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `mse_loss`.
    """
    ...


@slope_of(margin_ranking_loss)
def margin_ranking_loss_grad() -> None:
    """Compute the gradient of `margin_ranking_loss` by `x1`: one launch. That by `x2` has the other sign.

    See the loss and `mse_loss_grad` for arguments and errors.
    """


@composed
async def poisson_nll_loss(
    x: Operand,
    target: Operand,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: LossReduction = "mean",
) -> AccelRef:
    """Compute the negative logarithm of Poisson's likelihood, as `torch.nn.functional.poisson_nll_loss`.

    Args:
        x: Logarithms of the expected counts; with ``log_input=False`` the counts themselves.
        target: The counts, of the same shape.
        log_input: Whether `x` are logarithms.
        full: Whether to add the logarithm of the counts' factorial, by Stirling's approximation.
        eps: Added to counts before their logarithm is taken.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss, with shape (), or with the shape of `x` for ``"none"``. It is one launch.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `mse_loss`.
    """
    return await _POISSON[bool(log_input)].reduced(
        x=x, target=target, full=full, eps=eps, reduction=reduction
    )


async def _poisson_grad(log_input: bool, **arguments: Any) -> AccelRef:
    return await _POISSON[bool(log_input)].derived(**arguments)


def _poisson_of(log_input: bool, **_: object) -> Loss:
    return _POISSON[bool(log_input)]


LOSSES["nn.poisson_nll_loss"] = _poisson_of


@slope_of(poisson_nll_loss, _poisson_grad)
def poisson_nll_loss_grad() -> None:
    """Compute the gradient of `poisson_nll_loss` by `x`: one launch.

    See the loss and `mse_loss_grad` for arguments and errors.
    """


@loss(
    "u = maximum(var, eps); t = (x - target) / sqrt(u);"
    "v = 0.5 * (log(u) + t * t) + full * 0.9189385332046727",
    slopes={"x": "s = g * ((x - target) / maximum(var, eps) + 0 * full)"},
)
async def gaussian_nll_loss(
    x: Operand,
    target: Operand,
    var: ExpressionArgument,
    *,
    full: bool = False,
    eps: float = 1e-6,
    reduction: LossReduction = "mean",
) -> AccelRef:
    """Compute the negative logarithm of a normal likelihood, as `torch.nn.functional.gaussian_nll_loss`.

    Args:
        x: Expected values.
        target: Samples, of the same shape.
        var: Variances, which broadcast to `x`; not checked to be positive.
        full: Whether to add ``0.5 * log(2 * pi)``.
        eps: The least that a variance counts as.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss, with shape (), or with the shape of `x` for ``"none"``. It is one launch.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `mse_loss`.
    """
    ...


@slope_of(gaussian_nll_loss)
def gaussian_nll_loss_grad() -> None:
    """Compute the gradient of `gaussian_nll_loss` by `x`: one launch.

    See the loss and `mse_loss_grad` for arguments and errors.
    """


@composed
async def cosine_embedding_loss(
    x1: Operand, x2: Operand, target: Operand, *, margin: float = 0.0, reduction: LossReduction = "mean"
) -> AccelRef:
    """Compute ``1 - cos(x1, x2)`` where the target is 1, and ``max(0, cos - margin)`` where it is -1.

    It is two launches: the cosines, and the loss.

    Args:
        x1: Vectors, along the last axis.
        x2: Vectors, of the same shape.
        target: The targets, of the shape without the last axis.
        margin: Up to which cosine a pair counts as apart.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss, with shape (), or with the shape of `target` for ``"none"``.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `mse_loss`.
    """
    check_array("nn.cosine_embedding_loss", x1=x1, x2=x2)
    cosines = await _COSINES.ask(_COSINES.compute(x1, x2, axis=-1))
    return await _COSINE.reduced(x=cosines, target=target, margin=margin, reduction=reduction)


@composed
async def triplet_margin_loss(
    anchor: Operand,
    positive: Operand,
    negative: Operand,
    *,
    margin: float = 1.0,
    eps: float = 1e-6,
    reduction: LossReduction = "mean",
) -> AccelRef:
    """Compute ``max(0, margin + |anchor - positive| - |anchor - negative|)`` of Euclidean distances.

    It is three launches: two distances, and the loss.

    Args:
        anchor: Vectors, along the last axis.
        positive: Vectors that shall be near to it.
        negative: Vectors that shall be apart from it.
        margin: How much nearer.
        eps: Added to each difference, as in `pairwise_distance`.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        The loss, with shape (), or with the shape of `anchor` without the last axis for ``"none"``.

    Raises:
        TypeError, ValueError, NotSupportedError: As of `mse_loss`.
    """
    check_array("nn.triplet_margin_loss", anchor=anchor, positive=positive, negative=negative)
    check_choice("nn.triplet_margin_loss", "reduction", reduction, ("none", "mean", "sum"))
    positive_distance, negative_distance = [
        await pairwise_distance(anchor, sample, eps=eps) for sample in (positive, negative)
    ]
    return await _MEANT.reduced(
        x=positive_distance, target=negative_distance, margin=margin, reduction=reduction
    )


@expression(
    f"d = x1 - x2 + eps; y = sqrt(sum({squares('d')}))",
    axes=True,
    wide=f"d = x1 - x2 + eps; {scaled('d', 'u', 'k')} y = sqrt(sum({squares('u')})) / k",
    precision="float64",
)
async def pairwise_distance(
    x1: Operand, x2: Operand, axis: Axis = -1, *, eps: float = 1e-6, keepdims: bool = False, out: Out = None
) -> AccelRef:
    """Compute Euclidean distances of vectors, as `torch.nn.functional.pairwise_distance`: one launch.

    Args:
        x1: Vectors.
        x2: Vectors; both broadcast.
        axis: Axis or axes that make a vector; None for all.
        eps: Added to each difference.
        keepdims: Whether those axes stay, with one element.
        out: Array to write to.

    Returns:
        The distances, computed in float64 and rounded once. Those of complex vectors are real.

    Raises:
        TypeError: An argument is not an array, or the result does not convert to the dtype of `out`.
        ValueError: Shapes that do not broadcast, an axis out of range, or `out` has another shape or shares
            memory with an argument.
        NotSupportedError: float8.
    """
    ...


@expression(
    f"y = x / maximum(sqrt(sum({squares('x')})), eps)",
    axes=True,
    wide=scaled("x", "u", "k") + f"y = u / maximum(sqrt(sum({squares('u')})), eps * k)",
    precision="float64",
)
async def normalize(x: Operand, axis: Axis = 1, *, eps: float = 1e-12, out: Out = None) -> AccelRef:
    """Divide vectors by their Euclidean norms, as `torch.nn.functional.normalize` does: one launch.

    `eps` is the least that a norm counts as. See `pairwise_distance` for other arguments and errors; the
    shape stays, and `out` may be `x`.
    """
    ...
