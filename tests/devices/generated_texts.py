"""Text that the package generates: plans, functions, specifications of operations; kernels of expressions.

As a program it prints them; ``python tests/devices/generated_texts.py --renew`` writes the golden files
again.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import ArraySpec, ExpressionSpec
from trio_accel.backends.base.expressions import (
    Argument,
    ParsedExpression,
    Weak,
    encode_program,
    parse,
    parse_reduction,
    typed,
)
from trio_accel.backends.base.expressions._source import prelude
from trio_accel.backends.base.expressions.compiled import make_kernel
from trio_accel.devices.operations import _declared

GOLDEN = Path(__file__).parent / "golden"
OPERATIONS = ("linalg.cholesky", "linalg.gemm", "linalg.qr", "sparse.spmm")


def of_operations() -> dict[str, str]:
    """By file, the source executed for an operation; the capabilities must not be imported yet."""
    found: dict[str, list[str]] = {name: [] for name in OPERATIONS}
    plans: dict[str, list[str]] = {name: [] for name in OPERATIONS}
    compiled = _declared._Maker._compiled

    def note(maker: Any, text: str, name: str, names: Mapping[str, Any]) -> Any:
        parts = (plans if name == "plan" else found).get(maker._declaration.name)
        if parts is not None:
            parts.append(text.rstrip() + "\n")
        return compiled(maker, text, name, names)

    _declared._Maker._compiled = note  # type: ignore[method-assign]
    try:
        from trio_accel import linalg, sparse

        # A plan is compiled at its first use.
        for name in OPERATIONS:
            library, function = name.split(".")
            assert callable(getattr({"linalg": linalg, "sparse": sparse}[library], function).message.plan)
    finally:
        _declared._Maker._compiled = compiled  # type: ignore[method-assign]
    for name, of_function in found.items():
        parts = [*plans[name], *of_function]
        found[name] = parts
        library, function = name.split(".")
        spec = getattr({"linalg": linalg, "sparse": sparse}[library], function).spec
        fields = [(field.name, field.role) for field in spec.descriptor().fields]
        roles = [
            f"#     {name}: {role.kind} {role.access or ''} {role.count}".rstrip() for name, role in fields
        ]
        parts.append("\n".join([f"# {spec.__qualname__}{inspect.signature(spec)}", *roles]) + "\n")
    return {f"{name.partition('.')[2]}.txt": "\n\n".join(parts) for name, parts in found.items()}


def _array(block: int, dtype: str, *shape: int) -> ArraySpec:
    strides = np.empty(shape, DType(dtype).dtype).strides
    return ArraySpec(block, 0, DType(dtype), shape, strides)


def of_kernels() -> dict[str, str]:
    """By file, the source of a kernel, without the lines before each."""
    real, half = Argument(DType.float32, True), Argument(DType.float16, True)
    a, b, c = _array(0, "float32", 8, 6), _array(1, "float16", 8, 6), _array(2, "float32", 8, 6)
    text = "y = where(x > 0, x * a, exp(x) - 1); z = y // h"
    number = Argument(Weak.float, False)
    softmax = parse("e = exp(x - max(x)); y = e / sum(e)", ("x",), is_along=True)

    def encoded(expression: ParsedExpression, *arguments: Argument) -> str:
        return encode_program(typed(expression, tuple([each.kind for each in arguments])), arguments)

    specs = {
        "elementwise.cu": ExpressionSpec(
            encoded(parse(text, ("x", "a", "h"), ("y", "z")), real, number, half),
            (),
            (a, b),
            (),
            (c, c),
            (),
            bytes(16),
        ),
        "reduction.cu": ExpressionSpec(
            encoded(parse_reduction("x * h", "sum", inputs=("x", "h")), real, half),
            (1,),
            (a, b),
            (),
            (_array(3, "float32", 8),),
            (),
            b"",
        ),
        "rows.cu": ExpressionSpec(encoded(softmax, real), (1,), (a,), (), (c,), (), b""),
    }
    texts = {name: make_kernel(spec, "cuda").text for name, spec in specs.items()}
    assert all(text.startswith(prelude()) for text in texts.values())
    return {name: text.removeprefix(prelude()).strip() + "\n" for name, text in texts.items()}


def main() -> None:
    texts = {**of_operations(), **of_kernels()}
    if "--renew" not in sys.argv:
        print(json.dumps(texts))
        return
    for name, text in texts.items():
        (GOLDEN / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
