from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import trio_accel as ta

if TYPE_CHECKING:
    from conftest import Cli


def recover(cli: Cli, code: int = 0) -> dict[str, Any]:
    done = cli("demo", "recover", "--json")
    assert (done.code, done.err) == (code, "")
    step: dict[str, Any] = json.loads(done.out)["steps"][0]
    assert step["name"] == "recover"
    return step


def test_every_request_has_a_fate(cli: Cli) -> None:
    step = recover(cli)
    data = step["data"]
    fates = data["fates"]
    assert {(fate["client"], fate["request"]) for fate in fates} == {
        (client, request) for client in range(1, 5) for request in range(1, 26)
    }
    assert len(fates) == data["requests"] == 100
    completed = [fate for fate in fates if fate["outcome"] == "completed"]
    failed = [fate for fate in fates if fate["outcome"] != "completed"]
    assert len(completed) == data["completed"]
    assert all(fate["cause"] is None and fate["error"] < 1e-5 for fate in completed)
    assert all(fate["outcome"] == "ActorFailedError" and fate["error"] is None for fate in failed)
    assert data["failed"] == {"ActorFailedError: RuntimeError: injected": len(failed)}
    assert data["completed"] + len(failed) == 100


def test_the_actor_is_crashed_and_restarted_as_often_as_asked(cli: Cli) -> None:
    data = recover(cli)["data"]
    assert data["faults"] == data["restarts"] == 3
    assert "blas (BlasActor) running" in data["tree_before"]
    assert "restart" not in data["tree_before"]
    assert "3 restarts, last error: RuntimeError: injected" in data["tree_after"]
    # The clients were served by every incarnation, the last one included.
    assert {fate["incarnation"] for fate in data["fates"] if fate["outcome"] == "completed"} >= {0, 3}


def test_the_text_for_a_person(cli: Cli) -> None:
    done = cli("demo", "recover")
    assert (done.code, done.err) == (0, "")
    lines = [line.strip() for line in done.out.splitlines()]
    assert lines.index("before") < lines.index("after 3 faults, 4 clients asking all the time")
    table = [line.split() for line in lines]
    assert ["by", "incarnation", "0", "1", "2", "3", "all"] in table
    total = next(row for row in table if row[:1] == ["requests"])
    assert total[-1] == "100"
    rows = [row for row in table if row[:1] in (["completed"], ["ActorFailedError"]) and len(row) == 6]
    for column in range(1, 6):
        assert sum(int(row[column]) for row in rows) == int(total[column])
    assert lines[-1] == "all 4 checks hold"


def test_a_lost_fault_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ta.testing, "inject_fault", lambda *_, **__: None)
    step = recover(cli, code=1)
    failed = [check["name"] for check in step["checks"] if not check["ok"]]
    assert failed == ["faults that did not crash the actor exactly once"]


def test_a_wrong_result_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        return await to_host(self, out=out) * 1.01

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)
    step = recover(cli, code=1)
    assert [check["name"] for check in step["checks"] if not check["ok"]] == [
        "relative error of every result"
    ]


def test_another_failure_is_told_from_an_injected_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    inject = ta.testing.inject_fault

    def other(device: ta.Device, operation: Any, *, fail: Exception, count: int = 1) -> Any:
        return inject(device, operation, fail=ZeroDivisionError("other"), count=count)

    monkeypatch.setattr(ta.testing, "inject_fault", other)
    step = recover(cli, code=1)
    assert [check["name"] for check in step["checks"] if not check["ok"]] == [
        "requests failed for another reason"
    ]
    assert list(step["data"]["failed"]) == ["ActorFailedError: ZeroDivisionError: other"]
