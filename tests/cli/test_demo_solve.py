from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import trio_accel as ta

if TYPE_CHECKING:
    from command import Cli


def solve(cli: Cli, *arguments: object, code: int = 0) -> dict[str, Any]:
    done = cli("demo", "solve", "--json", *arguments)
    assert (done.code, done.err) == (code, "")
    document = json.loads(done.out)
    assert (document["ok"], document["exit_code"]) == (code == 0, code)
    assert [step["name"] for step in document["steps"]] == ["solve"]
    step: dict[str, Any] = document["steps"][0]
    return step


def test_the_carried_matrix(cli: Cli) -> None:
    step = solve(cli)
    data = step["data"]
    assert (data["matrix"], data["rows"], data["nonzeros"]) == ("bcsstk16.mtx.gz", 4884, 290378)
    assert data["converged"] is True
    assert data["residual"] <= 1.1e-10
    # The condition number that the SuiteSparse collection lists for HB/bcsstk16 is 4.9e+09.
    assert data["condition"] == pytest.approx(4.9e9, rel=0.05)
    assert len(data["history"]) == data["iterations"] + 1
    assert data["history"][0] == 1.0
    assert data["history"][-1] <= 1e-10 < data["history"][-2]
    assert [check["ok"] for check in step["checks"]] == [True, True]
    assert step["checks"][1]["name"] == "difference to SciPy's splu, energy norm"


@pytest.mark.parametrize("iterations", [1, 10])
def test_too_few_iterations_are_a_failed_check(cli: Cli, iterations: int) -> None:
    step = solve(cli, "--max-iterations", iterations, code=1)
    assert (step["data"]["converged"], step["data"]["iterations"]) == (False, iterations)
    assert step["notes"][0].startswith("not converged: relative residual ")
    assert [check["ok"] for check in step["checks"]] == [False]
    done = cli("demo", "solve", "--max-iterations", iterations)
    assert done.code == 1
    assert step["notes"][0] in done.out
    assert f"of at most {iterations}, without reaching 1e-10" in " ".join(done.out.split())


def test_a_tolerance_that_float64_cannot_reach_is_a_failed_check(cli: Cli) -> None:
    # The recursion goes on, but the true residual stays where rounding leaves it.
    step = solve(cli, "--rtol", 1e-20, code=1)
    assert step["data"]["converged"] is True
    assert step["data"]["residual"] > 1e-19
    assert step["checks"][0]["ok"] is False
    assert step["notes"][0].startswith("the recursion came below 1e-20, the residual itself did not")


def test_a_larger_tolerance_takes_fewer_iterations(cli: Cli) -> None:
    counts = [solve(cli, "--rtol", rtol)["data"]["iterations"] for rtol in (1e-2, 1e-6)]
    assert 0 < counts[0] < counts[1]


def test_a_wrong_solution_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        host = await to_host(self, out=out)
        if host.ndim:
            host *= 1.001
        return host

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)
    step = solve(cli, code=1)
    assert [check["ok"] for check in step["checks"]] == [False, False]


def test_the_text_for_a_person(cli: Cli) -> None:
    done = cli("demo", "solve")
    assert (done.code, done.err) == (0, "")
    for words in (
        "✓ solve  4884 × 4884, ",
        "the stiffness matrix of a dam",
        "conjugate gradients, no preconditioner, ",
        "iteration",
        "✓ residual b - A x, recomputed with SciPy ",
        "all 2 checks hold\n",
    ):
        assert words in done.out
    assert "\x1b" not in done.out
    # The first line names the processor.
    assert max(map(len, done.out.splitlines()[1:])) <= 80
