"""Mistakes are refused at the declaration, construction, spawn or send, with a remedy in the message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, TypeVar

import attrs
import pytest
import trio.testing
from sample_actors import Do, Echo, Note, Puppet, Run

from trio_accel.actors import (
    Actor,
    ActorContext,
    ActorSystem,
    Backoff,
    Message,
    Ref,
    Request,
    Restart,
    Strategy,
    handles,
    message_target,
    open_system,
)


def refused(error: type[Exception], make: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        make()
    return str(caught.value)


# Sending


class Unknown(Request["Puppet", int]):
    pass


async def test_a_message_without_a_handler(puppet: Ref[Puppet]) -> None:
    with pytest.raises(TypeError) as caught:
        await puppet.ask(Unknown())
    assert str(caught.value) == (
        "ask: Puppet (s/puppet) does not handle Unknown; declare one with @handles(Unknown), "
        "or send what it handles: Count, Crash, Do, DoGrouped, Echo, Note, Number, Run, RunGrouped"
    )


async def test_an_actor_without_handlers(system: ActorSystem) -> None:
    class Mute(Actor):
        pass

    class Hello(Message["Mute"]):
        pass

    ref = await system.spawn(Mute, name="mute")
    with pytest.raises(TypeError) as caught:
        await ref.tell(Hello())
    assert str(caught.value) == (
        "tell: Mute (s/mute) does not handle Hello; declare one with @handles(Hello), "
        "or send what it handles: no message"
    )


# Requests to an actor, written like examples of messages.
ASKED = (
    "ask(Count(...)), ask(Crash(...)), ask(Do(...)), ask(DoGrouped(...)), ask(Echo(...)), ask(Number(...))"
)
TOLD = "tell(Note(...)), tell(Run(...)), tell(RunGrouped(...))"


@pytest.mark.parametrize(
    ("verb", "message", "text"),
    [
        ("ask", Note("a"), "ask: Note is a Message, which goes with tell(); here a Request is needed"),
        ("tell", Echo("a"), "tell: Echo is a Request, which goes with ask(); here a Message is needed"),
        ("ask", Echo, "ask: Echo is a class; make a message of it: Echo(...)"),
        ("tell", Note, "tell: Note is a class; make a message of it: Note(...)"),
        (
            "ask",
            "hello",
            f"ask: 'hello' is not a message; give an instance of a subclass of Request: {ASKED}",
        ),
        ("tell", None, f"tell: None is not a message; give an instance of a subclass of Message: {TOLD}"),
        (
            "ask",
            int,
            f"ask: <class 'int'> is not a message; give an instance of a subclass of Request: {ASKED}",
        ),
    ],
)
async def test_non_messages_and_wrong_ways_of_sending_are_refused(
    puppet: Ref[Puppet], verb: str, message: Any, text: str
) -> None:
    with pytest.raises(TypeError) as caught:
        await getattr(puppet, verb)(message)
    assert str(caught.value) == text
    if verb == "tell":
        assert refused(TypeError, lambda: puppet.tell_nowait(message)) == text


async def test_a_message_with_an_unhashable_value_is_refused(puppet: Ref[Puppet]) -> None:
    with pytest.raises(TypeError, match=r"ask: \[\] is not a message"):
        await puppet.ask([])  # type: ignore[arg-type]


# Declaring


class Hello(Message["Greeter"]):
    pass


class Ask(Request["Greeter", str]):
    pass


def test_handles_without_a_message_class() -> None:
    def declare() -> None:
        class Greeter(Actor):
            @handles  # type: ignore[arg-type]
            async def greet(self, message: Hello) -> None: ...

    assert refused(TypeError, declare).endswith(
        "Greeter.greet needs the message class that it serves: @handles(SomeMessage)"
    )


@pytest.mark.parametrize("message", [int, "Hello", Hello(), None, Request, Message, Actor])
def test_handles_of_something_else(message: Any) -> None:
    assert refused(TypeError, lambda: handles(message)) == (
        f"handles: {message!r} is not a subclass of Request or Message"
    )


def test_a_synchronous_handler_is_refused() -> None:
    def declare() -> None:
        class Greeter(Actor):
            @handles(Hello)
            def greet(self, message: Hello) -> None: ...  # type: ignore[arg-type]

    text = refused(TypeError, declare)
    assert text.startswith("handles(Hello): ")
    assert text.endswith("Greeter.greet must be an 'async def' method")


def test_a_handler_must_be_a_function() -> None:
    assert refused(TypeError, lambda: handles(Hello)(3)) == (  # type: ignore[arg-type]
        "handles(Hello): 3 must be an 'async def' method"
    )


def test_a_handler_that_does_not_take_the_message() -> None:
    def declare() -> None:
        class Greeter(Actor):
            @handles(Hello)
            async def greet(self) -> None: ...  # type: ignore[arg-type]

    assert refused(TypeError, declare).endswith(
        "Greeter.greet(self) -> 'None' must take two arguments: self, and the message"
    )


def test_two_handlers_for_one_message() -> None:
    def declare() -> None:
        class Greeter(Actor):
            @handles(Hello)
            async def greet(self, message: Hello) -> None: ...

            @handles(Hello)
            async def welcome(self, message: Hello) -> None: ...

    assert refused(TypeError, declare) == "Greeter: greet and welcome both handle Hello; keep one"


def test_a_handler_for_a_foreign_message() -> None:
    def declare_told() -> None:
        class Stranger(Actor):
            @handles(Hello)
            async def greet(self, message: Hello) -> None: ...

    def declare_asked() -> None:
        class Stranger(Actor):
            @handles(Ask)
            async def ask(self, message: Ask) -> str: ...

    assert refused(TypeError, declare_told) == (
        "Stranger: Hello is declared for Greeter, so Stranger cannot handle it; "
        'declare it as Hello(Message["Stranger"]), or let Stranger inherit from Greeter'
    )
    assert refused(TypeError, declare_asked) == (
        "Stranger: Ask is declared for Greeter, so Stranger cannot handle it; "
        'declare it as Ask(Request["Stranger", ...]), or let Stranger inherit from Greeter'
    )


@pytest.mark.parametrize("declaration", ["class", "dotted", "generic", "union", "any", "base", "typevar"])
def test_messages_declared_for_this_actor_in_other_words(declaration: str) -> None:
    T = TypeVar("T")

    class Greeter(Actor, Generic[T]):
        pass

    targets: dict[str, Any] = {
        "class": Greeter,
        "dotted": "greeters.Greeter",
        "generic": "Greeter[int]",
        "union": "Other | Greeter",
        "any": Any,
        "base": Actor,
        "typevar": T,
    }

    class Hi(Message[targets[declaration]]):  # type: ignore[misc]
        pass

    class Child(Greeter[int]):
        @handles(Hi)
        async def hi(self, message: Hi) -> None: ...

    assert Hi in Child.__handlers__


def test_the_target_of_a_message_class() -> None:
    class Bare(Message):  # type: ignore[type-arg]
        pass

    class Inherited(Hello):
        pass

    assert message_target(Hello) == message_target(Inherited) == "Greeter"
    assert message_target(Bare) is None


@pytest.mark.parametrize(
    ("group", "limit"),
    [("io", None), (None, 3), ("io", 0), ("io", -1), ("io", 1.5), ("io", True)],
)
def test_bad_groups(group: Any, limit: Any) -> None:
    assert refused(ValueError, lambda: handles(Hello, group=group, limit=limit)) == (
        "handles(Hello): a group needs a name and a limit of at least 1, "
        f"got group={group!r}, limit={limit!r}"
    )


def test_a_group_with_two_limits() -> None:
    def declare() -> None:
        class Greeter(Actor):
            @handles(Hello, group="io", limit=2)
            async def greet(self, message: Hello) -> None: ...

            @handles(Ask, group="io", limit=3)
            async def ask(self, message: Ask) -> str: ...

    assert refused(TypeError, declare) == (
        "Greeter: group 'io' has the limits 2 and 3; give its handlers one"
    )


@pytest.mark.parametrize("reserved", ["name", "restart", "policy", "mailbox"])
def test_a_constructor_with_a_reserved_parameter_is_refused(reserved: str) -> None:
    def declare() -> None:
        scope: dict[str, Any] = {}
        exec(f"def __init__(self, {reserved}): pass", scope)
        type("Greeter", (Actor,), {"__init__": scope["__init__"]})

    assert refused(TypeError, declare) == (
        f"Greeter: __init__ takes {reserved}, which spawn() keeps for itself; give the parameter another name"
    )


def test_a_constructor_that_takes_several() -> None:
    def declare() -> None:
        class Greeter(Actor):
            def __init__(self, name: str, *, policy: int) -> None: ...

    assert refused(TypeError, declare) == (
        "Greeter: __init__ takes name and policy, which spawn() keeps for itself; "
        "give the parameters other names"
    )


def test_a_lifespan_must_be_a_context_manager() -> None:
    def generator() -> None:
        class Greeter(Actor):
            async def lifespan(self, context: ActorContext) -> AsyncGenerator[None, None]:  # type: ignore[override]
                yield

    def coroutine() -> None:
        class Greeter(Actor):
            async def lifespan(self, context: ActorContext) -> None:  # type: ignore[override]
                pass

    for declare in (generator, coroutine):
        assert refused(TypeError, declare) == "Greeter: lifespan must be decorated with @asynccontextmanager"


def test_a_handler_overridden_by_another_kind_of_value_is_refused() -> None:
    class Greeter(Actor):
        @handles(Hello)
        async def greet(self, message: Hello) -> None: ...

    def by_a_function() -> None:
        class Child(Greeter):
            def greet(self, message: Hello) -> None: ...  # type: ignore[override]

    def by_nothing() -> None:
        class Child(Greeter):
            greet = None  # type: ignore[assignment]

    def by_another_handler() -> None:
        class Child(Greeter):
            @handles(Ask)
            async def greet(self, message: Ask) -> str: ...  # type: ignore[override]

    assert refused(TypeError, by_a_function).endswith("Child.greet must be an 'async def' method")
    assert refused(TypeError, by_nothing) == "handles(Hello): None must be an 'async def' method"
    assert refused(TypeError, by_another_handler) == (
        "Child: greet handles Ask, but overrides the handler of Hello; give it another name"
    )


async def test_an_override_without_the_decorator_is_the_handler(system: ActorSystem) -> None:
    class Louder(Puppet):
        async def echo(self, message: Echo) -> str:
            return message.text.upper()

    assert await (await system.spawn(Louder)).ask(Echo("a")) == "A"


async def test_another_method_for_the_same_message_takes_the_place_of_the_inherited(
    system: ActorSystem,
) -> None:
    class Louder(Puppet):
        @handles(Echo)
        async def shout(self, message: Echo) -> str:
            return message.text.upper()

    assert await (await system.spawn(Louder)).ask(Echo("a")) == "A"


@attrs.frozen
class Later(Message["Greeter"]):
    pass


def test_the_types_of_a_message_are_not_values() -> None:
    with pytest.raises(TypeError, match="a message class carries only the types of its messages"):
        Ask.__types__()
    with pytest.raises(TypeError, match="a message class carries only the types of its messages"):
        Hello.__actor__()


# Spawning


@pytest.mark.parametrize("name", ["", "a/b", 3, b"a"])
async def test_bad_names(system: ActorSystem, name: Any) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared as a whole
        await system.spawn(Puppet, name=name)
    assert str(caught.value) == f"spawn: name must be a non-empty string without '/', got {name!r}"
    with pytest.raises(ValueError, match="open_supervisor: name must be a non-empty string without '/'"):
        async with system.open_supervisor(name):
            pass
    with pytest.raises(ValueError, match="open_system: name must be a non-empty string without '/'"):
        async with open_system(name):
            pass


async def test_a_duplicate_name(system: ActorSystem, puppet: Ref[Puppet]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared as a whole
        await system.spawn(Puppet, name="puppet")
    assert str(caught.value) == "spawn: s has a child named 'puppet' already; choose another name"


@pytest.mark.parametrize("what", [int, "Puppet", None, Puppet.__init__])
async def test_spawn_refuses_other_classes(system: ActorSystem, what: Any) -> None:
    with pytest.raises(TypeError) as caught:
        await system.spawn(what)
    assert str(caught.value) == f"spawn: {what!r} is not a subclass of Actor"


async def test_an_actor_instead_of_its_class(system: ActorSystem) -> None:
    with pytest.raises(TypeError, match="is not a subclass of Actor"):
        await system.spawn(Puppet())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, 2, 3, 4), {}, "too many positional arguments"),
        ((), {"size": 3}, "there is no option 'size'; there are "),
        (([],), {"log": []}, "multiple values for argument 'log'"),
    ],
)
async def test_arguments_that_the_constructor_does_not_take(
    system: ActorSystem, args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError) as caught:
        await system.spawn(Puppet, *args, **kwargs)
    assert str(caught.value).startswith(f"spawn: Puppet: {text}")
    assert system.tree().children == ()


async def test_a_missing_argument(system: ActorSystem) -> None:
    class Greeter(Actor):
        def __init__(self, greeting: str) -> None: ...

    with pytest.raises(TypeError) as caught:
        await system.spawn(Greeter)  # type: ignore[call-arg]
    assert str(caught.value) == (
        "spawn: Greeter: missing a required argument: 'greeting'; it takes (greeting)"
    )


async def test_parameters_named_like_those_of_spawn_itself_can_be_given(system: ActorSystem) -> None:
    class Greeter(Actor):
        def __init__(self, actor_class: str, self_: int = 0) -> None:
            assert actor_class == "given"

    await system.spawn(Greeter, actor_class="given")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"restart": "permanent"}, "spawn: restart must be a Restart, got 'permanent'"),
        ({"restart": None}, "spawn: restart must be a Restart, got None"),
        ({"policy": Backoff()}, f"spawn: policy must be a Policy, got {Backoff()!r}"),
        ({"mailbox": 64}, "spawn: mailbox must be a MailboxOptions, got 64"),
    ],
)
async def test_bad_options_of_spawn(system: ActorSystem, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        await system.spawn(Puppet, **options)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "one_for_all"}, "open_supervisor: strategy must be a Strategy, got 'one_for_all'"),
        ({"strategy": None}, "open_supervisor: strategy must be a Strategy, got None"),
        ({"intensity": 3}, "open_supervisor: intensity must be an Intensity, got 3"),
    ],
)
async def test_bad_options_of_open_supervisor(
    system: ActorSystem, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError) as caught:
        async with system.open_supervisor("pool", **options):
            pass
    assert str(caught.value) == text
    assert system.tree().children == ()


async def test_bad_options_of_open_system() -> None:
    with pytest.raises(TypeError) as caught:
        async with open_system("s", options={"strategy": Strategy.ONE_FOR_ALL}):  # type: ignore[arg-type]
            pass
    assert str(caught.value).startswith("open_system: options must be a SystemOptions, got {'strategy'")


async def test_none_means_the_default(system: ActorSystem) -> None:
    ref = await system.spawn(Puppet, name=None, policy=None, mailbox=None, restart=Restart.PERMANENT)
    assert await ref.ask(Echo("a")) == "a"


async def test_a_told_act_without_a_function_crashes_only_its_actor(
    system: ActorSystem, puppet: Ref[Puppet]
) -> None:
    await puppet.tell(Run(3))  # type: ignore[arg-type]
    await trio.testing.wait_all_tasks_blocked()
    assert system.tree().find("s/puppet").last_error == "TypeError: 'int' object is not callable"

    async def act(actor: Puppet) -> int:
        return actor.context.restart.number

    assert await puppet.ask(Do(act)) == 1
