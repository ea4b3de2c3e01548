"""Expressions that every backend computes: parsed, typed by NumPy's rules, evaluated by NumPy."""

from ._evaluate import evaluate
from ._expression import Expression, parse
from ._functions import FUNCTIONS, Function
from ._recipes import (
    SCALAR_BYTES,
    Argument,
    ElementwiseRecipe,
    ReductionRecipe,
    pack_scalars,
    unpack_scalars,
)
from ._reduction import REDUCTIONS, Reduction, TypedReduction, evaluate_reduction, typed_reduction
from ._typing import ArgumentType, Step, TypedExpression, Weak, typed

__all__ = [
    "FUNCTIONS",
    "REDUCTIONS",
    "SCALAR_BYTES",
    "Argument",
    "ArgumentType",
    "ElementwiseRecipe",
    "Expression",
    "Function",
    "Reduction",
    "ReductionRecipe",
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
