from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import sparse
from scipy.io import mmread, mmwrite

import trio_accel as ta

if TYPE_CHECKING:
    from command import Cli

Refused = Callable[..., str]


def solve(cli: Cli, *arguments: object, code: int = 0) -> dict[str, Any]:
    done = cli("demo", "solve", "--json", *arguments)
    assert (done.code, done.err) == (code, "")
    document = json.loads(done.out)
    assert (document["ok"], document["exit_code"]) == (code == 0, code)
    assert [step["name"] for step in document["steps"]] == ["solve"]
    step: dict[str, Any] = document["steps"][0]
    return step


def write(path: Path, rows: object) -> Path:
    mmwrite(path, sparse.coo_array(np.asarray(rows, float)), symmetry="general")
    return path


def plain_conjugate_gradients(a: sparse.csr_array, rtol: float) -> int:
    """Iterations that NumPy takes."""
    r = np.ones(a.shape[0])
    p, rr, iterations = r.copy(), r @ r, 0
    norm = math.sqrt(rr)
    while math.sqrt(rr) > rtol * norm:
        q = a @ p
        alpha = rr / (p @ q)
        r -= alpha * q
        previous, rr = rr, r @ r
        p = r + rr / previous * p
        iterations += 1
    return iterations


def test_the_carried_matrix(cli: Cli) -> None:
    step = solve(cli)
    data = step["data"]
    assert (data["matrix"], data["rows"], data["nonzeros"]) == ("bcsstk16.mtx.gz", 4884, 290378)
    assert data["kind"] == "coordinate real symmetric"
    assert data["converged"] is True
    assert data["residual"] <= 1.1e-10
    # The condition number that the SuiteSparse collection lists for HB/bcsstk16 is 4.9e+09.
    assert data["condition"] == pytest.approx(4.9e9, rel=0.05)
    assert len(data["history"]) == data["iterations"] + 1
    assert data["history"][0] == 1.0
    assert data["history"][-1] <= 1e-10 < data["history"][-2]
    assert [check["ok"] for check in step["checks"]] == [True, True]
    assert step["checks"][1]["name"] == "difference to SciPy's splu, energy norm"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["LFAT5.mtx", "bcsstk01.mtx", "bcsstk02.mtx", "bcsstk04.mtx.gz", "nos5.mtx.gz", "lund_a.mtx"]
)
def test_matrices_that_others_made_are_solved(cli: Cli, data: Path, name: str) -> None:
    step = solve(cli, "--matrix", data / name)
    a = sparse.csr_array(mmread(data / name, spmatrix=False))
    found = step["data"]
    assert (found["rows"], found["nonzeros"]) == (a.shape[0], a.nnz)
    # Rounding moves the end of an ill-conditioned solution by some iterations, not by many.
    expected = plain_conjugate_gradients(a, 1e-10)
    assert abs(found["iterations"] - expected) <= 0.2 * expected
    eigenvalues = np.linalg.eigvalsh(a.toarray())
    assert found["condition"] == pytest.approx(eigenvalues[-1] / eigenvalues[0], rel=0.05)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ash219.mtx", "is not square (219 × 85)"),
        ("west0067.mtx", "is not symmetric (entry "),
        ("b1_ss.mtx", "is not symmetric (entry "),
        ("Ragusa16.mtx", "is not symmetric (entry "),
        ("pores_1.mtx", "is not symmetric (entry "),
        ("plskz362.mtx", "is skew-symmetric, so not positive definite"),
        ("GD99_cc.mtx", "holds a complex matrix"),
        ("GD06_theory.mtx", "is not positive definite (diagonal entry 1 is 0)"),
        ("GD97_b.mtx", "is not positive definite (diagonal entry 1 is 0)"),
    ],
)
def test_matrices_that_conjugate_gradients_cannot_solve(
    refused: Refused, data: Path, name: str, reason: str
) -> None:
    line = refused("demo", "solve", "--matrix", data / name)
    assert line.startswith(f"{data / name} {reason}")


@pytest.mark.parametrize("name", ["bcspwr01.mtx", "can___24.mtx"])
def test_an_indefinite_matrix_is_found_on_the_way(cli: Cli, data: Path, name: str) -> None:
    done = cli("demo", "solve", "--matrix", data / name)
    assert done.code == 2
    line = rf"trio-accel: {data / name} is not positive definite (p·Ap = -"
    assert done.err.startswith(line)
    assert done.err.endswith("): conjugate gradients cannot solve it\n")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([[1, 2], [2.5, 1]], "is not symmetric (entry 1,2 is 2, entry 2,1 is 2.5)"),
        ([[1, 2], [0, 1]], "is not symmetric (entry 1,2 is 2, entry 2,1 is 0)"),
        ([[1, 0], [0, 0]], "is not positive definite (diagonal entry 2 is 0)"),
        ([[1, 0], [0, -3]], "is not positive definite (diagonal entry 2 is -3)"),
        ([[1, 2, 3], [4, 5, 6]], "is not square (2 × 3)"),
    ],
)
def test_what_the_entries_alone_show(refused: Refused, tmp_path: Path, rows: object, reason: str) -> None:
    path = write(tmp_path / "x.mtx", rows)
    line = refused("demo", "solve", "--matrix", path)
    assert line == f"{path} {reason}: conjugate gradients cannot solve it"


def test_a_singular_matrix_with_the_load_in_its_kernel(cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path / "laplacian.mtx", [[1, -1, 0], [-1, 2, -1], [0, -1, 1]])
    done = cli("demo", "solve", "--matrix", path)
    assert done.code == 2
    assert "is not positive definite (p·Ap = 0 in iteration 1)" in done.err


def test_a_singular_matrix_whose_load_is_in_its_range(cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path / "x.mtx", [[1, 1], [1, 1]])
    done = cli("demo", "solve", "--matrix", path)
    assert (done.code, done.err) == (2, f"trio-accel: {path} is singular, so not positive definite\n")


def test_a_matrix_out_of_range(cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path / "x.mtx", [[1e308, 1e307], [1e307, 1e308]])
    done = cli("demo", "solve", "--matrix", path)
    assert done.code == 2
    assert "leaves the range of float64 in iteration 1" in done.err


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_identity_takes_one_iteration(cli: Cli, tmp_path: Path, size: int) -> None:
    data = solve(cli, "--matrix", write(tmp_path / "x.mtx", 3 * np.eye(size)))["data"]
    assert (data["iterations"], data["condition"]) == (1, 1.0)
    assert data["history"][1] <= 1e-15


def test_dense_files_and_duplicates(cli: Cli, tmp_path: Path) -> None:
    dense = tmp_path / "dense.mtx"
    dense.write_text("%%MatrixMarket matrix array real symmetric\n2 2\n4\n1\n3\n", "ascii")
    twice = tmp_path / "twice.mtx"
    twice.write_text(
        "%%MatrixMarket matrix coordinate real symmetric\n2 2 5\n1 1 1\n2 1 1\n1 1 3\n2 2 1\n2 2 2\n", "ascii"
    )
    histories = [solve(cli, "--matrix", path)["data"]["history"] for path in (dense, twice)]
    assert histories[0] == pytest.approx(histories[1], abs=1e-15)


def test_rounding_does_not_make_a_matrix_unsymmetric(cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path / "x.mtx", [[2, 0.1 + 0.2], [0.3, 1]])
    assert solve(cli, "--matrix", path)["data"]["converged"] is True


def test_too_few_iterations_are_a_failed_check(cli: Cli, data: Path) -> None:
    step = solve(cli, "--matrix", data / "lund_a.mtx", "--max-iterations", 10, code=1)
    assert (step["data"]["converged"], step["data"]["iterations"], step["data"]["reference"]) == (
        False,
        10,
        None,
    )
    assert step["notes"][0].startswith("not converged: relative residual ")
    assert step["notes"][0].endswith(" after 10 iterations")
    assert [check["ok"] for check in step["checks"]] == [False]
    done = cli("demo", "solve", "--matrix", data / "lund_a.mtx", "--max-iterations", 10)
    assert done.code == 1
    assert step["notes"][0] in done.out
    assert "10 iterations of at most 10, without reaching 1e-10" in " ".join(done.out.split())


def test_a_tolerance_that_float64_cannot_reach_is_a_failed_check(cli: Cli, data: Path) -> None:
    # The recursion goes on to 1e-15, but the true residual stays where rounding leaves it.
    step = solve(cli, "--matrix", data / "LFAT5.mtx", "--rtol", 1e-18, code=1)
    assert step["data"]["converged"] is True
    assert step["data"]["residual"] > 1e-17
    assert step["checks"][0]["ok"] is False
    assert step["notes"][0].startswith("the recursion came below 1e-18, the residual itself did not")


@pytest.mark.slow
def test_a_larger_tolerance_takes_fewer_iterations(cli: Cli, data: Path) -> None:
    counts = [
        solve(cli, "--matrix", data / "nos5.mtx.gz", "--rtol", rtol)["data"]["iterations"]
        for rtol in (1e-2, 1e-6, 1e-12)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[2]


def test_a_wrong_solution_is_found(cli: Cli, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        host = await to_host(self, out=out)
        if host.ndim:
            host[3] *= 1.001
        return host

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)
    step = solve(cli, "--matrix", data / "lund_a.mtx", code=1)
    assert [check["ok"] for check in step["checks"]] == [False, False]


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_truncated_files(
    refused: Refused, data: Path, tmp_path: Path, is_compressed: bool, part: float
) -> None:
    content = (data / "bcsstk01.mtx").read_bytes()
    path = tmp_path / ("x.mtx.gz" if is_compressed else "x.mtx")
    whole = gzip.compress(content) if is_compressed else content
    path.write_bytes(whole[: int(part * len(whole))])
    line = refused("demo", "solve", "--matrix", path)
    assert line.startswith(str(path))
    assert any(reason in line for reason in ("is empty", "truncated", "not a valid Matrix Market file"))


def test_the_text_for_a_person(cli: Cli, data: Path) -> None:
    done = cli("demo", "solve", "--matrix", data / "LFAT5.mtx")
    assert (done.code, done.err) == (0, "")
    for words in (
        "✓ solve  14 × 14, ",
        "Oberwolfach/LFAT5",
        "conjugate gradients, no preconditioner, ",
        "iteration",
        "✓ residual b - A x, recomputed with SciPy ",
        "all 2 checks hold\n",
    ):
        assert words in done.out
    assert "\x1b" not in done.out
    # The first line names the processor.
    assert max(map(len, done.out.splitlines()[1:])) <= 80 + len(str(data))
