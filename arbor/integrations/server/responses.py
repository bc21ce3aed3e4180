"""Responses, whole and as a stream: in OpenAI's format, or a search event by event."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from arbor._version import __version__
from arbor.engine.text import BROKEN
from arbor.events import Event, Header
from arbor.integrations.server.planned import Planned
from arbor.integrations.server.refusals import Refusal
from arbor.integrations.server.service import Admitted, RunEnded
from arbor.integrations.server.tool_calls import CallReader
from arbor.run.choices import Delta, RunCost, TextToken
from arbor.run.solution import Solution
from arbor.trace.write import finite, to_record

FINGERPRINT = f"arbor-{__version__}"
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {text}\n\n".encode()


class Responses:
    """The responses to one request.

    Args:
        model: its name.
        planned: the request.
        kind: ``chat.completion`` or ``text_completion``.
        with_usage: of a stream, whether its last chunk has the usage; all others have null.
    """

    def __init__(self, model: str, planned: Planned, kind: str, with_usage: bool = False) -> None:
        self._planned = planned
        self._chat = kind == "chat.completion"
        self._kind = kind
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._base = {
            "id": self._id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._no_usage = {"usage": None} if with_usage else {}
        self._begun: set[int] = set()  # choices of a streamed chat whose role was sent
        self._readers: dict[int, CallReader] = {}  # of these choices

    def index(self, run: int, choice: int) -> int:
        """The number of a run's choice among all of the response."""
        return run * self._planned.choices + choice

    # Whole

    async def whole(self, admitted: Admitted) -> dict[str, Any]:
        """The response, once all runs have ended."""
        choices: dict[int, list[Delta]] = {}
        ended: list[RunEnded] = []
        async for news in admitted.news():
            ended += news.ended
            for run, delta in news.deltas:
                choices.setdefault(self.index(run, delta.choice), []).append(delta)
        return {
            **self._base,
            "object": self._kind,
            "choices": [self._whole(index, each) for index, each in sorted(choices.items())],
            **self._closing(ended),
        }

    def _whole(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """A choice; the last of its deltas has its end."""
        reader = CallReader(self._planned.calls)
        text, calls = reader.read("".join(delta.text for delta in deltas), is_last=True)
        content: dict[str, Any] = {"text": text}
        if self._chat:
            message = {"role": "assistant", "content": text or None if calls else text}
            content = {"message": message | {"refusal": None} | _called(calls)}
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        return self._choice(index, content, replace(deltas[-1], tokens=tokens), bool(calls))

    def _choice(
        self, index: int, content: dict[str, Any], delta: Delta, called: bool
    ) -> dict[str, Any]:
        finish = "tool_calls" if called and delta.finish == "stop" else delta.finish
        return {
            "index": index,
            **content,
            "finish_reason": finish,
            "logprobs": self._logprobs(delta.tokens),
            **({} if delta.found is None else {"arbor": delta.found}),
        }

    def _closing(self, ended: Sequence[RunEnded]) -> dict[str, Any]:
        """Usage, and how the runs ended, in their order."""
        runs = sorted(ended, key=lambda end: end.run)
        return {
            "usage": usage([end.cost for end in runs]),
            "arbor": {
                "seed": self._planned.seed,
                "runs": [
                    {
                        "status": end.solution.finish_reason,
                        "limit": end.solution.limit,
                        **({"answer": end.solution.answer} if self._planned.searched else {}),
                        **({"score": end.solution.score} if self._planned.searched else {}),
                    }
                    for end in runs
                ],
            },
        }

    # Chunks

    async def stream(self, admitted: Admitted) -> AsyncIterator[bytes]:
        """The response as it comes; an error is the last event."""
        for chunk in self._roles():
            yield chunk
        ended: list[RunEnded] = []
        try:
            async for news in admitted.news(streaming=True):
                ended += news.ended
                if not news.deltas and not news.ended:
                    yield HEARTBEAT
                elif news.deltas:
                    yield b"".join(self.chunk(run, delta) for run, delta in news.deltas)
            if self._no_usage:
                yield self._chunk([], **self._closing(ended))
            yield DONE
        except Refusal as refusal:
            yield sse(refusal.to_dict())

    def _roles(self) -> list[bytes]:
        """The first chunk of each choice of a chat; those of a search but the first come with
        their text, as a search may find fewer."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        runs = range(len(self._planned.runs))
        choices = range(1 if self._planned.searched else self._planned.choices)
        self._begun = {self.index(run, choice) for run in runs for choice in choices}
        return [
            self._chunk([{"index": index, "delta": delta, "finish_reason": None, "logprobs": None}])
            for index in sorted(self._begun)
        ]

    def chunk(self, run: int, delta: Delta) -> bytes:
        """What a choice has grown by; with its end comes the seed, which repeats the request.

        A call and the end come in a chunk each, as OpenAI's client expects.
        """
        index = self.index(run, delta.choice)
        seed = {} if delta.finish is None else {"arbor": {"seed": self._planned.seed}}
        if not self._chat:
            return self._chunk([self._choice(index, {"text": delta.text}, delta, False)], **seed)
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        reader = self._readers.setdefault(index, CallReader(self._planned.calls))
        first = reader.count
        text, calls = reader.read(delta.text, is_last=delta.finish is not None)
        numbered = [{"index": number, **call} for number, call in enumerate(calls, first)]
        said: dict[str, Any] = role | ({"content": text} if text else {}) | _called(numbered)
        before = b""
        if calls and delta.finish is not None:
            going = replace(delta, finish=None, found=None)
            before = self._chunk([self._choice(index, {"delta": said}, going, True)])
            delta, said = replace(delta, tokens=()), {}
        end = self._choice(index, {"delta": said}, delta, reader.count > 0)
        return before + self._chunk([end], **seed)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._chat else self._kind
        return sse({**self._base, "object": kind, "choices": choices, **self._no_usage, **more})

    def _logprobs(self, tokens: Sequence[TextToken]) -> dict[str, Any] | None:
        if not self._planned.with_logprobs:
            return None
        if self._chat:
            return {
                "content": [
                    {
                        "token": token.text,
                        "logprob": token.logprob,
                        "bytes": list(token.text.encode()),
                        "top_logprobs": [
                            {"token": text, "logprob": logprob, "bytes": _bytes(text)}
                            for text, logprob in token.alternatives
                        ],
                    }
                    for token in tokens
                ],
                "refusal": None,
            }
        likeliest = [_by_text(token) for token in tokens]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": likeliest if any(token.alternatives for token in tokens) else None,
            "text_offset": [token.offset for token in tokens],
        }


def _bytes(text: str) -> list[int] | None:
    """Those of an alternative; None for one that is a part of a character."""
    return None if BROKEN in text else list(text.encode())


def _by_text(token: TextToken) -> dict[str, float]:
    """The alternatives of a token by their texts, and the token itself; of equal texts the most
    probable one counts."""
    found: dict[str, float] = {}
    for text, logprob in (*token.alternatives, (token.text, token.logprob)):
        found.setdefault(text, logprob)
    return found


def _called(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The field of a message that has calls."""
    return {"tool_calls": list(calls)} if calls else {}


def usage(costs: Sequence[RunCost]) -> dict[str, Any]:
    """OpenAI's usage, with what arbor counts in addition."""
    prompt = sum(cost.prompt for cost in costs)
    generated = sum(cost.generated for cost in costs)
    names = ("tokens_generated", "tokens_shared", "tokens_recomputed", "tokens_fetched", "nodes")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(cost.reused for cost in costs)},
        "arbor": {name: sum(int(cost.counters.get(name, 0)) for cost in costs) for name in names},
    }


class PublicRecords:
    """The events and the solution of one run as records of a trace, without paths of the machine.

    Args:
        source: name or path of the model, as the solver was given it.
        name: of the model in requests.
    """

    def __init__(self, source: str, name: str) -> None:
        self._source = source
        self._name = name
        self._start_s: float | None = None
        self._count = 0

    async def whole(self, admitted: Admitted) -> dict[str, Any]:
        """The solution of the only run."""
        ended = [end async for news in admitted.news() for end in news.ended]
        return self._solution(ended[0].solution)

    async def stream(self, admitted: Admitted) -> AsyncIterator[bytes]:
        """The events of the only run as they come, and its solution; an error is the last event."""
        try:
            async for news in admitted.news(streaming=True, with_events=True):
                chunks = [sse(self._record(event), event.name) for event in news.events]
                chunks += [sse(self._solution(end.solution), "solution") for end in news.ended]
                yield b"".join(chunks) or HEARTBEAT
        except Refusal as refusal:
            yield sse(refusal.to_dict(), "error")

    def _record(self, event: Event) -> dict[str, Any]:
        """One event, as a line of a trace holds it."""
        now = time.perf_counter()
        if self._start_s is None:
            self._start_s = now
        record = to_record(event)
        if isinstance(event, Header):
            record["config"] = self._public(record["config"])
            record["model"] = self._public(record["model"])
        numbered = {"e": record.pop("e"), "i": self._count, "t": round(now - self._start_s, 6)}
        self._count += 1
        return {**numbered, **record}

    def _solution(self, solution: Solution) -> dict[str, Any]:
        """A solution, as `Solution.to_dict`."""
        document: dict[str, Any] = finite(solution.to_dict())
        document["config"] = self._public(document["config"])
        return document

    def _public(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._public(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._public(each) for each in value]
        if not isinstance(value, str):
            return value
        if value == self._source:
            return self._name
        is_path = PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()
        return "(path)" if is_path else value
