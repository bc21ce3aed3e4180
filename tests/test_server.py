"""The server: OpenAI's own client against it, hostile requests, limits, cancellation."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("openai", reason="the extra `test` is not installed")

import openai
from support.http_requests import NAME, Gate, Running, serving, until

from arbor import Solver
from arbor.model.loading import BUILTIN
from arbor.model.runner import ModelRunner
from arbor.server.schema import ChatRequest, CompletionRequest, Search, SolveRequest
from arbor.trace import Replay, read_trace

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SOLVE = "/v1/solve"
HANDS = ("4 5 6 10", "1 2 3 4", "3 3 8 8", "2 4 6 8")
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 4}'}}
LONG = {"model": NAME, "prompt": "4 5 6 10\n", "max_tokens": 400, "seed": 1, "stream": True}


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    """The built-in model, loaded once."""
    with Solver() as made:
        made.load()
        yield made


@pytest.fixture(scope="module")
def running(solver: Solver) -> Iterator[Running]:
    with serving(solver) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Any:
    with closing(running.client()) as found:
        yield found


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **fields}


# Plain decoding


def test_greedy_text_is_that_of_the_engine(solver: Solver, client: Any) -> None:
    expected = solver.generate("4 5 6 10\n", beams=1, max_tokens=24, chat=False)[0]

    made = client.completions.create(
        model=NAME, prompt="4 5 6 10\n", max_tokens=24, temperature=0, logprobs=0
    )

    choice = made.choices[0]
    assert choice.text == expected.text
    assert sum(choice.logprobs.token_logprobs) == pytest.approx(
        expected.score * len(expected.tokens), abs=1e-3
    )
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])
    assert made.usage.completion_tokens == 24 and choice.finish_reason == "length"


def likeliest(path: str, prompt: list[int], tokens: list[int], count: int) -> Any:
    """(logprob, id) of the most probable tokens after a prompt, by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    found = logits.log_softmax(-1).topk(count)
    return [
        list(zip(*row, strict=True))
        for row in zip(found.values.tolist(), found.indices.tolist(), strict=True)
    ]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "top_k": 3}])
def test_the_most_probable_tokens_are_transformers(
    solver: Solver, running: Running, client: Any, sampling: dict[str, Any]
) -> None:
    prompt = solver.tokenizer.encode("4 5 6 10\n")
    fields = {"max_tokens": 12, "seed": 2, **sampling}

    wrote = running.send(COMPLETIONS, {"prompt": prompt, "logprobs": 3, **fields})[2]
    (choice,) = wrote["choices"]
    asked = chat("4 5 6 10\n", logprobs=True, top_logprobs=20, max_tokens=12, seed=2)
    asked |= {"temperature": sampling["temperature"]}
    asked |= {"extra_body": {"top_k": sampling.get("top_k", 0)}}
    said = client.chat.completions.create(**asked)
    streamed = [
        each
        for chunk in client.chat.completions.create(**asked, stream=True)
        for one in chunk.choices
        for each in (one.logprobs.content if one.logprobs else [])
    ]

    by_text = {solver.tokenizer.decode([each]): each for each in range(len(solver.tokenizer))}
    tokens = [by_text[each] for each in choice["logprobs"]["tokens"]]
    expected = likeliest(BUILTIN["sapling"], prompt, tokens, 20)
    for mine, its, chosen in zip(
        choice["logprobs"]["top_logprobs"], expected, choice["logprobs"]["tokens"], strict=True
    ):
        right = {solver.tokenizer.decode([token]): logprob for logprob, token in its[:3]}
        assert {text: mine[text] for text in right} == pytest.approx(right, abs=1e-4)
        assert set(mine) == {*right, chosen}
    content = said.choices[0].logprobs.content
    assert [each.token for each in content] == choice["logprobs"]["tokens"]
    for each, its in zip(content, expected, strict=True):
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(
            [logprob for logprob, _ in its], abs=1e-4
        )
        assert {other.token for other in each.top_logprobs[:3]} == {
            solver.tokenizer.decode([token]) for _, token in its[:3]
        }
    assert [each.model_dump() for each in streamed] == [each.model_dump() for each in content]


def test_a_stream_is_the_whole_in_parts(client: Any) -> None:
    fields = chat("4 5 6 10", max_tokens=40, n=3, seed=5, stop=[")\n", "= 9"], logprobs=True)
    whole = client.chat.completions.create(**fields)
    texts, finish, tokens = {}, {}, {}
    usage = None

    for chunk in client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            finish[choice.index] = choice.finish_reason or finish.get(choice.index)
            read = choice.logprobs.content if choice.logprobs else []
            tokens.setdefault(choice.index, []).extend(each.token for each in read)

    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert finish == {choice.index: choice.finish_reason for choice in whole.choices}
    assert tokens == {
        choice.index: [each.token for each in choice.logprobs.content] for choice in whole.choices
    }
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert "stop" in finish.values()
    assert not any(stop in text for text in texts.values() for stop in (")\n", "= 9"))


def test_a_chat_template_writes_the_prompt(
    solver: Solver, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system at /x/y') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    monkeypatch.setattr(solver.tokenizer, "chat_template", template)
    fields = {"model": NAME, "max_tokens": 8, "temperature": 0}
    turns = [("user", "4 5"), ("assistant", "9"), ("user", "6 10")]
    messages = [{"role": role, "content": text} for role, text in turns]

    talked = client.chat.completions.create(messages=messages, **fields)
    ids = solver.tokenizer.encode(
        "<user>4 5<assistant>9<user>6 10<assistant>", add_special_tokens=False
    )
    written = client.completions.create(prompt=ids, **fields)

    assert talked.choices[0].message.content == written.choices[0].text
    assert talked.usage.prompt_tokens == len(ids)
    with pytest.raises(openai.BadRequestError, match=r"no system at \(path\)"):
        client.chat.completions.create(messages=[{"role": "system", "content": "x"}], **fields)


# Searches


def test_a_search_gives_what_the_solver_gives(solver: Solver, client: Any) -> None:
    expected = solver.solve(HANDS[0], seed=3)

    made = client.chat.completions.create(
        **chat(HANDS[0], seed=3, n=2), extra_body={"arbor": {"task": "game24"}}
    )

    assert made.choices[0].message.content == expected.text
    assert made.choices[0].arbor["answer"] == expected.answer == made.arbor["runs"][0]["answer"]
    assert len(made.choices) == min(2, len(expected.candidates))
    assert made.usage.completion_tokens == expected.metrics.tokens_generated


@pytest.mark.parametrize(
    ("search", "code"),
    [
        ({"controller": "os.path:join"}, "unknown_controller"),
        ({"controller": {"name": "support.http_requests:Gate"}}, "unknown_controller"),
        ({"task": "reasoning,template=/etc/passwd"}, "setting_not_allowed"),
        ({"task": "reasoning,grader=eval"}, "setting_type"),
        ({"verifier": "prm,model=/etc"}, "setting_not_allowed"),
        ({"verifier": "combined,parts=self"}, "setting_not_allowed"),
        ({"verifier": "cgee,verifier=os:system"}, "setting_not_allowed"),
        ({"controller": {"name": "tot", "beam": 10**7}}, "limit_exceeded"),
        ({"controller": {"name": "tot", "width": 999_999}}, "search_too_large"),
        ({"controller": {"name": "best-of-n", "samples": 10**5}}, "search_too_large"),
        ({"controller": {"samples": 2}}, "invalid_request"),
        ({"controller": "tot,beem=2"}, "unknown_setting"),
        ({"max_depth": 10**6}, "limit_exceeded"),
        ({"step_tokens": 10**6}, "limit_exceeded"),
        ({"max_expansions": 10**6}, "limit_exceeded"),
        ({"budget": "1tok"}, "budget_infeasible"),
        ({"budget": "much"}, "budget_range"),
        ({"budget": 0.25}, "budget_shared"),
        ({"policy": "lru"}, "invalid_request"),
        ({"first": "any"}, "invalid_request"),
    ],
)
def test_a_search_beyond_what_requests_may_ask_for_is_refused(
    running: Running, search: dict[str, Any], code: str
) -> None:
    status, _, document = running.send(CHAT, chat(HANDS[0], arbor=search))

    assert status == 400, document
    assert document["error"]["code"] == code, document
    assert "/" not in document["error"]["message"].replace("and/or", "")


# Problems, event by event


def events_in(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of server-sent events."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line)
        if "data" in lines:
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


def test_a_problem_is_solved_event_by_event(
    solver: Solver, running: Running, tmp_path: Path
) -> None:
    body = {"problem": HANDS[0], "seed": 3, "controller": "tot,beam=2", "max_expansions": 12}

    status, headers, document = running.send(SOLVE, body)
    whole = running.send(SOLVE, body | {"stream": False})[2]

    *events, (last, solution) = events_in(document["text"])
    assert (status, last) == (200, "solution")
    assert headers["content-type"].startswith("text/event-stream")
    assert [name for name, _ in events] == [data["e"] for _, data in events]
    path = tmp_path / "run.arbor.jsonl"
    path.write_text("".join(json.dumps(data) + "\n" for _, data in events), encoding="utf-8")
    replay = Replay.of(read_trace(path))
    assert replay.problems == [] and replay.ended
    assert solution["answer"] == whole["answer"] and solution["schema"] == "arbor.solution/1"
    assert solution["candidates"] == whole["candidates"] and solution["seed"] == 3


# Many at once


def test_eight_at_once_give_the_texts_of_one_at_a_time(running: Running, client: Any) -> None:
    fields = [
        chat(HANDS[number % 4], seed=number, max_tokens=24, n=1 + number % 2)
        | (
            {"extra_body": {"arbor": {"max_expansions": 12}}, "max_tokens": 200}
            if number % 4 == 3
            else {}
        )
        for number in range(8)
    ]

    def texts(given: dict[str, Any]) -> list[str]:
        made = client.chat.completions.create(**given)
        return [choice.message.content for choice in made.choices]

    alone = [texts(each) for each in fields]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(texts, fields))

    assert together == alone
    until(lambda: running.is_idle)


# Deadlines


# Clients that go away


@pytest.mark.parametrize("body", [LONG, {**LONG, "stream": False}], ids=["stream", "whole"])
def test_a_client_that_goes_away_gives_its_slots_back(
    solver: Solver, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    gate = Gate(monkeypatch)
    with serving(solver) as running:
        before = running.service.metrics.cancelled._value.get()
        connection = running.begin(COMPLETIONS, body)
        until(lambda: solver.engine.held_tokens > 10)
        gate.close()
        connection.close()
        until(lambda: not running.service.admitted)
        gate.open()
        until(lambda: running.is_idle)

        assert running.service.metrics.cancelled._value.get() == before + 1
        generated = running.service.metrics.tokens.labels("generated")._value.get()
        assert generated == 0  # it never came to its end


# Faults


def test_a_fault_of_the_engine_fails_its_request_only(
    solver: Solver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = ModelRunner.forward
    faults = [RuntimeError("broken at /home/someone/kernel.py")]

    def forward(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        if faults:
            raise faults.pop()
        return right(self, *args, **kwargs)

    with serving(solver) as running:
        expected = running.send(CHAT, chat("4 5 6 10", temperature=0, max_tokens=8))[2]
        monkeypatch.setattr(ModelRunner, "forward", forward)
        status, _, document = running.send(CHAT, chat("4 5 6 10", temperature=0, max_tokens=8))
        until(lambda: running.is_idle)
        again = running.send(CHAT, chat("4 5 6 10", temperature=0, max_tokens=8))[2]

        assert (status, document["error"]["type"]) == (500, "server_error")
        assert "someone" not in json.dumps(document)
        assert "broken at" in caplog.text
        assert again["choices"] == expected["choices"]
        until(lambda: running.is_idle)


# Hostile requests

DEEP = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b'{"prompt": "\xff\xfe"}', 400, "invalid_json"),
        (b'{"prompt": "\\ud800"}', 400, "invalid_json"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "invalid_request"),
        (b'{"prompt": "x", "temperature": 1e999}', 400, "invalid_request"),
        (DEEP, 400, "invalid_json"),
        (b"[]", 400, "invalid_request"),
        (b"null", 400, "invalid_request"),
        (b'"text"', 400, "invalid_request"),
        ({}, 400, "invalid_request"),
        ({"prompt": 5}, 400, "invalid_request"),
        ({"prompt": []}, 400, "invalid_request"),
        ({"prompt": [[]]}, 400, "invalid_request"),
        ({"prompt": ["x", 5]}, 400, "invalid_request"),
        ({"prompt": [-1]}, 400, "invalid_request"),
        ({"prompt": [10**6]}, 400, "invalid_token"),
        ({"prompt": ["x"] * 100}, 400, "limit_exceeded"),
        ({"prompt": "x", "n": 0}, 400, "invalid_request"),
        ({"prompt": "x", "n": True}, 400, "invalid_request"),
        ({"prompt": "x", "n": "2"}, 400, "invalid_request"),
        ({"prompt": "x", "n": 10**4}, 400, "limit_exceeded"),
        ({"prompt": "x", "n": 10**30}, 400, "invalid_request"),
        ({"prompt": "x", "max_tokens": 0}, 400, "invalid_request"),
        ({"prompt": "x" * 9000, "max_tokens": 1}, 400, "context_length_exceeded"),
        ({"prompt": "x", "temperature": -1}, 400, "invalid_request"),
        ({"prompt": "x", "temperature": 3}, 400, "invalid_request"),
        ({"prompt": "x", "top_p": -0.1}, 400, "invalid_request"),
        ({"prompt": "x", "seed": 10**40}, 400, "invalid_request"),
        ({"prompt": "x", "stop": [f"s{i}" for i in range(10**5)]}, 400, "limit_exceeded"),
        ({"prompt": "x", "stop": [""]}, 400, "invalid_request"),
        ({"prompt": "x", "stop": ["y" * 1000]}, 400, "invalid_request"),
        ({"prompt": "x", "stream": "yes"}, 400, "invalid_request"),
        ({"prompt": "x", "stream_options": {}}, 400, "invalid_request"),
        ({"prompt": "x", "logprobs": 21}, 400, "invalid_request"),
        ({"prompt": "x", "echo": True}, 400, "invalid_request"),
        ({"prompt": "x", "best_of": 4}, 400, "invalid_request"),
        ({"prompt": "x", "frequency_penalty": 1}, 400, "invalid_request"),
        ({"prompt": "x", "logit_bias": {"5": 100}}, 400, "invalid_request"),
        ({"prompt": "x", "beams": 4}, 400, "invalid_request"),
        ({"prompt": "x", "__class__": {"a": 1}}, 400, "invalid_request"),
        ({"prompt": "x", "y" * 10**5: {"a": 1}}, 400, "invalid_request"),
        ({"prompt": "x", "arbor": {"deadline": 5}}, 400, "invalid_request"),
        ({"prompt": "x", "arbor": {"timeout": -5}}, 400, "invalid_request"),
        ({"prompt": [1, 2], "arbor": {"task": "game24"}}, 400, "invalid_request"),
        ({"prompt": "x", "user": "y" * 2**20}, 413, "body_too_large"),
    ],
    ids=lambda each: str(each)[:40] if not isinstance(each, int) else "",
)
def test_a_hostile_body_is_refused_with_a_reason(
    running: Running, body: Any, status: int, code: str
) -> None:
    found, _, document = running.send(COMPLETIONS, body)

    assert (found, document["error"]["code"]) == (status, code), document
    error = document["error"]
    assert error["type"] == "invalid_request_error" and 10 < len(error["message"]) <= 600
    assert len(error["param"] or "") <= 120
    assert running.is_idle


# JSON


def test_a_chat_in_json_follows_its_schema(smollm2: Path) -> None:
    pytest.importorskip("xgrammar", reason="the extra `structured` is not installed")
    schema = {
        "type": "object",
        "properties": {"b": {"enum": ["yes", "no"]}, "a": {"type": "integer", "maximum": 9}},
        "required": ["b", "a"],
        "additionalProperties": False,
    }
    forms: list[dict[str, Any]] = [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        {"type": "json_object"},
    ]
    with Solver(str(smollm2), task="reasoning") as solver:
        solver.load()
        with serving(solver) as running, closing(running.client()) as client:
            fields = chat("Is 2 even? Answer in JSON.", max_tokens=48, temperature=0)
            fields |= {"logprobs": True, "top_logprobs": 20}
            strict, free = (
                client.chat.completions.create(**fields, response_format=form) for form in forms
            )
            chunks = client.chat.completions.create(**fields, response_format=forms[0], stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            forms[0]["json_schema"]["schema"] = {"type": "wizard"}
            with pytest.raises(openai.BadRequestError, match=r"response_format: .* \"wizard\""):
                client.chat.completions.create(**fields, response_format=forms[0])

    assert strict.choices[0].finish_reason == "stop"
    for each in strict.choices[0].logprobs.content:
        assert each.top_logprobs[0].logprob == each.logprob <= 0, "of what may come"
        assert sum(math.exp(other.logprob) for other in each.top_logprobs) < 1 + 1e-5
    found = json.loads(strict.choices[0].message.content)
    assert list(found) == ["b", "a"] and found["b"] in ("yes", "no") and found["a"] <= 9
    assert streamed == strict.choices[0].message.content
    assert free.choices[0].message.content.startswith("{")
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)


# Tools

WITH_TOOLS = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_chat_template_gets_tools_and_calls(
    solver: Solver, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solver.tokenizer, "chat_template", WITH_TOOLS)
    fields = {"model": NAME, "max_tokens": 8, "temperature": 0}
    messages = [
        {"role": "user", "content": "4 5"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
    ]
    offered = '[{"type": "function", "function": {"name": "add"}}]'
    turns = (
        '<user>4 5<assistant><tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>'
        "<tool>9<assistant>"
    )

    for choice, written in (("auto", offered + turns), ("none", turns)):
        ids = solver.tokenizer.encode(written, add_special_tokens=False)
        talked = client.chat.completions.create(
            messages=messages, tools=[TOOL], tool_choice=choice, **fields
        )
        expected = client.completions.create(prompt=ids, **fields)
        assert talked.choices[0].message.content == expected.choices[0].text
        assert talked.usage.prompt_tokens == len(ids)


# Keys

# The server itself


def test_metrics_count_what_was_done(solver: Solver) -> None:
    with serving(solver) as running:
        running.send(CHAT, chat("4 5 6 10", max_tokens=6, temperature=0, stream=True))
        running.send(CHAT, {})
        text = running.send("/metrics")[2]["text"]

    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines[f'arbor_requests_total{{endpoint="{CHAT}",status="200"}}']) == 1
    assert float(lines[f'arbor_requests_total{{endpoint="{CHAT}",status="400"}}']) == 1
    assert float(lines['arbor_tokens_total{kind="generated"}']) == 6
    assert float(lines["arbor_kv_slots"]) == 16_384
    assert float(lines["arbor_searches_running"]) == 0
    assert float(lines["arbor_time_to_first_token_seconds_count"]) == 1


# Many requests of strangers

# of the slow test; ARBOR_FUZZ_REQUESTS=10000 sends as many
REQUESTS = int(os.environ.get("ARBOR_FUZZ_REQUESTS", "1000"))


def mutant(random: Random) -> bytes:
    """A body that is almost right, of any endpoint."""
    values: list[Any] = [None, True, -1, 0, 1, 2, 0.5, 1e308, 10**20, "", "x", "4 5 6 10", [], {}]
    values += [["x"], [1, 2], [[1]], {"name": "tot"}, "tot,beam=2", "\x00", "\u202e", "é" * 50]
    body: dict[str, Any] = {"prompt": "4 5 6 10", "max_tokens": random.choice([1, 3])}
    kind = random.choice(("prompt", "messages", "problem"))
    if kind != "prompt":
        text = body.pop("prompt")
        body[kind] = text if kind == "problem" else [{"role": "user", "content": text}]
    if kind == "problem":
        body["max_expansions"] = 1
    fields = [
        *{*ChatRequest.model_fields, *CompletionRequest.model_fields, *SolveRequest.model_fields},
        "unknown",
    ]
    for _ in range(random.randrange(3)):
        body[random.choice(fields)] = random.choice(values)
    if random.random() < 0.3:
        search = {random.choice(list(Search.model_fields)): random.choice(values)}
        body["arbor"] = {"max_expansions": 1, **search}
    text = json.dumps(body).encode()
    if random.random() < 0.2:
        at = random.randrange(len(text))
        text = text[:at] + bytes([random.randrange(256)]) + text[at + random.randrange(3) :]
    return text


@pytest.mark.slow
def test_no_body_is_a_fault_and_none_leaves_anything_behind(solver: Solver) -> None:
    random = Random(1)
    statuses = Counter()
    with serving(solver, max_tokens=64) as running:
        for number in range(REQUESTS):
            body = mutant(random)
            path = SOLVE if b"problem" in body else (CHAT, COMPLETIONS)[b"prompt" in body]
            if number % 10 == 9:  # a client that goes away at any moment
                where = running.url.removeprefix("http://").split(":")
                with socket.create_connection((where[0], int(where[1]))) as connection:
                    head = f"POST {path} HTTP/1.1\r\nhost: {where[0]}\r\ncontent-type: application/json\r\n"
                    whole = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
                    connection.sendall(whole[: random.randrange(1, len(whole) + 1)])
                    time.sleep(random.random() * 0.02)
                continue
            status, _, document = running.send(path, body)
            statuses[status] += 1
            assert status == 200 or 400 <= status < 500, (status, body, document)
            assert "event: error" not in document.get("text", ""), (body, document)
            if status != 200:
                assert document["error"]["message"], document
        until(lambda: running.is_idle)
        assert running.send(CHAT, chat("x", max_tokens=2))[0] == 200
    assert min(statuses[200], statuses[400]) > REQUESTS / 30, statuses
