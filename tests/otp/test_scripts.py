"""The scripts themselves: their effects on our side, with or without OTP."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from crash_scripts import (
    Add,
    Crash,
    OtpReference,
    Script,
    Supervisor,
    Worker,
    lines,
    normalise,
    run_on_ours,
    side_by_side,
)
from crash_scripts.cases import WINDOWS, cases
from crash_scripts.differences import DIFFERENCES

CASES = cases()
ENDS = {"crashed", "finished", "was shut down", "ended"}


@pytest.mark.parametrize("script", [*CASES.values(), *WINDOWS], ids=[*CASES, *map(str, range(len(WINDOWS)))])
def test_started_actors_end_once_and_in_one_order(script: Script) -> None:
    """The order in which Trio runs tasks, which is random, does not show."""
    log, *others = (run_on_ours(script) for _ in range(3))
    assert others == [log, log]
    events = normalise(log)
    started = {(event.name, event.number) for event in events if event.kind == "started"}
    ended = Counter((event.name, event.number) for event in events if event.kind in ENDS)
    assert set(ended.values()) <= {1}
    assert set(ended) <= started
    # A supervisor whose children fail to start has no end.
    assert {name for name, _ in started - set(ended)} <= {"root", "n"}


def test_a_log_has_no_other_words() -> None:
    with pytest.raises(KeyError, match="exit killed"):
        normalise([("root", 0, "exit killed")])


def test_a_log_reads_well() -> None:
    script = Script(Supervisor("root", (Worker("a", fails=(1,)),), intensity=1), (Crash("a"),))
    assert lines(run_on_ours(script)) == [
        "root #0 started",
        "a #0 started",
        "a #0 crashed",
        "a #1 failed to start",
        "root #0 gave up",
        "root #0 ended",
    ]


def test_logs_are_shown_side_by_side() -> None:
    shown = side_by_side(["one", "two", "four"], ["one", "three", "four"])
    assert [row.split() for row in shown.splitlines()] == [
        ["one", "one"],
        ["two"],
        ["three"],
        ["four", "four"],
    ]


def test_a_script_prints_as_the_code_that_makes_it() -> None:
    script = Script(Supervisor("root", (Worker("a", "temporary"),)), (Crash("a"), Add("root", Worker("b"))))
    assert eval(repr(script)) == script
    assert "period" not in repr(script)


def test_a_name_has_one_supervisor() -> None:
    script = Script(Supervisor("root", (Worker("a"), Supervisor("n", (Worker("a"),)))))
    with pytest.raises(ValueError, match="'a' is under 'root' and 'n'"):
        script.parents()


def test_scripts_beyond_otp_are_errors(otp: OtpReference) -> None:
    unknown = Script(Supervisor("root", (Worker("a"),), strategy="two_for_one"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="invalid_strategy"):
        otp.run(unknown)
    # The VM continues.
    assert otp.run(CASES["fails-to-start"])[0][-1] == ("a", 0, "terminate shutdown")


def test_the_readme_names_every_difference() -> None:
    readme = (Path(__file__).parent / "README.md").read_text()
    assert sorted(re.findall(r"^- `([a-z-]+)`:", readme, re.MULTILINE)) == sorted(DIFFERENCES)
