"""Senseless options are refused at their construction, and the message lists the allowed values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import attrs
import pytest
from sample_actors import BoomError

from trio_accel.actors import (
    Backoff,
    Directive,
    Intensity,
    MailboxOptions,
    Overflow,
    Policy,
    Strategy,
    SystemOptions,
)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: MailboxOptions(capacity=0),
            ValueError,
            "MailboxOptions: capacity must be an integer of at least 1, got 0",
        ),
        (
            lambda: MailboxOptions(capacity=1.5),
            ValueError,
            "MailboxOptions: capacity must be an integer of at least 1, got 1.5",
        ),
        (
            lambda: MailboxOptions(capacity=True),
            ValueError,
            "MailboxOptions: capacity must be an integer of at least 1, got True",
        ),
        (
            lambda: MailboxOptions(stash=-1),
            ValueError,
            "MailboxOptions: stash must be an integer of at least 0, got -1",
        ),
        (
            lambda: MailboxOptions(overflow="wait"),
            TypeError,
            "MailboxOptions: overflow must be an Overflow, got 'wait'",
        ),
        (
            lambda: MailboxOptions(on_restart="drop"),
            ValueError,
            "MailboxOptions: on_restart must be 'keep' or 'reject', got 'drop'",
        ),
        (
            lambda: Intensity(restarts=-1),
            ValueError,
            "Intensity: restarts must be an integer of at least 0, got -1",
        ),
        (lambda: Intensity(within=0), ValueError, "Intensity: within must be above 0, got 0"),
        (
            lambda: Intensity(within=-5),
            ValueError,
            "Intensity: within must be a number of at least 0, got -5",
        ),
        (
            lambda: Intensity(within="5"),
            ValueError,
            "Intensity: within must be a number of at least 0, got '5'",
        ),
        (
            lambda: Backoff(base=-0.1),
            ValueError,
            "Backoff: base must be a number of at least 0, got -0.1",
        ),
        (
            lambda: Backoff(base=math.nan),
            ValueError,
            "Backoff: base must be a number of at least 0, got nan",
        ),
        (
            lambda: Backoff(factor=0.5),
            ValueError,
            "Backoff: factor must be a number of at least 1, got 0.5",
        ),
        (lambda: Backoff(jitter=1.5), ValueError, "Backoff: jitter must be a number from 0 to 1, got 1.5"),
        (
            lambda: Backoff(initial=31.0),
            ValueError,
            "Backoff: initial must not be above maximum, got 31.0 and 30.0",
        ),
        (
            lambda: Backoff(base=2.0, maximum=1.0),
            ValueError,
            "Backoff: base must not be above maximum, got 2.0 and 1.0",
        ),
        (lambda: Policy(grace=-1), ValueError, "Policy: grace must be a number of at least 0, got -1"),
        (lambda: Policy(backoff=3), TypeError, "Policy: backoff must be a Backoff, got 3"),
        (lambda: Policy(intensity=3), TypeError, "Policy: intensity must be an Intensity, got 3"),
        (
            lambda: Policy(strategy="one_for_all"),
            TypeError,
            "Policy: strategy must be a Strategy, got 'one_for_all'",
        ),
        (
            lambda: Policy(directives=[ValueError]),
            TypeError,
            (
                "Policy: directives must be a mapping of exception classes to Directive, "
                "got [<class 'ValueError'>]"
            ),
        ),
        (
            lambda: Policy(directives={int: Directive.STOP}),
            TypeError,
            "Policy: directives: <class 'int'> is not a subclass of Exception",
        ),
        (
            lambda: Policy(directives={KeyboardInterrupt: Directive.RESUME}),
            TypeError,
            "Policy: directives: <class 'KeyboardInterrupt'> is not a subclass of Exception",
        ),
        (
            lambda: Policy(directives={ValueError(): Directive.STOP}),
            TypeError,
            "Policy: directives: ValueError() is not a subclass of Exception",
        ),
        (
            lambda: Policy(directives={ValueError: "stop"}),
            TypeError,
            "Policy: directives: 'stop' for ValueError is not a Directive",
        ),
        (
            lambda: SystemOptions(strategy=None),
            TypeError,
            "SystemOptions: strategy must be a Strategy, got None",
        ),
        (
            lambda: SystemOptions(intensity=(3, 5)),
            TypeError,
            "SystemOptions: intensity must be an Intensity, got (3, 5)",
        ),
        (lambda: SystemOptions(random=7), TypeError, "SystemOptions: random must be a Random, got 7"),
    ],
)
def test_bad_options(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == text


def test_options_cannot_be_changed_afterwards() -> None:
    directives = {BoomError: Directive.STOP}
    policy = Policy(directives=directives)
    directives.clear()
    assert policy.directive_for(BoomError()) is Directive.STOP
    with pytest.raises(TypeError):
        policy.directives[ValueError] = Directive.STOP  # type: ignore[index]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        policy.grace = 3.0  # type: ignore[misc]


def test_the_defaults() -> None:
    assert MailboxOptions() == MailboxOptions(
        capacity=64, overflow=Overflow.WAIT, stash=64, on_restart="keep"
    )
    assert Intensity() == Intensity(3, 5.0)
    assert Policy().strategy is Strategy.ONE_FOR_ONE
    assert Policy().directive_for(ValueError()) is Directive.RESTART
    assert isinstance(SystemOptions().random, random.Random)
