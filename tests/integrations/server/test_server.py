"""The server: OpenAI's own client against it, hostile requests, limits, cancellation."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("openai", reason="the extra `test` is not installed")

import openai
from http_requests import NAME, Gate, Running, serving, until
from pydantic import ValidationError
from support.models import sapling_with_token

from arbor import Solver
from arbor.errors import InputError, UsageError
from arbor.events import Boundary, Event
from arbor.integrations.server.refusals import refusal_of, without_paths
from arbor.integrations.server.responses import PublicRecords
from arbor.integrations.server.schema import (
    ChatRequest,
    CompletionRequest,
    SearchFields,
    SolveRequest,
)
from arbor.integrations.server.search_changes import _free_settings
from arbor.integrations.server.settings import read_keys, served_name
from arbor.model.loading import BUILTIN
from arbor.model.runner import ModelRunner
from arbor.run import allowance
from arbor.run.conversation import conversation_tokens
from arbor.run.limits import RunLimits
from arbor.run.settings import Settings
from arbor.run.worker import default_tokens
from arbor.support.setting import settings_of
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


def test_token_ids_are_a_prompt(solver: Solver, client: Any) -> None:
    fields = {"model": NAME, "max_tokens": 8, "temperature": 0}
    ids = solver.tokenizer.encode("4 5 6 10\n")

    by_text, by_ids = (
        client.completions.create(prompt=prompt, **fields) for prompt in ("4 5 6 10\n", ids)
    )
    together = client.completions.create(prompt=["1 2 3 4\n", "4 5 6 10\n"], **fields)

    assert by_ids.choices[0].text == by_text.choices[0].text == together.choices[1].text
    assert [choice.index for choice in together.choices] == [0, 1]
    assert together.usage.prompt_tokens > by_ids.usage.prompt_tokens == len(ids)


def test_a_stream_is_the_whole_in_parts(client: Any) -> None:
    fields = chat("4 5 6 10", max_tokens=40, n=3, seed=5, stop=[")\n", "= 9"], logprobs=True)
    whole = client.chat.completions.create(**fields)
    texts, finish, tokens = {}, {}, {}
    usages = []

    for chunk in client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        assert "usage" in chunk.model_fields_set
        usages.append(chunk.usage)
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
    *before, usage = usages
    assert before == [None] * len(before), "null but in the last chunk"
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert "stop" in finish.values()
    assert not any(stop in text for text in texts.values() for stop in (")\n", "= 9"))


def test_the_smallest_part_of_the_most_probable_token(client: Any) -> None:
    fields = {"model": NAME, "prompt": "4 5 6 10\n", "max_tokens": 24, "seed": 3}

    greedy, free, cut = (
        client.completions.create(**fields, temperature=temperature, extra_body={"min_p": least})
        for temperature, least in ((0, 0), (2, 0), (2, 1))
    )

    assert cut.choices[0].text == greedy.choices[0].text != free.choices[0].text


def test_the_seed_decides_and_is_reported(client: Any) -> None:
    fields = chat("4 5 6 10", max_tokens=24, temperature=1)

    free = client.chat.completions.create(**fields)
    again = client.chat.completions.create(**fields, seed=free.arbor["seed"])
    other = client.chat.completions.create(**fields, seed=free.arbor["seed"] + 1)

    assert again.choices[0].message.content == free.choices[0].message.content
    below = client.chat.completions.create(**fields, seed=-1)
    assert below.arbor["seed"] == 2**63 - 1
    assert other.choices[0].message.content != free.choices[0].message.content


def test_a_stream_names_its_seed_where_each_choice_ends(client: Any) -> None:
    fields = chat("4 5 6 10", max_tokens=24, temperature=1, n=2)

    chunks = list(client.chat.completions.create(**fields, stream=True))

    ends = [chunk for chunk in chunks if chunk.choices[0].finish_reason is not None]
    (seed,) = {chunk.arbor["seed"] for chunk in ends}
    again = client.chat.completions.create(**fields, seed=seed)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == 0)
    assert len(ends) == 2 and again.choices[0].message.content == text


def test_a_prompt_that_was_read_before_is_reused(client: Any) -> None:
    prompt = "7 8 9 10\n" * 20

    first, second = (
        client.completions.create(model=NAME, prompt=prompt, max_tokens=4) for _ in range(2)
    )

    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert cached >= second.usage.prompt_tokens - 1 > 32


def test_the_next_turn_reuses_what_was_generated(client: Any) -> None:
    prompt, fields = "7 8 9 10\n" * 10, {"model": NAME, "max_tokens": 24, "temperature": 0}

    first = client.completions.create(prompt=prompt, **fields)
    second = client.completions.create(prompt=f"{prompt}{first.choices[0].text} 4 5", **fields)

    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 2 > first.usage.prompt_tokens


def test_roles_without_a_template_are_their_contents(client: Any) -> None:
    fields = {"model": NAME, "max_tokens": 8, "temperature": 0}
    parts = [{"type": "text", "text": "4 5 "}, {"type": "text", "text": "6 10"}]
    messages = [{"role": "system", "content": "1 2"}, {"role": "user", "content": parts}]

    talked = client.chat.completions.create(messages=messages, **fields)
    written = client.completions.create(prompt="1 2\n\n4 5 6 10", **fields)

    assert talked.choices[0].message.content == written.choices[0].text


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


def test_the_model_is_listed(client: Any) -> None:
    assert [each.id for each in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "arbor"
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.chat.completions.create(**chat("x") | {"model": "gpt-4o"})
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.models.retrieve("gpt-4o")


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


def test_a_choice_of_a_search_ends_as_its_path(client: Any) -> None:
    def ends(**search: Any) -> tuple[Any, list[str]]:
        made = client.chat.completions.create(
            **chat(HANDS[0], seed=1, n=8), extra_body={"arbor": search}
        )
        return made.arbor["runs"][0], [choice.finish_reason for choice in made.choices]

    run, reasons = ends(controller="best-of-n,samples=8", path_tokens=34)
    assert (run["status"], reasons[0], {*reasons}) == ("solved", "stop", {"stop", "length"})
    run, reasons = ends(controller="tot", max_expansions=9)
    assert (run["limit"], {*reasons}) == ("max_expansions", {"stop"})
    run, reasons = ends(controller="tot", max_expansions=1)
    assert (run["answer"], reasons) == (None, ["length"])


def test_a_search_is_as_large_as_its_expansions_allow(client: Any) -> None:
    wide = {"name": "tot", "beam": 50, "width": 50}

    def found(**search: Any) -> Any:
        return client.chat.completions.create(**chat(HANDS[0]), extra_body={"arbor": search})

    assert found(controller=wide, max_expansions=2).usage.arbor["nodes"] <= 1 + 2 * 50
    with pytest.raises(openai.BadRequestError, match="may open 5,050 blocks") as refused:
        found(controller=wide)
    assert refused.value.code == "search_too_large"
    says = "Give max_expansions=81, or a smaller max_depth or beam or width."
    assert str(refused.value.body["message"]).endswith(says)  # type: ignore[index]


def test_the_settings_of_a_search_are_used(client: Any) -> None:
    search = {"controller": {"name": "chain", "samples": 3}, "verifier": "exact", "max_depth": 3}

    made = client.chat.completions.create(**chat(HANDS[0], n=3), extra_body={"arbor": search})

    assert made.usage.arbor["nodes"] <= 1 + 3 * 3
    assert made.usage.prompt_tokens > 0


def test_a_search_streams_its_answer_at_the_end(client: Any) -> None:
    fields = chat(HANDS[0], seed=3)
    search = {"arbor": {"controller": "tot,beam=2", "max_expansions": 20}}
    whole = client.chat.completions.create(**fields, extra_body=search)

    chunks = list(client.chat.completions.create(**fields, extra_body=search, stream=True))

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].choices[0].arbor["answer"] == whole.choices[0].arbor["answer"]


def test_every_choice_of_a_streamed_search_begins_with_its_role(client: Any) -> None:
    search = {"arbor": {"controller": "chain,samples=3", "verifier": "exact"}}

    chunks = client.chat.completions.create(
        **chat(HANDS[0], seed=3, n=3), extra_body=search, stream=True
    )

    roles: dict[int, list[str | None]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            roles.setdefault(choice.index, []).append(choice.delta.role)
    assert len(roles) == 3
    assert all(found[0] == "assistant" and set(found[1:]) <= {None} for found in roles.values())


def test_a_request_takes_every_setting_declared_for_it_within_its_bounds() -> None:
    declared = {**settings_of(Settings), **settings_of(RunLimits)}
    requested = {name: each for name, each in declared.items() if each.about.requested}

    assert {*SearchFields.model_fields} == {*requested} >= {"max_depth", "first", "timeout"}
    for name, each in requested.items():
        if each.types in ((int,), (float,)):
            assert each.about.least is not None
            with pytest.raises(ValidationError, match="greater than"):
                SearchFields.model_validate({name: each.about.least - 1})


@pytest.mark.parametrize(
    ("search", "code"),
    [
        ({"controller": "os.path:join"}, "unknown_controller"),
        ({"controller": {"name": "http_requests:Gate"}}, "unknown_controller"),
        ({"task": "reasoning,template=/etc/passwd"}, "setting_not_allowed"),
        ({"task": "reasoning,grader=eval"}, "setting_type"),
        ({"verifier": "prm,model=/etc"}, "setting_not_allowed"),
        ({"verifier": "combined,parts=self"}, "setting_not_allowed"),
        ({"controller": {"name": "tot", "beam": 10**7}}, "limit_exceeded"),
        ({"controller": {"name": "tot", "width": 99_999}}, "search_too_large"),
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": ["x"], "arbor": {}}, "takes no stop"),
        ({"logprobs": True, "arbor": {}}, "takes no logprobs"),
        ({"messages": [{"role": "system", "content": "x"}], "arbor": {}}, "one user message"),
        (
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": HANDS[0]},
                ],
                "arbor": {},
            },
            "takes no system message",
        ),
        ({"messages": [{"role": "user", "content": "4 5 6"}], "arbor": {}}, "four"),
    ],
)
def test_what_a_search_cannot_read_is_refused(
    running: Running, fields: dict[str, Any], words: str
) -> None:
    status, _, document = running.send(CHAT, chat(HANDS[0]) | fields)

    assert status == 400 and words in document["error"]["message"], document


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


def test_tokens_come_where_they_are_asked_for(running: Running) -> None:
    body = {"problem": HANDS[0], "seed": 3, "max_expansions": 2, "trace_level": "tokens"}

    names = [name for name, _ in events_in(running.send(SOLVE, body)[2]["text"])]

    assert names.count("sample") > 10


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_request"),
        ({"problem": ""}, "invalid_request"),
        ({"problem": "4 5 6"}, "problem_invalid"),
        ({"problem": HANDS[0], "expected": "24"}, "invalid_request"),
        ({"problem": HANDS[0], "controller": "os:system"}, "unknown_controller"),
        ({"problem": HANDS[0], "trace": "/tmp/x"}, "invalid_request"),
    ],
)
def test_a_problem_that_cannot_be_searched_is_refused(
    running: Running, body: dict[str, Any], code: str
) -> None:
    status, _, document = running.send(SOLVE, body)

    assert (status, document["error"]["code"]) == (400, code), document


def test_events_name_no_path_of_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / "secret"
    folder.symlink_to(BUILTIN["sapling"], target_is_directory=True)
    body = {"problem": HANDS[0], "max_expansions": 1}
    with Solver(folder) as solver, serving(solver) as running:
        streamed = running.send(SOLVE, body)[2]["text"]
        whole = running.send(SOLVE, body | {"stream": False})[2]

    assert str(tmp_path) not in streamed + json.dumps(whole)
    assert whole["config"]["model"] == NAME
    records = PublicRecords("model", NAME)
    assert records._public({"a": ["/x/y", "C:\\x", "a/b", 5]}) == {
        "a": ["(path)", "(path)", "a/b", 5]
    }


@pytest.mark.slow
def test_searches_share_the_ratio_of_the_server(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [solver.solve(hand, seed=3) for hand in HANDS]
    held: list[tuple[int, int, int]] = []
    right = ModelRunner.forward
    with Solver(budget=0.25) as tight:
        tight.load()

        def forward(runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
            state = tight.engine.state
            account = state.account(next(iter(state.trees)))
            held.append((account.used, account.slots, len(state.trees)))
            return right(runner, *args, **kwargs)

        monkeypatch.setattr(ModelRunner, "forward", forward)
        with serving(tight, None) as running, ThreadPoolExecutor(len(HANDS)) as clients:
            bodies = [chat(hand, seed=3, arbor={"task": "game24"}) for hand in HANDS]
            bodies[0]["arbor"]["budget"] = 0.25
            made = list(clients.map(lambda body: running.send(CHAT, body)[2], bodies))
            refused = running.send(CHAT, chat(HANDS[0], arbor={"budget": "0.5"}))
            slots = re.search(r"^arbor_kv_slots (.*)$", running.send("/metrics")[2]["text"], re.M)

    assert [each["choices"][0]["message"]["content"] for each in made] == [
        solution.text for solution in alone
    ]
    assert max(trees for _, _, trees in held) == len(HANDS)
    assert all(used <= slots for used, slots, _ in held)
    full = sum(solution.metrics.peak_tokens for solution in alone)
    assert max(used for used, _, _ in held) < 0.4 * full
    assert sum(each["usage"]["arbor"]["tokens_recomputed"] for each in made) > 0
    assert refused[0] == 400 and refused[2]["error"]["code"] == "budget_shared"
    assert "Give 0.25, or leave it out." in refused[2]["error"]["message"]
    assert slots is not None and float(slots[1]) >= max(used for used, _, _ in held)


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


def test_too_many_requests_are_refused_with_the_time_to_wait(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with serving(solver, concurrency=1, queue=1) as running, running.client() as client:
        gate.close()
        held = [running.begin(COMPLETIONS, LONG) for _ in range(2)]
        until(lambda: running.service.admitted == 2)

        status, headers, document = running.send(CHAT, chat("x"))
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**chat("x"))

        assert (status, document["error"]["code"]) == (429, "queue_full")
        assert int(headers["retry-after"]) >= 1
        gate.open()
        for each in held:
            each.close()
        until(lambda: running.is_idle)
        assert running.send(CHAT, chat("x", max_tokens=2))[0] == 200


# Deadlines


def test_a_deadline_in_the_middle_gives_what_there_is(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with serving(solver) as running, running.client() as client:
        stream = client.completions.create(**LONG, extra_body={"arbor": {"timeout": 0.5}})
        first = next(iter(stream))
        gate.close()
        threading.Timer(0.6, gate.open).start()
        rest = list(stream)

    text = "".join(chunk.choices[0].text for chunk in [first, *rest] if chunk.choices)
    assert rest[-1].choices[0].finish_reason == "length"
    assert 0 < len(text) < 400


@pytest.mark.parametrize("of_the_server", [False, True])
def test_a_deadline_leaves_the_time_to_end_a_path(
    of_the_server: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thought takes a second here: a first level up to twenty, the next one up to fifty."""
    thoughts = [0]

    def listen(event: Event) -> None:
        thoughts[0] += isinstance(event, Boundary)

    def now() -> float:
        return time.monotonic() + thoughts[0]

    monkeypatch.setattr(allowance, "time", SimpleNamespace(monotonic=now))
    limit, given = {"timeout": 44.0}, {"problem": HANDS[0], "seed": 0, "stream": False}
    of_server, of_request = (limit, {}) if of_the_server else ({}, limit)
    with (
        Solver(verifier="self", listeners=[listen]) as judging,
        serving(judging, **of_server) as running,
    ):
        found = running.send(SOLVE, given | of_request)[2]

    assert (found["finish_reason"], found["limit"]) == ("timeout", "timeout")
    assert found["config"]["timeout"] == 44
    assert len(found["path"]) == 1 + 3, "a whole path, right or wrong"


def test_plain_decoding_names_the_deadline_that_ended_it(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with serving(solver) as running:
        gate.close()
        threading.Timer(0.2, gate.open).start()
        fields = LONG | {"stream": False, "n": 3, "arbor": {"timeout": 0.1}}
        found = running.send(COMPLETIONS, fields)[2]

    assert found["arbor"]["runs"] == [{"status": "timeout", "limit": "timeout"}]
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length"] * 3


def test_a_deadline_before_its_turn_is_an_error(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with serving(solver, concurrency=1) as running:
        gate.close()
        held = running.begin(COMPLETIONS, LONG)
        until(lambda: running.service.engine.running)

        status, headers, document = running.send(CHAT, chat("x", arbor={"timeout": 0.05}))

        assert (status, document["error"]["code"]) == (503, "deadline")
        assert int(headers["retry-after"]) >= 1
        gate.open()
        held.close()
        until(lambda: running.is_idle)


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

        until(lambda: running.service.metrics.cancelled._value.get() == before + 1)
        label = running.service.metrics.requests.labels(COMPLETIONS, "499")
        assert label._value.get() == 1
        tokens = running.service.metrics.tokens
        assert tokens.labels("generated")._value.get() > 0
        assert tokens.labels("prompt")._value.get() + tokens.labels("reused")._value.get() > 0


def test_a_client_that_breaks_off_its_body_counts_as_gone(solver: Solver) -> None:
    with serving(solver) as running:
        with closing(running.connect()) as connection:
            connection.putrequest("POST", CHAT)
            connection.putheader("content-type", "application/json")
            connection.putheader("content-length", "100")
            connection.endheaders(b'{"messages": [')
        metrics = running.service.metrics

        until(lambda: metrics.cancelled._value.get() == 1)
        assert metrics.requests.labels(CHAT, "499")._value.get() == 1
        assert metrics.requests.labels(CHAT, "400")._value.get() == 0


def test_a_client_that_goes_away_leaves_the_others_alone(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    fields = {"model": NAME, "prompt": "4 5 6 10\n", "max_tokens": 60, "temperature": 0}
    with serving(solver) as running, running.client() as client:
        alone = client.completions.create(**fields).choices[0].text
        gate.close()
        going = [running.begin(COMPLETIONS, LONG) for _ in range(3)]
        until(lambda: running.service.admitted == 3)
        with ThreadPoolExecutor(1) as pool:
            staying = pool.submit(client.completions.create, **fields)
            until(lambda: running.service.admitted == 4)
            for each in going:
                each.close()
            until(lambda: running.service.admitted == 1)
            gate.open()
            assert staying.result().choices[0].text == alone
        until(lambda: running.is_idle)


def test_a_client_that_goes_away_in_the_queue_is_never_searched(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with serving(solver, concurrency=1) as running:
        gate.close()
        held = running.begin(COMPLETIONS, LONG)
        until(lambda: running.service.engine.running)
        waiting = running.begin(CHAT, chat("4 5 6 10"))
        until(lambda: running.service.engine.waiting == 1)
        waiting.close()
        until(lambda: running.service.engine.waiting == 0)

        assert running.service.engine.running == 1
        held.close()
        gate.open()
        until(lambda: running.is_idle)


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


def test_a_fault_in_a_stream_is_its_last_event(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ModelRunner.forward
    left = [20]

    def forward(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("broken")
        return right(self, *args, **kwargs)

    with serving(solver) as running, running.client() as client:
        monkeypatch.setattr(ModelRunner, "forward", forward)
        stream = client.completions.create(**LONG)
        with pytest.raises(openai.APIError, match="others go on"):
            list(stream)
        until(lambda: running.is_idle)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no file /home/me/models/x.json here", "no file (path) here"),
        (r"no file C:\models\x", "no file (path)"),
        ("see docs/errors.md, 4 / 2 and https://example.org/a/b", None),
    ],
)
def test_messages_name_no_path_of_the_machine(text: str, shown: str | None) -> None:
    assert without_paths(text) == (text if shown is None else shown)


def test_a_refused_request_is_told_fields_instead_of_options() -> None:
    error = InputError("problem-too-long", "94 tokens - too many.", "Use --path-tokens 1339.")

    assert refusal_of(error).message == "94 tokens - too many. Use path_tokens 1339."


def test_an_unknown_error_says_nothing_of_its_cause() -> None:
    refusal = refusal_of(OSError(2, "No such file", "/secret"))

    assert refusal.status == 500 and "secret" not in refusal.message


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
        ({"prompt": "x", "seed": 2**63}, 400, "invalid_request"),
        ({"prompt": "x", "seed": -(2**63) - 1}, 400, "invalid_request"),
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


def test_a_token_that_the_weights_lack_ends_no_other_request(tmp_path: Path) -> None:
    folder = sapling_with_token(tmp_path / "model", "<more>")
    with Solver(model=folder) as solver, serving(solver) as running:
        search = {"arbor": {"task": "reasoning", "max_depth": 2}}
        bodies = [
            (COMPLETIONS, {"prompt": "4 5 <more> 10", "max_tokens": 4}),
            (COMPLETIONS, {"prompt": [1, 640], "max_tokens": 4}),
            (CHAT, {"messages": [{"role": "user", "content": "a <more>"}]}),
            (CHAT, {"messages": [{"role": "user", "content": "a <more>"}], **search}),
        ]
        with closing(running.begin(COMPLETIONS, LONG)) as other:
            refused = [running.send(path, {"model": NAME, **body}) for path, body in bodies]
            text = b"".join(iter(lambda: other.recv(4096), b""))

    assert [(status, error["error"]["code"]) for status, _, error in refused] == [
        (400, "invalid_token")
    ] * len(bodies)
    assert b"[DONE]" in text and b"error" not in text


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "user", "content": "x"}] * 2000},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "grammar"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object"}, "arbor": {"task": "game24"}},
        {"tools": [TOOL], "arbor": {"task": "game24"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
        {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "x"}}]}]},
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]},
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"top_logprobs": 3},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": True, "logprobs": True},
        {"modalities": ["audio"]},
    ],
    ids=lambda fields: str(fields)[:50],
)
def test_a_chat_that_is_not_supported_is_refused(running: Running, fields: dict[str, Any]) -> None:
    status, _, document = running.send(CHAT, chat("x") | fields)

    assert status == 400, document
    assert document["error"]["type"] == "invalid_request_error"


NEUTRAL: dict[str, Any] = {
    **{"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0},
    **{"logit_bias": {}, "n": 1, "top_k": -1, "stop": [], "ignore_eos": False, "min_tokens": 0},
    **{"extra_body": {}, "user": "me", "metadata": {"a": "b"}, "store": False},
    **{"service_tier": "auto", "safety_identifier": "me", "prompt_cache_key": "mine"},
}
OF_A_CHAT: dict[str, Any] = {
    **{"tools": [], "tool_choice": "none", "functions": [], "response_format": {"type": "text"}},
    **{"top_logprobs": 0, "logprobs": False, "modalities": ["text"]},
    **{"parallel_tool_calls": True, "audio": None},
    **{"add_generation_prompt": True, "continue_final_message": False},
}


def test_values_that_change_nothing_are_accepted(running: Running) -> None:
    plain = {"max_tokens": 4, "seed": 3}
    said, wrote = running.send(CHAT, chat("x", **plain)), {"prompt": "x", **plain}
    written = running.send(COMPLETIONS, wrote)

    with_all = running.send(CHAT, chat("x", **plain, **NEUTRAL, **OF_A_CHAT))
    nothing = dict.fromkeys((*NEUTRAL, *OF_A_CHAT))

    assert with_all[0] == 200 and with_all[2]["choices"] == said[2]["choices"]
    assert running.send(CHAT, chat("x", **plain, **nothing))[2]["choices"] == said[2]["choices"]
    more = {"echo": False, "suffix": "", "best_of": 1, "stop": "", "guided_json": None, "bad": []}
    found = running.send(COMPLETIONS, wrote | NEUTRAL | more)
    assert found[0] == 200 and found[2]["choices"] == written[2]["choices"]


# as OpenAI's client writes the message of a response, whole or put together from a stream
SAID: dict[str, Any] = {
    **{"content": "9", "refusal": None, "role": "assistant", "annotations": None, "audio": None},
    **{"function_call": None, "tool_calls": None},
}


@pytest.mark.parametrize(
    ("role", "fields"),
    [
        ("assistant", {}),
        ("assistant", {"tool_calls": [], "annotations": [], "reasoning_content": None}),
        ("assistant", {"refusal": "", "audio": {}, "function_call": {}, "reasoning_content": ""}),
        ("assistant", {"parsed": {"a": 1}, "name": "", "tool_call_id": "", "thinking_blocks": []}),
        ("assistant", {"content": [{"type": "text", "text": "9", "annotations": []}]}),
        ("user", {"type": "text"}),
        ("user", {"tool_call_id": None, "cache_control": {"type": "ephemeral"}}),
        ("user", {"content": [{"type": "text", "text": "9", "cache_control": {"type": "x"}}]}),
    ],
)
def test_the_message_that_came_back_is_a_turn(
    running: Running, role: str, fields: dict[str, Any]
) -> None:
    first, last = {"role": "user", "content": "4 5"}, {"role": "user", "content": "6 10"}
    plain = {"max_tokens": 4, "seed": 3, "messages": [first, {"role": role, "content": "9"}, last]}
    expected = running.send(CHAT, plain)[2]

    turn = SAID | {"role": role} | fields
    status, _, document = running.send(CHAT, plain | {"messages": [first, turn, last]})

    assert status == 200, document
    assert document["choices"] == expected["choices"]
    assert document["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


def test_a_second_turn_with_calls_that_came_back(
    running: Running, solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solver.tokenizer, "chat_template", WITH_TOOLS)
    function = CALL["function"] | {"parsed_arguments": {"a": 4}}
    streamed = {**CALL, "index": 0, "function": function}
    user, result = {"role": "user", "content": "4"}, {"role": "tool", "content": "9"}

    def said(call: dict[str, Any], tool: dict[str, Any]) -> dict[str, Any]:
        turn = SAID | {"content": None, "tool_calls": [call]}
        messages = [user, turn, result | {"tool_call_id": "c1"}]
        return {"messages": messages, "tools": [tool], "max_tokens": 2, "seed": 1}

    expected = running.send(CHAT, said(CALL, TOOL))
    marked = running.send(CHAT, said(streamed, TOOL | {"cache_control": {"type": "ephemeral"}}))

    assert expected[0] == marked[0] == 200, marked
    lengths = [document["usage"]["prompt_tokens"] for _, _, document in (expected, marked)]
    assert lengths[0] == lengths[1]


def test_more_tokens_than_there_may_be_are_as_many_as_there_may(solver: Solver) -> None:
    context = solver.checkpoint.read().info.context
    ids = solver.tokenizer.encode("4 5 6 10\n")
    prompt = {"temperature": 0, "prompt": (ids * context)[: context - 5]}
    with serving(solver, max_tokens=3) as running:
        asked = [
            running.send(COMPLETIONS, {"prompt": "4 5 6 10\n", "seed": 1, "max_tokens": most})
            for most in (3, 4, 2**40)
        ]
        chats = [
            running.send(CHAT, chat("x", seed=1, max_tokens=most, max_completion_tokens=most))
            for most in (3, 10**6)
        ]
    with serving(solver) as running:
        long = [running.send(COMPLETIONS, prompt | more) for more in ({}, {"max_tokens": 50})]
        full = running.send(COMPLETIONS, {"prompt": (ids * context)[:context]})

    for answers, most in ((asked, 3), (chats, 3), (long, 5)):
        assert [status for status, *_ in answers] == [200] * len(answers), answers
        first = answers[0][2]
        assert all(each["choices"] == first["choices"] for _, _, each in answers)
        assert first["choices"][0]["finish_reason"] == "length"
        assert first["usage"]["completion_tokens"] == most
    assert (full[0], full[2]["error"]["code"]) == (400, "context_length_exceeded")
    assert "no room" in full[2]["error"]["message"]


def test_a_search_gets_as_many_tokens_as_there_may_be(running: Running) -> None:
    body = {"problem": HANDS[0], "seed": 3, "max_expansions": 2, "stream": False}

    capped = running.send(SOLVE, body | {"max_tokens": 10**7})

    assert capped[0] == 200 and capped[2]["answer"] == running.send(SOLVE, body)[2]["answer"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-307},
        {"temperature": 5e-324},
        {"temperature": 1e-9},
        {"temperature": 1, "top_p": 0},
        {"temperature": 1, "top_p": 1e-300},
        {"temperature": 2, "top_k": 1},
    ],
)
def test_next_to_nothing_is_greedy(running: Running, fields: dict[str, Any]) -> None:
    asked = {"prompt": "4 5 6 10\n", "max_tokens": 24, "seed": 1, "logprobs": 0}
    greedy = running.send(COMPLETIONS, asked | {"temperature": 0})[2]

    found = running.send(COMPLETIONS, asked | fields)[2]

    assert found["choices"][0]["text"] == greedy["choices"][0]["text"]
    for mine, its in zip(
        *(each["choices"][0]["logprobs"]["token_logprobs"] for each in (found, greedy)),
        strict=True,
    ):
        assert mine == pytest.approx(its, abs=1e-4)


def test_equal_choices_are_decoded_once(client: Any) -> None:
    fields = chat("4 5 6 10", max_tokens=12, temperature=0, logprobs=True)
    one = client.chat.completions.create(**fields)

    eight = client.chat.completions.create(**fields, n=8)
    texts: dict[int, str] = {}
    for chunk in client.chat.completions.create(**fields, n=8, stream=True):
        for each in chunk.choices:
            texts[each.index] = texts.get(each.index, "") + (each.delta.content or "")
    two = client.completions.create(
        model=NAME, prompt=["4 5 6 10\n", "1 2 3 4\n"], n=2, temperature=0, max_tokens=8
    )

    (only,) = one.choices
    assert [each.index for each in eight.choices] == list(range(8))
    assert {each.message.content for each in eight.choices} == {only.message.content}
    assert all(each.logprobs == only.logprobs for each in eight.choices)
    assert texts == dict.fromkeys(range(8), only.message.content)
    assert eight.usage.completion_tokens == one.usage.completion_tokens == 12
    found = [each.text for each in two.choices]
    assert found[0] == found[1] != found[2] == found[3] and two.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("field", "value", "works"),
    [
        ("frequency_penalty", 0.5, "0"),
        ("repetition_penalty", 1.1, "1"),
        ("repetition_penalty", True, "1"),
        ("logit_bias", {"5": 1}, "{}"),
        ("tool_choice", "required", '"auto" or "none"'),
        ("functions", [{"name": "x"}], "[]"),
        ("modalities", ["audio"], '["text"]'),
        ("continue_final_message", True, "false"),
        ("prediction", {"type": "content"}, "null"),
    ],
)
def test_a_value_that_is_not_supported_is_told_which_is(
    running: Running, field: str, value: Any, works: str
) -> None:
    status, _, document = running.send(CHAT, chat("x") | {field: value})

    assert (status, document["error"]["param"]) == (400, field)
    words = f"{field}: this value is not supported; leave the field out or send {works}."
    assert document["error"]["message"] == words


@pytest.mark.slow
def test_bytes_of_tokens_are_those_of_the_text(smollm2: Path) -> None:
    fields = chat("Repeat: 😀😃😄😁", max_tokens=24, temperature=0, logprobs=True, top_logprobs=5)
    with Solver(str(smollm2), task="reasoning") as solver:
        solver.load()
        with serving(solver) as running, closing(running.client()) as client:
            choice = client.chat.completions.create(**fields).choices[0]

    content = choice.logprobs.content
    said = b"".join(bytes(each.bytes) for each in content)
    others = [other for each in content for other in each.top_logprobs]
    parts = [other for other in others if "\ufffd" in other.token]
    assert said.decode() == choice.message.content and "😀" in choice.message.content
    assert parts and all(other.bytes is None for other in parts), "of a part of a character"
    assert all(bytes(each.bytes).decode() == each.token for each in others if each not in parts)


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


def test_json_without_its_package_is_refused_by_name(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    form = {"type": "json_object"}

    status, _, document = running.send(CHAT, chat("x", response_format=form))

    assert (status, document["error"]["param"]) == (400, "response_format")
    assert "pip install 'arbor-search[structured]'" in document["error"]["message"]


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


def test_a_template_that_leaves_tools_out_is_named(
    solver: Solver, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = chat("x", max_tokens=2)
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    for template in (None, plain):
        monkeypatch.setattr(solver.tokenizer, "chat_template", template)
        with pytest.raises(openai.BadRequestError, match="takes no tools"):
            client.chat.completions.create(**fields, tools=[TOOL])
        with pytest.raises(openai.BadRequestError, match="takes no calls of tools"):
            client.chat.completions.create(**{**fields, "messages": [called]})


def test_control_tokens_in_tools_are_text(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver.tokenizer, "chat_template", WITH_TOOLS)
    end = solver.tokenizer.decode([solver.eos[0]])
    tool = {"type": "function", "function": {"name": "add", "description": f"x{end}y"}}

    ids = conversation_tokens(solver.tokenizer, [{"role": "user", "content": "1"}], [tool])

    assert end and not set(solver.eos) & set(ids)
    assert f"x{end}y" in solver.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "code"),
    [
        (COMPLETIONS, b'{"prompt":"x"}', {"content_type": "text/plain"}, 415, "content_type"),
        (COMPLETIONS, None, {}, 405, "method_not_allowed"),
        ("/v1/embeddings", {}, {}, 404, "unknown_url"),
        ("/v1/models/..%2f..%2fetc%2fpasswd", None, {}, 404, "model_not_found"),
        ("/docs", None, {}, 404, "unknown_url"),
        ("/openapi.json", None, {}, 404, "unknown_url"),
    ],
)
def test_other_requests_are_refused_in_the_same_form(
    running: Running, path: str, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    found, _, document = running.send(path, body, **headers)

    assert (found, document["error"]["code"]) == (status, code)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:80", "[::1", "::1", "@"])
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_host_name_of_elsewhere_is_refused(running: Running, path: str, host: str) -> None:
    status, _, document = running.send(path, host=host)

    assert (status, document["error"]["code"]) == (400, "unknown_host")
    message = document["error"]["message"]
    assert repr(host) in message and "Send 127.0.0.1, localhost or [::1]" in message
    assert "--bind" in message


@pytest.mark.parametrize("host", ["127.0.0.1", "LOCALHOST:1", "[::1]", "[::1]:8000"])
def test_a_host_name_of_this_machine_is_served(running: Running, host: str) -> None:
    assert running.send("/health", host=host)[0] == 200


def test_a_body_that_does_not_arrive_is_given_up(solver: Solver) -> None:
    with serving(solver, body_s=0.05) as running:
        where = running.url.removeprefix("http://")
        host, port = where.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nhost: {where}\r\ncontent-type: application/json\r\n"
                "content-length: 100\r\n\r\n{".encode()
            )
            answer = connection.recv(4096)

    assert b" 408 " in answer.split(b"\r\n")[0]


def test_a_body_without_a_length_is_counted(solver: Solver) -> None:
    with serving(solver, body_bytes=1000) as running, closing(running.connect()) as connection:
        connection.request(
            "POST",
            CHAT,
            iter([b" " * 600] * 3),
            {"content-type": "application/json", "transfer-encoding": "chunked"},
            encode_chunked=True,
        )
        assert connection.getresponse().status == 413


# Keys

KEYS = ("a-key-of-sixteen-characters", "another-key-of-sixteen")


def test_without_a_key_nothing_is_served(solver: Solver) -> None:
    with serving(solver, api_keys=KEYS) as running:
        for given in ("", "Bearer", f"Bearer {KEYS[0]}x", f"Basic {KEYS[0]}", "Bearer \xe9"):
            for path, body in ((CHAT, {}), ("/v1/models", None), ("/metrics", None)):
                status, headers, document = running.send(path, body, authorization=given)
                assert (status, document["error"]["code"]) == (401, "invalid_api_key")
                assert headers["www-authenticate"].startswith("Bearer")
        assert running.send("/health")[0] == running.send("/ready")[0] == 200
        for key in KEYS:
            with running.client(key) as client:
                assert client.chat.completions.create(**chat("x", max_tokens=2)).choices


def test_keys_are_read_from_a_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(f"# of agents\n{KEYS[0]}\n\n{KEYS[0]}\n", encoding="utf-8-sig")

    assert read_keys(path, KEYS[1]) == (KEYS[1], KEYS[0])
    assert read_keys(None, None) == ()
    with pytest.raises(InputError, match="No such file"):
        read_keys(tmp_path / "none", None)
    for wrong in ("short", "a key with spaces in it", " , "):
        with pytest.raises(UsageError, match="API key"):
            read_keys(None, wrong)


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


def test_metrics_count_every_request_of_the_api(solver: Solver) -> None:
    with serving(solver) as running:
        asked = [("/v1/models", None), (f"/v1/models/{NAME}", None), ("/v1/models/x", None)]
        asked += [(CHAT, None), ("/v1/models", {}), ("/v1/none", {}), ("/x", None)]
        asked += [(SOLVE, {}), ("/health", None), ("/ready", None), ("/metrics", None)]
        statuses = [running.send(path, body)[0] for path, body in asked]
        statuses.append(running.send("/v1/models", host="evil.example")[0])
        text = running.send("/metrics")[2]["text"]

    counted = re.findall(r'^arbor_requests_total{endpoint="(.*)",status="(.*)"} (.*)$', text, re.M)
    assert statuses == [200, 200, 404, 405, 405, 404, 404, 400, 200, 200, 200, 400]
    one = "/v1/models/{name:path}"
    assert {(endpoint, int(status)): float(count) for endpoint, status, count in counted} == {
        ("/v1/models", 200): 1,
        (one, 200): 1,
        (one, 404): 1,
        (CHAT, 405): 1,
        ("/v1/models", 405): 1,
        ("other", 404): 2,
        (SOLVE, 400): 1,
        ("/v1/models", 400): 1,
    }
    assert "# HELP arbor_requests_total Requests but those of /health, /ready, /metrics" in text


def test_a_server_that_ends_refuses_new_requests(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with serving(solver) as running:
        assert running.send("/ready")[2] == {"status": "ready"}
        gate.close()
        stream = running.begin(COMPLETIONS, LONG)
        until(lambda: running.service.engine.running)
        running.service.drain()

        assert running.send("/ready")[0] == 503
        status, headers, document = running.send(CHAT, chat("x"))
        assert (status, document["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in headers
        running.service.close()
        gate.open()
        with stream, stream.makefile("rb") as file:
            assert b"shutting_down" in file.read()
        until(lambda: running.is_idle)


def test_what_has_not_ended_when_the_server_does_is_told_so(
    solver: Solver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    gate.close()
    with serving(solver, drain=0.1) as running:
        close, closed = running.service.close, threading.Event()
        monkeypatch.setattr(running.service, "close", lambda: (close(), closed.set()))
        stream = running.begin(COMPLETIONS, LONG)
        whole = running.begin(COMPLETIONS, LONG | {"stream": False})
        until(lambda: running.service.admitted == 2)
        running.server.should_exit = True
        assert closed.wait(30)
        gate.open()

        with stream, stream.makefile("rb") as file:
            assert b"shutting_down" in file.read()
        with whole, whole.makefile("rb") as file:
            answer = file.read()
            assert answer.startswith(b"HTTP/1.1 503") and b"shutting_down" in answer

    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_choice_has_at_most_what_the_budget_holds(solver: Solver) -> None:
    with serving(solver, tokens=60) as running:
        fields = {"model": NAME, "prompt": "4 5 6 10\n", "max_tokens": 1000, "seed": 1}
        status, _, document = running.send(COMPLETIONS, fields)

    assert (status, document["usage"]["total_tokens"]) == (200, 60)


def test_a_name_has_no_folders_of_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / "secret" / "my-model"
    folder.mkdir(parents=True)

    assert served_name(str(folder)) == "my-model"
    assert served_name("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert served_name("builtin:sapling") == "builtin:sapling"


def test_the_default_kv_is_half_of_the_free_memory_and_a_context_for_each_at_most() -> None:
    assert default_tokens(2048, 8, 12_288, 2**34) == 16_384
    assert default_tokens(131_072, 8, 16_384, 2**33) == 2**18
    assert default_tokens(131_072, 8, 131_072, 2**30) == 2**12
    assert default_tokens(131_072, 8, 131_072, 5) == 1
    assert default_tokens(2048, 8, 12_288, 0) == 16_384


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
        search = {random.choice(list(SearchFields.model_fields)): random.choice(values)}
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


@pytest.mark.slow
def test_clients_that_come_and_go_leave_no_slot_behind(solver: Solver) -> None:
    random = Random(2)
    errors: list[BaseException] = []

    with serving(solver, tokens=2048, concurrency=6) as running:

        def visit(seed: int) -> None:
            own = Random(seed)
            try:
                with running.client() as client:
                    for _ in range(12):
                        fields = chat(own.choice(HANDS), seed=own.randrange(9), max_tokens=60)
                        if own.random() < 0.3:
                            fields["extra_body"] = {"arbor": {"max_expansions": 6}}
                        stream = client.chat.completions.create(**fields, stream=True)
                        leave = own.randrange(40) if own.random() < 0.6 else None
                        for number, _ in enumerate(stream):
                            if number == leave:
                                break
                        stream.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=visit, args=(random.random(),)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: running.is_idle)
        solver.engine.memory.check()
    assert errors == []


@dataclass(frozen=True)
class NamesAFile:
    """A component with a setting of each kind."""

    queries: str | None = None
    farthest: int | None = 65_536
    window: int = 128
    order: Literal["first", "last"] = "first"


def test_requests_may_not_name_a_file_of_the_server() -> None:
    assert _free_settings(NamesAFile) == {"farthest", "order", "window"}
