from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.devices import OpenDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from command import Cli


def step_of(done: Any) -> dict[str, Any]:
    document = json.loads(done.out)
    assert [step["name"] for step in document["steps"]] == ["matmul"]
    step: dict[str, Any] = document["steps"][0]
    return step


@pytest.mark.parametrize(("dtype", "eps"), [("float32", 1e-5), ("float64", 1e-12)])
def test_every_size_is_measured_and_checked(cli: Cli, dtype: str, eps: float) -> None:
    done = cli("demo", "matmul", "--sizes", "1,33,64", "--clients", 3, "--dtype", dtype, "--json")
    assert (done.code, done.err) == (0, "")
    step = step_of(done)
    assert (step["ok"], step["notes"]) == (True, [])
    assert (step["data"]["dtype"], step["data"]["clients"]) == (dtype, 3)
    rows = step["data"]["rows"]
    assert [row["size"] for row in rows] == [1, 33, 64]
    for row, check in zip(rows, step["checks"], strict=True):
        assert row["gflops"] > 0
        assert row["numpy_gflops"] > 0
        assert row["calls"] >= 1
        assert row["rows_checked"] == row["size"]
        assert check["value"] == row["error"] <= check["limit"]
        assert check["limit"] == pytest.approx(eps * row["size"] ** 0.5)
    assert rows[2]["error"] < eps


def test_a_wrong_product_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_products(monkeypatch, lambda product: product.flat.__setitem__(7, product.flat[7] + 1.0))
    done = cli("demo", "matmul", "--sizes", "16", "--json")
    step = step_of(done)
    assert done.code == 1
    assert (json.loads(done.out)["ok"], step["ok"], step["checks"][0]["ok"]) == (False, False, False)


def test_a_product_that_is_not_a_number_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_products(monkeypatch, lambda product: product.flat.__setitem__(0, np.nan))
    done = cli("demo", "matmul", "--sizes", "16", "--json")
    assert done.code == 1
    assert step_of(done)["checks"][0]["value"] is None
    text = cli("demo", "matmul", "--sizes", "16")
    assert text.code == 1
    assert "✗ relative error, 16 × 16   nan, allowed 4.0e-05" in text.out
    assert text.out.endswith("the check failed\n")


def spoil_products(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None]) -> None:
    to_host = ta.AccelRef.to_host

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        host = await to_host(self, out=out)
        spoil(host)
        return host

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)


def test_the_table_for_a_person(cli: Cli) -> None:
    done = cli("demo", "matmul", "--sizes", "16,32")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"trio-accel {ta.__version__} on ")
    assert "✓ matmul  4 clients, " in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert ["float32", "products", "GFLOP/s", "bare", "NumPy", "ratio", "error"] in lines
    assert [line[:3] for line in lines if line[1:2] == ["×"]] == [["16", "×", "16"], ["32", "×", "32"]]
    assert done.out.endswith("all 2 checks hold\n")
    assert "\x1b" not in done.out


def test_memory_that_is_not_there(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(self: ta.Device, host: object) -> ta.AccelRef:
        raise ta.OutOfMemoryError("no", requested=1, free=0, total=0)

    monkeypatch.setattr(OpenDevice, "put", full)
    done = cli("demo", "matmul", "--sizes", "16")
    assert done.code == 2
    assert done.err == "trio-accel: --sizes 16: not enough memory for 4 products of this size\n"
