"""The machine code of compiled expressions: the vector loops, and the rounding."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
from both_executors import Executors

import trio_accel as ta
from trio_accel import arrays, jit
from trio_accel.backends.cpu.compiled import _compiler, _plans, _text

pytestmark = [pytest.mark.no_device, pytest.mark.one_backend]


def compiled(text: str, folder: Path, *options: str) -> tuple[str, str]:
    """Return the assembler of a source, and g++'s report of its optimizations."""
    found = _compiler.compiler()
    if found is None or "-fno-tree-sink" not in found.options:
        pytest.skip("the compiler is not g++")
    if _compiler.platform.machine() != "x86_64":
        pytest.skip("the processor is another one")
    (folder / "made.cpp").write_text(text, encoding="utf-8")
    command = (*found.command, *found.options_of(text), *options, "-S", "made.cpp", "-o", "made.s")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "bad value" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("the compiler is older than the processor")
    assert done.returncode == 0, done.stderr
    return (folder / "made.s").read_text(encoding="utf-8"), done.stderr


CHOICES = {
    "a choice": "where(x > s, y, s)",
    "a choice of a choice": "where(x > s, 1, where(x < -s, -1, y))",
    "both bounds": "minimum(maximum(x - y, -s), s)",
    "both bounds, of numbers": "fmin(fmax(x - y, -s), s)",
    "a clip": "clip(x - y, -s, s)",
    "a choice of two conditions": "where((x > s) and (y < s), x, y)",
    "the derived slope of leaky_relu": "where(x >= 0, y, 0) + s * where(x >= 0, 0, y)",
    "the derived slope of hardswish": "where(maximum(x + 3, 0) < 6, y * x, 0) + where(x + 3 > 0, s, 0)",
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in CHOICES), ("both bounds", "float64")]
)
async def test_a_choice_leaves_a_loop_of_vectors(
    executors: Executors, tmp_path: Path, name: str, dtype: str
) -> None:
    kept: list[_plans.LoopPlan] = []
    run = _plans.LoopPlan.run

    def noted(plan: _plans.LoopPlan, entry: Any, data: bytes, **named: Any) -> bool:
        kept.append(plan)
        return run(plan, entry, data, **named)

    executors.monkeypatch.setattr(_plans.LoopPlan, "run", noted)
    special = np.array([0.0, -0.0, 1, -1, 3, -3, 0.7, -0.7, np.inf, -np.inf, np.nan, 1e-30])
    x, y = (each.reshape(-1).astype(dtype) for each in np.meshgrid(special, special))
    ask = jit.elementwise(CHOICES[name], inputs=("x", "y", "s"))

    async def asked(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
        return await ask(x, y, 0.7)

    await executors.compare(asked, x, y)
    assert kept[-1].text is not None
    text = kept[-1].text()
    _, told = compiled(text, tmp_path, "-fopt-info-vec-optimized")
    loop = "for (i64 k = first; k < end; k++)"
    line = next(n for n, each in enumerate(text.splitlines(), 1) if loop in each)
    assert re.search(rf"made\.cpp:{line}:\d+: optimized: loop vectorized", told), told[-2000:]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_rows_compute_an_exponential_once_for_their_sum_and_their_result(
    executors: Executors, dtype: str
) -> None:
    kept: list[_plans.LoopPlan] = []
    run = _plans.LoopPlan.run

    def noted(plan: _plans.LoopPlan, entry: Any, data: bytes, **named: Any) -> bool:
        kept.append(plan)
        return run(plan, entry, data, **named)

    executors.monkeypatch.setattr(_plans.LoopPlan, "run", noted)
    x = np.random.default_rng(1).normal(size=(5, 40)).astype(dtype)
    (made,) = await executors.run("always", partial(arrays.softmax, axis=1), x)
    np.testing.assert_allclose(made, scipy.special.softmax(x.astype(float), axis=1), rtol=1e-5)
    assert kept[-1].text is not None
    _, start, row = kept[-1].text().partition("i64 row(")
    assert start
    assert row.count("f_exp(") == 1


# g++ 12 drops the conversions of neighbours to float16 and back, if the processor computes in float16.
_NEIGHBOURS = """
extern "C" void neighbours(float *__restrict out, const float *__restrict x)
{
    float made[8];
    for (int k = 0; k < 8; k++)
        made[k] = to_f16(x[k] + 0.1f);
    for (int k = 0; k < 8; k++)
        out[k] = made[k] * made[k];
}
"""


@pytest.mark.parametrize("machine", ["haswell", "skylake-avx512", "sapphirerapids"])
def test_a_float16_is_rounded_on_every_processor(tmp_path: Path, machine: str) -> None:
    assembler, _ = compiled(_text.head() + _NEIGHBOURS, tmp_path, f"-march={machine}")
    body = assembler.partition("neighbours:")[2].partition("ret")[0]
    rounded, widened = (len(re.findall(name, body)) for name in ("vcvt[ps]s2[ps]h", "vcvt[ps]h2[ps]s"))
    # Either all neighbours at once, or each of them.
    assert rounded in (1, 2, 8), body
    assert widened == rounded, body
    # Arithmetic of float16 also rounds each step once, but NumPy computes in float32.
    assert not re.search(r"\bv(add|sub|mul|div|fmadd\w*)[ps]h\b", assembler)
