"""Expressions that every backend computes: parsed, typed by NumPy's rules, evaluated by NumPy."""

from ._evaluate import evaluate
from ._expression import Expression, parse
from ._functions import FUNCTIONS, Function
from ._reduction import REDUCTIONS, Reduction, TypedReduction, evaluate_reduction, typed_reduction
from ._specialized import (
    SCALAR_BYTES,
    Argument,
    SpecializedExpression,
    SpecializedReduction,
    pack_scalars,
    unpack_scalars,
)
from ._typing import ArgumentType, Step, TypedExpression, Weak, typed

__all__ = [
    "FUNCTIONS",
    "REDUCTIONS",
    "SCALAR_BYTES",
    "Argument",
    "ArgumentType",
    "Expression",
    "Function",
    "Reduction",
    "SpecializedExpression",
    "SpecializedReduction",
    "Step",
    "TypedExpression",
    "TypedReduction",
    "Weak",
    "evaluate",
    "evaluate_reduction",
    "pack_scalars",
    "parse",
    "typed",
    "typed_reduction",
    "unpack_scalars",
]
