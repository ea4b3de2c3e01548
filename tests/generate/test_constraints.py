"""`examples/generate/constraints.py`: JSON by schemas, in a batch and under kills; and schemas that harm."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import attrs
import numpy as np
import pytest
import trio
from asked import AskedChat
from chosen import BACKEND
from constraints import LIMITS, OBJECT, ConstraintError, Grammars
from generation import Generation, Prompt, open_generation
from model import GREEDY, Sampling, Token, open_model
from random_schemas import check_answer, random_schema
from running import TINY
from schemas import count_joined
from text import Text, load_random
from tools import CallReader, Tool, grammar_of

import trio_accel as ta
from trio_accel.patterns import Submit, open_parts

pytestmark = pytest.mark.examples
for name in ("tokenizers", "jinja2", "llguidance"):
    pytest.importorskip(name, reason="pip install '.[generate]'")
pytest.importorskip("jsonschema")
if BACKEND != "cpu":
    pytest.skip("these programs compute on the CPU here", allow_module_level=True)

LOADED = load_random(attrs.evolve(TINY, context=1024), 3)
GRAMMARS = Grammars(LOADED)
OPTIONS = ta.DeviceOptions(
    isolation="process",
    retry=1,
    retry_suspects=True,
    intensity=ta.Intensity(1000, 60.0),
    backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
)
HOT = Sampling(temperature=1.2, top_p=0.98, seed=5)
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999_999}
FIXED = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 3, "maxLength": 9}, "count": NUMBER},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@asynccontextmanager
async def opened(
    system: ta.System, device: ta.Device, forward: str = "numpy", *, ahead: bool = False
) -> AsyncGenerator[Generation]:
    async with (
        open_model(device, LOADED.config, LOADED.weights, pages=1200, forward=forward) as model,
        open_generation(system, model, LOADED, sequences=16, ahead=ahead) as made,
    ):
        yield made


def prompt(schema: dict[str, Any] | None, seed: int = 0, most: int = 600) -> Prompt:
    grammar = None if schema is None else GRAMMARS.json(schema)
    sampling = attrs.evolve(HOT, seed=seed) if seed else GREEDY
    return Prompt(tokens=[5, 6, 7 + seed % 90], most=most, sampling=sampling, grammar=grammar)


async def texts(made: Generation, prompts: Sequence[Prompt]) -> list[str]:
    found = [""] * len(prompts)

    async def ask(number: int) -> None:
        tokens = await made.batcher.ask(Submit(prompts[number]))
        assert len(tokens) < prompts[number].most
        found[number] = LOADED.text.tokenizer.decode(list(tokens))

    async with trio.open_nursery() as nursery:
        for number in range(len(prompts)):
            nursery.start_soon(ask, number)
    return found


async def kill(device: ta.Device, operation: Any) -> None:
    """Kill the worker in a step, and again when it has a follower."""
    while True:
        generation = device.generation
        ta.testing.inject_fault(device, operation, kill=True)
        while device.generation == generation:  # noqa: ASYNC110  # a device has no event for it
            await trio.sleep(0.005)


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_answers_are_json_by_their_schemas_and_the_same_under_kills(
    system: ta.System, count: int
) -> None:
    rng = np.random.default_rng(7)
    schemas = [random_schema(rng) for _ in range(count)]
    prompts = [prompt(schema, seed) for seed, schema in enumerate(schemas)]
    async with system.open_device("cpu", options=OPTIONS) as device, opened(system, device) as made:
        calm = await texts(made, prompts)
        for text, schema in zip(calm, schemas, strict=True):
            check_answer(text, schema)
        assert len(set(calm)) > count // 2
        assert device.losses == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill, device, made.model.operation)
            assert await texts(made, prompts) == calm
            nursery.cancel_scope.cancel()
        assert device.losses >= count // 6
        assert made.pages.used == 0
        assert not made._constraints


@pytest.mark.parametrize("forward", ["numpy", "torch", "operations"])
async def test_masks_hold_in_a_mixed_batch(system: ta.System, device: ta.Device, forward: str) -> None:
    if forward == "torch":
        pytest.importorskip("torch")
    async with opened(system, device, forward) as made:
        free = await made.batcher.ask(Submit(prompt(None, most=30)))
        answers: list[str] = []

        async def ask(seed: int) -> None:
            answers.extend(await texts(made, [prompt(FIXED, seed)]))

        async with trio.open_nursery() as nursery:
            for seed in range(4):
                nursery.start_soon(ask, seed)
            assert await made.batcher.ask(Submit(prompt(None, most=30))) == free
        for answer in answers:
            check_answer(answer, FIXED)


async def test_steps_ahead_leave_constrained_sequences_out(
    system: ta.System, device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(FIXED, 1), prompt(None, 2, 60), prompt(FIXED, 3), prompt(None, 0, 40)]
    prompts[1:3] = [attrs.evolve(one, is_asked=True) for one in prompts[1:3]]
    aheads: list[tuple[bool, int]] = []

    async def parts(made: Generation) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]

        async def read(number: int) -> None:
            async with open_parts(made.batcher, prompts[number]) as stream:
                async for token in stream:
                    found[number].append(token)

        async with trio.open_nursery() as nursery:
            for number in range(len(prompts)):
                nursery.start_soon(read, number)
        return found

    async with opened(system, device) as made:
        expected = await parts(made)
    async with ta.open_system("ahead") as other, opened(other, device, ahead=True) as made:
        step, masks = made.model.forward, Generation._masks

        async def forward(batch: Any) -> Any:
            is_ahead = len(batch.rows) == 5 and bool((batch.rows[3] >= 0).any())
            aheads.append((batch.masks is not None, is_ahead))
            return await step(batch)

        def watched(generation: Generation, sequences: Any) -> Any:
            assert all(one.steps_ahead == 0 for one in sequences if one.item.grammar is not None)
            return masks(generation, sequences)

        made.model = attrs.evolve(made.model, forward=forward)
        monkeypatch.setattr(Generation, "_masks", watched)
        found = await parts(made)
        assert found == expected
        for number in (1, 2):
            for token, same in zip(found[number], expected[number], strict=True):
                assert isinstance(token, Token)
                assert isinstance(same, Token)
                np.testing.assert_allclose(token.likely.own, same.likely.own, atol=1e-5)
        # Only steps of free sequences are requested in advance.
        assert any(is_ahead and not is_masked for is_masked, is_ahead in aheads)


async def test_kills_of_steps_ahead_change_no_token(system: ta.System) -> None:
    prompts = [prompt(FIXED if seed % 2 else None, seed, 60 + seed % 2 * 500) for seed in range(1, 6)]

    async def answers(made: Generation) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}

        async def ask(number: int) -> None:
            found[number] = await made.batcher.ask(Submit(prompts[number]))

        async with trio.open_nursery() as nursery:
            for number in range(len(prompts)):
                nursery.start_soon(ask, number)
        return found

    async with (
        system.open_device("cpu", options=OPTIONS) as device,
        opened(system, device, ahead=True) as made,
    ):
        calm = await answers(made)
        fault = ta.testing.inject_fault(device, made.model.operation, kill=True, count=6)
        assert await answers(made) == calm
        assert (fault.hit, made.pages.used) == (6, 0)


async def test_a_grammar_that_cannot_go_on_ends_its_own_sequence(
    system: ta.System, device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(system, device) as made:
        masks = Generation._masks

        def broken(generation: Generation, sequences: Any) -> Any:
            for one in sequences:
                if one.item is bad and len(one.parts) == 2:
                    made._constraints[one]._matcher.consume_token(0)
            return masks(generation, sequences)

        monkeypatch.setattr(Generation, "_masks", broken)
        bad = prompt(FIXED, 9)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(texts, made, [prompt(FIXED, 1), prompt(FIXED, 2)])
            with pytest.raises(ConstraintError):
                await made.batcher.ask(Submit(bad))


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


def fields(count: int, **schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": schema for number in range(count)}}


def parts_of_text(count: int) -> list[dict[str, Any]]:
    """Schemas of texts: to compile them joined takes a time exponential in their number."""
    return [{"type": "string", "pattern": f".*{chr(97 + n)}.{{{n}}}"} for n in range(count)]


def chained(count: int, key: str) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for part in parts_of_text(count):
        made = {**part, key: [made]}
    return made


def by_references(count: int, *, joined: bool) -> dict[str, Any]:
    """References from one definition to the next, in a random order."""
    order = np.random.default_rng(0).permutation(count).tolist()
    own = parts_of_text(count) if joined else [{}] * count
    made = {f"{n}": {**own[n], "$ref": f"#/$defs/{n + 1}"} for n in order}
    return {"$defs": {**made, f"{count}": {"const": "x"}}, "$ref": "#/$defs/0"}


def crossed(parts: int, alternatives: int, count: int) -> dict[str, Any]:
    """A schema with all combinations of its alternatives."""
    each = {"anyOf": [fields(count, const=number) for number in range(alternatives)]}
    return {"allOf": [each] * parts}


def doubled(count: int, key: str) -> dict[str, Any]:
    """Definitions that each join two of the next."""
    made = {
        f"{n}": {key: [{"allOf": [{"$ref": f"#/$defs/{n + 1}"}, fields(1, type="null")]}] * 2}
        for n in range(count)
    }
    return {"$defs": {**made, f"{count}": fields(1, type="null")}, "$ref": "#/$defs/0"}


A, B = "#/$defs/a", "#/$defs/b"
MANY = "it makes more than 1000 schemas by joining"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "string", "pattern": "^a{100000}$"}, "too many"),
    ({"type": "string", "pattern": "^(a{1000}b{1000}){1000}$"}, "too many"),
    ({"type": "string", "pattern": "((("}, "regex parse error"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": "(a)\\1"}, "backreference"),
    ({"type": "integer", "multipleOf": 99991}, "multipleOf must be an integer up to 1000"),
    ({"type": "number", "multipleOf": 0.000001}, "multipleOf must be"),
    # This took 15 s.
    ({"allOf": [{"multipleOf": 991}, {"multipleOf": 983}]}, "joined multipleOf must be at most 1000"),
    (
        {**fields(300, **{"$ref": A}), "$defs": {"a": {"anyOf": [{"multipleOf": 2}] * 300}}},
        "multipleOf and more than 3000 alternatives",
    ),
    ({"type": "array", "items": {"const": "x" * 20}, "minItems": 10**9}, "Too many items"),
    ({"const": list(range(3000))}, "Too many items"),
    ({"const": "x" * 20_000}, "at most 16384 letters, got"),
    (fields(2000, type="integer"), "at most 16384 letters, got"),
    (fields(560, type="integer"), "Current row has"),
    (nested(65), "nested deeper than 64"),
    (nested(300), "nested deeper than 64"),
    (nested(5000), "nested deeper than 64"),
    ({"enum": [{} for _ in range(300_000)]}, "at most 16384 letters, got"),
    ({"$ref": "#"}, "it never ends"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "it never ends"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "it never ends"),
    ({"$defs": {"a": {"$ref": B}, "b": {"anyOf": [{"$ref": A}]}}, "$ref": A}, "it never ends"),
    ({"$ref": "#/$defs/x"}, "does not exist"),
    ({"$ref": "http://example.com/x.json"}, "not present"),
    ({"$ref": "file:///etc/passwd"}, "not present"),
    ({"not": {"type": "string"}}, "Unimplemented keys"),
    ({"type": "array", "uniqueItems": True}, "Unimplemented keys"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "Unimplemented keys"),
    ({"type": "strin"}, "Invalid type"),
    ({"type": "object", "properties": [1]}, "must be an object"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "Unsatisfiable"),
    (crossed(6, 9, 9), MANY),
    (crossed(6, 4, 2), MANY),
    (crossed(4, 4, 3), MANY),
    (crossed(12, 2, 1), MANY),
    ({"allOf": [fields(1, anyOf=[{"minimum": n} for n in range(4)]) for _ in range(9)]}, MANY),
    ({"allOf": [{"items": {"enum": [f"{n}" for n in range(99)]}} for _ in range(2)]}, MANY),
    ({"allOf": [fields(99, type="null"), {"additionalProperties": {"enum": ["x"] * 99}}]}, MANY),
    ({"allOf": [{"prefixItems": [{"anyOf": [{}, {}]}]}, *([{"items": {"anyOf": [{}, {}]}}] * 12)]}, MANY),
    ({**fields(99, type="integer"), "anyOf": [{"required": [f"p{n}"]} for n in range(99)]}, MANY),
    (doubled(20, "anyOf"), MANY),
    (doubled(20, "oneOf"), MANY),
    ({"anyOf": [{"allOf": [{"$ref": "#"}, fields(1)]}, {"type": "null"}]}, MANY),
    ({"allOf": [{"$ref": A}, {"$ref": B}], "$defs": {n: fields(1, **{"$ref": A}) for n in "ab"}}, MANY),
    ({"allOf": parts_of_text(20)}, "joins more than 6 patterns"),
    ({"allOf": [fields(1, **part) for part in parts_of_text(20)]}, "joins more than 6 patterns"),
    (chained(20, "allOf"), "joins more than 6 patterns"),
    (chained(20, "anyOf"), "joins more than 6 patterns"),
    (by_references(20, joined=True), "joins more than 6 patterns"),
    (
        {"type": "object", "patternProperties": {f"^{n:04}$": {"type": "integer"} for n in range(500)}},
        "at most 16 patternProperties, got 500",
    ),
    ({"const": "\ud800"}, "not JSON: .*surrogates"),
    (fields(1, type="string", description="\ud800"), "not JSON: .*surrogates"),
    ({"type": "number", "minimum": float("nan")}, "not JSON: Out of range"),
    ({"type": "number", "maximum": float("inf")}, "not JSON: Out of range"),
    ({"type": "integer", "minimum": 10**400}, "number out of range"),
    ({"$ref": "#" + "/a" * 8000}, "Pointer '/a/a"),
    ({"$ref": "#/allOf/" + "9" * 5000, "allOf": [{}]}, "Failed to parse array index"),
]


def counted(call: Callable[[], object]) -> int:
    """Return the number of functions called in a call, of Python and of C."""
    calls = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


# 0.02 s. The work of `llguidance` is not in them: it has the `LIMITS`.
MOST_CALLS = 150_000


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_schemas_that_cannot_be_used_are_refused_at_once(schema: dict[str, Any], says: str) -> None:
    def refused() -> None:
        with pytest.raises(ConstraintError, match=says):
            GRAMMARS.json(schema)

    assert counted(refused) < MOST_CALLS


@pytest.mark.parametrize("name", ["max_grammar_size", "initial_lexer_fuel"])
def test_llguidance_counts_its_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large = fields(300, type="integer", minimum=1)
    assert GRAMMARS.json(large)
    monkeypatch.setitem(LIMITS, name, LIMITS[name] // 100)
    with pytest.raises(ConstraintError, match=f"limit for this grammar: {LIMITS[name]}"):
        Grammars(LOADED).json(large)


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        (by_references(450, joined=False), 0),
        ({"anyOf": [*({"$ref": f"#/anyOf/{n}"} for n in range(1, 501)), {"type": "null"}]}, 0),
        # The text and each of its three parts.
        ({"allOf": parts_of_text(3), "type": "string", "minLength": 3}, 4),
        (fields(150, type="string", pattern="^[a-z]{2,9}$", maxLength=7), 0),
        # Names of fields that equal keys of schemas, and a hint next to a reference.
        (
            {
                **fields(1, **{"$ref": A, "title": "x"}),
                "$defs": {"a": fields(9, type="string", format="date")},
            },
            0,
        ),
        ({"type": "object", "properties": {"pattern": {"const": 1}, "allOf": {"const": 2}}}, 0),
        ({"enum": [f"x{n}" for n in range(1500)]}, 0),
        (fields(90, anyOf=[{"type": "integer"}, {"type": "null"}], title="x", default=None), 0),
        # A base class with optional fields, and one field more, for each of five kinds.
        (
            {
                "$defs": {"a": fields(20, anyOf=[{"type": "integer"}, {"type": "null"}])},
                "anyOf": [{"allOf": [{"$ref": A}, {"properties": {"kind": {"const": n}}}]} for n in range(5)],
            },
            5 * (4 + 20 + 40 + 1),
        ),
        (crossed(3, 3, 2), 1 + 3 + 27 + 27 * 3 + 27 * 2 * 3),
    ],
    ids=[str(number) for number in range(10)],
)
def test_large_schemas_are_compiled_and_their_parts_counted(schema: dict[str, Any], count: int) -> None:
    assert count_joined(schema) == count
    assert counted(lambda: GRAMMARS.json(schema)) < MOST_CALLS


def test_schemas_that_end_are_taken_and_kept() -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    for schema in (
        OBJECT,
        {**node, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"$defs": {"a": {"$ref": B}, "b": {"type": "null"}}, "$ref": A},
        {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1, "items": False},
        {"type": ["null", "object"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ):
        assert GRAMMARS.json(schema) is GRAMMARS.json(json.loads(json.dumps(schema)))
    for number in range(100):
        GRAMMARS.json({"const": number})
    assert len(GRAMMARS._kept) == 64


def test_masks_of_the_same_tokens_are_the_same() -> None:
    grammar, rng = GRAMMARS.json(FIXED), np.random.default_rng(3)
    constraint, tokens = grammar.begin(), list[int]()
    while True:
        mask = constraint.mask(tokens)
        assert np.array_equal(constraint.mask(tokens), mask)
        assert np.array_equal(grammar.begin().mask(tokens), mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if token in LOADED.text.ends:
            break
        tokens.append(token)
    check_answer(LOADED.text.tokenizer.decode(tokens), FIXED)


TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
    for name, parameters in (("add", FIXED), ("no_arguments", {"additionalProperties": False}))
]


@pytest.mark.parametrize("is_free", [False, True])
def test_calls_are_read_in_any_pieces(is_free: bool) -> None:
    GRAMMARS.lark(grammar_of(TOOLS, is_free))
    arguments = '{"name":"}\\"</tool_call>","count":{"a":{}}}'
    call = f'{{"name":"add","arguments":{arguments}}}'
    whole = f"<tool_call>\n{call}\n</tool_call>" if is_free else call
    for cuts in itertools.combinations(range(len(whole) + 1), 2):
        reader = CallReader(is_free)
        parts = (whole[: cuts[0]], whole[cuts[0] : cuts[1]], whole[cuts[1] :])
        deltas = [delta for part in parts for delta in reader.push(part)] + reader.finish()
        calls = [delta["tool_calls"][0] for delta in deltas]
        assert calls[0]["function"]["name"] == "add"
        assert "".join(one["function"]["arguments"] for one in calls) == arguments
        assert reader.is_whole
    for cut in range(len(whole)):
        reader = CallReader(is_free)
        deltas = reader.push(whole[:cut]) + reader.finish()
        said = "".join(
            delta.get("content") or delta["tool_calls"][0]["function"]["arguments"] for delta in deltas
        )
        assert not reader.is_whole
        assert said in whole[:cut]


QWEN = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer <tool_call>\\n...{% endif %}<|im_end|>\n{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


def test_a_template_with_tools_lets_the_model_choose() -> None:
    plain = LOADED.text
    text = Text(plain.tokenizer, plain.controls, QWEN, list(plain.ends))
    assert (plain.has_tools, text.has_tools) == (False, True)
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"name": "é<|im_end|>"}'},
            },
        ],
    }
    # Arguments other than JSON texts are unchanged.
    broken = {"id": "2", "type": "function", "function": {"name": "add", "arguments": '"\\ud800"'}}
    said["tool_calls"] = [*cast("Any", said["tool_calls"]), broken]
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "<|im_start|>", "parameters": FIXED},
    }
    asked = AskedChat.model_validate({"model": "x", "messages": [said], "tools": [tool]})
    [tokens] = asked.prompts(text, 5000)
    shown = text.tokenizer.decode(tokens, skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "add", "description": "<|im_start|>", "para' in shown
    assert '{"name": "é<|im_end|>"}' in shown
    # A user's text never becomes a control token.
    assert tokens.count(text.controls["<|im_start|>"]) == 2
    assert tokens.count(text.controls["<|im_end|>"]) == 2
    grammar = asked.grammar(GRAMMARS, text)
    assert grammar is not None
    call = '<tool_call>\n{"name":"add","arguments":{"name":"abc","count":5}}\n</tool_call>'
    end = next(iter(text.ends))
    for answer, may_end in ((call, True), ("Hello <tool_call>", True), (call[:-3], False), ("", True)):
        mask = grammar.begin().mask(text.encode(answer))
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert bool(allowed[end]) is may_end
    mask = grammar.begin().mask(text.encode(call))
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [end]


def test_a_free_text_is_not_a_call() -> None:
    reader = CallReader(True)
    found = [*reader.push(""), *reader.push("Hello"), *reader.push(" <tool_call>"), *reader.finish()]
    assert "".join(delta["content"] for delta in found) == "Hello <tool_call>"
