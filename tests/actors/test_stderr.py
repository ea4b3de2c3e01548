"""The runtime's output without a logging configuration: one line for an event that nobody else sees."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator

import pytest
import trio.testing
from sample_actors import AT_ONCE, BoomError, Do, Events, Gate, Note, Number, Puppet, Run, RunGrouped, crash

from trio_accel.actors import ActorFailedError, ActorSystem, Directive, Event, Policy, Ref
from trio_accel.actors._errors import StderrUnlessConfigured

wait = trio.testing.wait_all_tasks_blocked


async def boom(actor: Puppet) -> None:
    raise BoomError("told\nin two lines")


@pytest.fixture
async def unconfigured(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[None, None]:
    """The package's logger as in a program without any handler; pytest has added some when this runs."""
    logger = logging.getLogger("trio_accel")
    own = [handler for handler in logger.handlers if isinstance(handler, StderrUnlessConfigured)]
    assert len(own) == 1
    with monkeypatch.context() as patch:
        patch.setattr(logger, "propagate", False)
        patch.setattr(logger, "handlers", own)
        yield


@pytest.fixture
async def quick_puppet(system: ActorSystem) -> Ref[Puppet]:
    return await system.spawn(Puppet, name="puppet", policy=AT_ONCE)


@pytest.mark.parametrize("message_class", [Run, RunGrouped])
async def test_a_told_message_that_crashes_its_actor_is_one_line(
    quick_puppet: Ref[Puppet],
    capsys: pytest.CaptureFixture[str],
    message_class: type[Run],
    unconfigured: None,
) -> None:
    await quick_puppet.tell(message_class(boom))
    await wait()
    assert await quick_puppet.ask(Number()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(
        rf"trio_accel\.actors: actor s/puppet crashed over {message_class.__name__}: "
        r"BoomError\('told\\nin two lines'\) \(test_stderr\.py:\d+, in boom\)\n",
        captured.err,
    )


async def test_an_error_that_the_policy_lets_pass_is_one_line(
    system: ActorSystem, capsys: pytest.CaptureFixture[str], unconfigured: None
) -> None:
    ref = await system.spawn(Puppet, name="puppet", policy=Policy(directives={BoomError: Directive.RESUME}))
    await ref.tell(Run(boom))
    assert await ref.ask(Number()) == 0
    assert capsys.readouterr().err.startswith("trio_accel.actors: actor s/puppet goes on after BoomError(")


async def test_an_asker_has_the_error_itself(
    system: ActorSystem, quick_puppet: Ref[Puppet], capsys: pytest.CaptureFixture[str], unconfigured: None
) -> None:
    await crash(quick_puppet)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(quick_puppet.tell, RunGrouped(gate))
        await gate.entered.wait()
        # It also ends the concurrent told message, which has not failed on its own.
        await crash(quick_puppet)
    await wait()
    assert system.tree().find("s/puppet").restarts == 2
    assert capsys.readouterr().err == ""


async def test_an_error_of_an_observer_is_logged_with_its_text(
    system: ActorSystem, puppet: Ref[Puppet], capsys: pytest.CaptureFixture[str], unconfigured: None
) -> None:
    def observer(event: Event) -> None:
        raise ValueError("of the observer")

    with system.subscribe(observer):
        await puppet.tell(Note("hello"))
        await wait()
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("trio_accel.actors: an observer failed on MessageStarted(")
    assert re.search(r": ValueError: of the observer \(test_stderr\.py:\d+, in observer\)$", first)


async def test_a_handler_of_the_program_takes_its_place(
    quick_puppet: Ref[Puppet],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    unconfigured: None,
) -> None:
    logger = logging.getLogger("trio_accel.actors")
    handler = logging.StreamHandler()
    monkeypatch.setattr(logger, "handlers", [handler])
    await quick_puppet.tell(Run(boom))
    assert await quick_puppet.ask(Number()) == 1
    printed = capsys.readouterr().err
    assert printed.count("crashed over Run") == 1
    assert "Traceback (most recent call last)" in printed


async def test_a_program_without_stderr(
    quick_puppet: Ref[Puppet], monkeypatch: pytest.MonkeyPatch, unconfigured: None
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        await quick_puppet.tell(Run(boom))
        assert await quick_puppet.ask(Number()) == 1


async def test_told_and_asked_differ_in_level(
    quick_puppet: Ref[Puppet], caplog: pytest.LogCaptureFixture, events: Events
) -> None:
    await quick_puppet.tell(Run(boom))
    with pytest.raises(ActorFailedError):
        await quick_puppet.ask(Do(boom))
    await wait()
    levels = [record.levelname for record in caplog.records if "crashed" in record.msg]
    assert levels == ["ERROR", "WARNING"]
    assert all(record.exc_info for record in caplog.records)


PROGRAM = """
import logging, sys
import attrs, trio
import trio_accel as ta

@attrs.frozen
class Note(ta.Message["Worker"]):
    pass

class Worker(ta.Actor):
    @ta.handles(Note)
    async def note(self, message: Note) -> None:
        raise ValueError("boom")

async def main() -> None:
    async with ta.open_system("demo") as system:
        worker = await system.spawn(Worker, name="worker")
        await worker.tell(Note())
        await worker.stop(drain=True)

{configure}
trio.run(main)
"""


@pytest.mark.parametrize(
    ("configure", "lines", "tracebacks"),
    [
        ("", 1, 0),
        ("logging.basicConfig()", 1, 1),
        ("logging.getLogger().addHandler(logging.NullHandler())", 0, 0),
    ],
    ids=["unconfigured", "configured", "silenced"],
)
def test_a_whole_program(configure: str, lines: int, tracebacks: int) -> None:
    program = textwrap.dedent(PROGRAM).format(configure=configure)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("actor demo/worker crashed over Note: ValueError('boom')") == lines
    assert done.stderr.count("Traceback") == tracebacks
