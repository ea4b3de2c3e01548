"""Random programs of spawn, ask, tell, crash, cancel and stop, compared with a small model.

The model predicts no events, because they depend on the order of tasks. It knows the possible ones: each ask
has exactly one outcome, which its story allows; no refused request is executed; nobody is left.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import attrs
import hypothesis
import hypothesis.strategies as st
import pytest
import trio
import trio._core._run
import trio.testing

from trio_accel.actors import (
    Actor,
    ActorFailedError,
    ActorRestartingError,
    ActorStoppedError,
    ActorSystem,
    Backoff,
    DeferredReply,
    Directive,
    Intensity,
    MailboxFullError,
    MailboxOptions,
    Message,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageFailed,
    MessageStarted,
    Overflow,
    Policy,
    Ref,
    Request,
    Restart,
    Strategy,
    SupervisorScope,
    handles,
    open_system,
)
from trio_accel.actors._messages import running_cells

Kind: TypeAlias = Literal["echo", "wait", "grouped", "crash", "defer", "stash"]


class BoomError(Exception):
    """The error of the crashing actors."""


# A program is a list of these.


@attrs.frozen
class Spawn:
    restart: Restart = Restart.PERMANENT
    directive: Directive = Directive.RESTART
    overflow: Overflow = Overflow.WAIT
    capacity: int = 1
    on_restart: Literal["keep", "reject"] = "keep"


@attrs.frozen
class Ask:
    actor: int
    kind: Kind
    abandon: bool = False


@attrs.frozen
class Tell:
    actor: int
    crash: bool = False


@attrs.frozen
class Release:
    """Let the handler of an ask continue, or give the reply that it deferred."""

    ask: int


@attrs.frozen
class Cancel:
    ask: int


@attrs.frozen
class Unstash:
    actor: int


@attrs.frozen
class Stop:
    actor: int
    drain: bool = False


@attrs.frozen
class End:
    """`Ref.cancel`."""

    actor: int


@attrs.frozen
class Settle:
    """Wait until nothing moves."""


Step: TypeAlias = Spawn | Ask | Tell | Release | Cancel | Unstash | Stop | End | Settle
_numbers = st.integers(0, 3)
_asks = st.builds(
    Ask,
    actor=_numbers,
    kind=st.sampled_from(["echo", "wait", "grouped", "crash", "defer", "stash"]),
    abandon=st.booleans(),
)
_tells = st.builds(Tell, actor=_numbers, crash=st.booleans())
_releases = st.builds(Release, ask=st.integers(0, 9))
_spawns = st.builds(
    Spawn,
    restart=st.sampled_from(Restart),
    directive=st.sampled_from(Directive),
    overflow=st.sampled_from(Overflow),
    capacity=st.integers(1, 2),
    on_restart=st.sampled_from(["keep", "reject"]),
)
# Ends are rare and callers many, lest most programs be about dead actors. Shrinking replaces them by
# `Settle`.
_steps = st.one_of(
    st.just(Settle()),
    _asks,
    _asks,
    _asks,
    _asks,
    _tells,
    _releases,
    st.builds(Cancel, ask=st.integers(0, 9)),
    st.builds(Unstash, actor=_numbers),
    _spawns,
    st.one_of(
        st.builds(Stop, actor=_numbers, drain=st.booleans()),
        st.builds(End, actor=_numbers),
    ),
)


@attrs.define(eq=False)
class Story:
    """The model's knowledge of one ask."""

    step: Ask
    target: Life
    entered: int = 0
    is_set_aside: bool = False
    is_cancelled: bool = False
    release: trio.Event = attrs.field(factory=trio.Event)
    reply: DeferredReply[Any] | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    outcomes: list[object] = attrs.field(factory=list)

    def end(self, outcome: object) -> None:
        """Take an outcome down, if what happened up to now allows it."""
        assert not self.outcomes, f"a second outcome: {outcome!r}"
        self.outcomes.append(outcome)
        never_executed = self.entered == 0 or self.is_set_aside
        match outcome:
            case trio.Cancelled():
                assert self.is_cancelled
            case BoomError():
                assert self.step.kind == "crash"
                assert self.target.spawn.directive is Directive.RESUME
            case ActorFailedError():
                assert self.entered
                self._check_cause(outcome.__cause__)
            case ActorStoppedError():
                assert never_executed
                assert self.target.may_have_ended
            case ActorRestartingError():
                assert never_executed
                assert self.target.spawn.on_restart == "reject"
                assert self.target.family.crashes
            case MailboxFullError():
                assert self.entered == 0
                assert self.target.spawn.overflow is not Overflow.WAIT
            case Story():
                assert outcome is self, "somebody else's reply"
                assert self.entered
                assert self.step.kind != "crash"
            case _:
                raise AssertionError(f"no outcome of the model: {outcome!r}")

    def _check_cause(self, cause: BaseException | None) -> None:
        match cause:
            case BoomError():
                own = self.step.kind == "crash" and self.target.spawn.directive is not Directive.RESUME
                # The death of the cell is the cause for its deferred requests.
                assert own or (self.step.kind == "defer" and self.target.crashes)
            case ActorRestartingError():
                assert self.target.family.strategy is not Strategy.ONE_FOR_ONE
                assert self.target.family.crashes
            case ActorStoppedError():
                assert self.target.may_have_ended or self.target.crashes
            case _:
                raise AssertionError(f"no cause of the model: {cause!r}")


@attrs.define(eq=False)
class Life:
    """The model's knowledge of one actor."""

    spawn: Spawn
    family: Family
    ref: Ref[Player] = attrs.field(init=False)
    crashes: int = 0
    is_ended: bool = False
    notes: list[int] = attrs.field(factory=list)
    told: int = 0
    incarnations: list[int] = attrs.field(factory=list)

    @property
    def may_have_ended(self) -> bool:
        is_temporary = self.spawn.restart is Restart.TEMPORARY
        ends = is_temporary or self.spawn.directive in (Directive.STOP, Directive.ESCALATE)
        # Actors without restarts end with a sibling, and everybody with the supervisor.
        swept = is_temporary and self.family.strategy is not Strategy.ONE_FOR_ONE and self.family.crashes
        return bool(self.is_ended or self.family.is_over or (self.crashes and ends) or swept)

    def check(self) -> None:
        assert self.ref.is_terminated
        # Some may be missing; none comes twice, or before an earlier one.
        assert self.notes == sorted(set(self.notes))
        assert self.incarnations == sorted(self.incarnations)
        assert self.spawn.restart is not Restart.TEMPORARY or set(self.incarnations) <= {0}
        with pytest.raises(trio.WouldBlock):
            _peek(self.ref)


def _peek(ref: Ref[Player]) -> None:
    if ref._cell.mailbox.is_empty and not ref._cell.outcomes.deferred:
        raise trio.WouldBlock


@attrs.define(eq=False)
class Family:
    """The model's knowledge of the supervisor."""

    strategy: Strategy
    crashes: int = 0
    is_over: bool = False


@attrs.frozen(eq=False)
class Play(Request["Player", Any]):
    story: Story


@attrs.frozen(eq=False)
class PlayBeside(Request["Player", Any]):
    story: Story


@attrs.frozen
class Note(Message["Player"]):
    number: int
    crash: bool


@attrs.frozen
class GiveBack(Message["Player"]):
    pass


class Player(Actor):
    """Follows the story, and notes it there."""

    def __init__(self, life: Life) -> None:
        self.life = life

    @handles(Play)
    async def play(self, message: Play) -> Any:
        return await self._play(message, message.story)

    @handles(PlayBeside, group="beside", limit=2)
    async def play_beside(self, message: PlayBeside) -> Any:
        return await self._play(message, message.story)

    async def _play(self, message: Play | PlayBeside, story: Story) -> object:
        story.entered += 1
        self.life.incarnations.append(self.context.restart.number)
        match story.step.kind:
            case "wait" | "grouped":
                await story.release.wait()
            case "crash":
                self.crash()
            case "defer":
                story.reply = self.context.defer(on_cancel=lambda: self._unwind(story))
                return story.reply
            case "stash" if not story.is_set_aside:
                self.context.stash(message)
                story.is_set_aside = True
            case _:
                story.is_set_aside = False
        return story

    def crash(self) -> None:
        self.life.crashes += 1
        self.life.family.crashes += 1
        raise BoomError

    def _unwind(self, story: Story) -> None:
        assert story.reply is not None
        story.reply.cancelled()

    @handles(Note)
    async def note(self, message: Note) -> None:
        self.life.notes.append(message.number)
        if message.crash:
            self.crash()

    @handles(GiveBack)
    async def give_back(self, message: GiveBack) -> None:
        self.context.unstash_all()


class Stage:
    """Runs a program, and updates the model."""

    def __init__(self, strategy: Strategy, nursery: trio.Nursery) -> None:
        self.family = Family(strategy)
        self.lives: list[Life] = []
        self.stories: list[Story] = []
        self.events: list[object] = []
        self.nursery = nursery

    async def run(self, system: ActorSystem, program: list[Step]) -> None:
        system.subscribe(self.events.append)
        intensity = Intensity(10**6, 1.0)
        async with system.open_supervisor("f", strategy=self.family.strategy, intensity=intensity) as scope:
            try:
                for step in program:
                    await self.take(scope, step)
                    await trio.lowlevel.checkpoint()
                await trio.testing.wait_all_tasks_blocked()
            finally:
                self.family.is_over = True
                for story in self.stories:
                    self.release(story)

    async def take(self, scope: SupervisorScope, step: Step) -> None:
        if isinstance(step, Spawn):
            await self.spawn(scope, step)
        elif isinstance(step, Settle):
            await trio.testing.wait_all_tasks_blocked()
        elif isinstance(step, Cancel | Release):
            if self.stories:
                self.touch(self.stories[step.ask % len(self.stories)], step)
        elif self.lives:
            self.turn_to(self.lives[step.actor % len(self.lives)], step)

    async def spawn(self, scope: SupervisorScope, step: Spawn) -> None:
        life = Life(step, self.family)
        life.ref = await scope.spawn(
            Player,
            life,
            restart=step.restart,
            policy=Policy(
                directives={BoomError: step.directive}, backoff=Backoff(base=0.0, jitter=0.0), grace=0.0
            ),
            mailbox=MailboxOptions(
                capacity=step.capacity, overflow=step.overflow, on_restart=step.on_restart
            ),
        )
        self.lives.append(life)

    def touch(self, story: Story, step: Cancel | Release) -> None:
        if isinstance(step, Release):
            self.release(story)
        else:
            story.is_cancelled = True
            story.scope.cancel()

    def release(self, story: Story) -> None:
        story.release.set()
        # The end of an actor answers its deferred requests, if it comes first.
        if story.reply is not None and not story.target.ref.is_terminated:
            story.reply.set(story)

    def turn_to(self, life: Life, step: Ask | Tell | Unstash | Stop | End) -> None:
        if isinstance(step, Ask):
            self.stories.append(Story(step, life))
            self.nursery.start_soon(self.ask, self.stories[-1])
        elif isinstance(step, Tell):
            life.told += 1
            self.tell(life, Note(life.told, step.crash))
        elif isinstance(step, Unstash):
            self.tell(life, GiveBack())
        elif isinstance(step, Stop):
            life.is_ended = True
            self.nursery.start_soon(lambda: life.ref.stop(drain=step.drain))
        else:
            life.is_ended = True
            life.ref.cancel("the program says so")

    def tell(self, life: Life, message: Note | GiveBack) -> None:
        try:
            life.ref.tell_nowait(message)
        except (trio.WouldBlock, MailboxFullError, ActorStoppedError, ActorRestartingError):
            return

    async def ask(self, story: Story) -> None:
        message = PlayBeside(story) if story.step.kind == "grouped" else Play(story)
        with story.scope:
            try:
                outcome = await story.target.ref.ask(message, abandon_on_cancel=story.step.abandon)
            except trio.Cancelled as cancelled:
                story.end(cancelled)
                raise
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome
                outcome = error
            story.end(outcome)

    def check(self, system: ActorSystem) -> None:
        for story in self.stories:
            assert len(story.outcomes) == 1, story
        for life in self.lives:
            life.check()
        assert running_cells() == []
        count = Counter(type(event) for event in self.events)
        dropped = [event.message for event in self.events if isinstance(event, MessageDropped)]
        assert system.dead_letters == len(dropped)
        # A request set aside has begun, and may be dropped all the same.
        begun = sum(isinstance(message, Play) and message.story.entered > 0 for message in dropped)
        ended = count[MessageCompleted] + count[MessageFailed] + count[MessageCancelled]
        assert count[MessageStarted] == ended + begun


async def main(strategy: Strategy, program: list[Step]) -> None:
    async with trio.open_nursery() as nursery:
        stage = Stage(strategy, nursery)
        async with open_system("s") as system:
            try:
                await stage.run(system, program)
            except* ActorFailedError as failed:
                # A child escalated.
                assert stage.family.crashes, failed  # noqa: PT017  # a program may fail, and need not
        await trio.testing.wait_all_tasks_blocked()
        waiting = [story.step for story in stage.stories if not story.outcomes]
        nursery.cancel_scope.cancel()
    assert not waiting, f"asks that wait for ever: {waiting}"
    stage.check(system)


@contextmanager
def repeatable() -> Iterator[None]:
    """Let Hypothesis decide who runs first, so that what it finds happens again."""
    scheduler, was = trio._core._run, trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    logging.getLogger("trio_accel.actors").disabled = True
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = was
        logging.getLogger("trio_accel.actors").disabled = False


hypothesis.register_random(trio._core._run._r)


@pytest.mark.timeout(60)  # hundreds of programs, on a shared machine
@pytest.mark.parametrize("strategy", Strategy)
@hypothesis.settings(
    max_examples=334, derandomize=True, deadline=None, database=None, report_multiple_bugs=False
)
@hypothesis.given(
    spawns=st.lists(_spawns, min_size=2, max_size=3),
    program=st.lists(_steps, min_size=15, max_size=40),
)
def test_random_programs(strategy: Strategy, spawns: list[Step], program: list[Step]) -> None:
    with repeatable():
        trio.run(main, strategy, [*spawns, *program], clock=trio.testing.MockClock(autojump_threshold=0.05))
