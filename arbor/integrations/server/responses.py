"""Responses in OpenAI's format, whole and as chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from arbor._version import __version__
from arbor.engine.text import BROKEN
from arbor.integrations.server.planned import Planned
from arbor.integrations.server.service import RunEnded
from arbor.integrations.server.tool_calls import CallReader
from arbor.run.choices import Delta, RunCost, TextToken

FINGERPRINT = f"arbor-{__version__}"
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {text}\n\n".encode()


@dataclass(slots=True)
class _WholeChoice:
    texts: list[str] = field(default_factory=list)
    tokens: list[TextToken] = field(default_factory=list)
    finish: str | None = None
    found: dict[str, Any] | None = None


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
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()  # choices of a streamed chat whose role was sent
        self._readers: dict[int, CallReader] = {}  # of these choices

    def index(self, run: int, choice: int) -> int:
        """The number of a run's choice among all of the response."""
        return run * self._planned.choices + choice

    # Whole

    def whole(
        self, deltas: Iterable[tuple[int, Delta]], ended: Sequence[tuple[int, RunEnded]]
    ) -> dict[str, Any]:
        """The response, once all runs have ended."""
        choices: dict[int, _WholeChoice] = {}
        for run, delta in deltas:
            choice = choices.setdefault(self.index(run, delta.choice), _WholeChoice())
            choice.texts.append(delta.text)
            choice.tokens += delta.tokens
            choice.finish = delta.finish or choice.finish
            choice.found = delta.found or choice.found
        return {
            **self._base,
            "object": self._kind,
            "choices": [self._choice(index, each) for index, each in sorted(choices.items())],
            **self.closing(ended),
        }

    def _choice(self, index: int, choice: _WholeChoice) -> dict[str, Any]:
        reader = CallReader(self._planned.calls)
        text = reader.feed("".join(choice.texts))
        rest, calls = reader.end()
        content: dict[str, Any] = {"text": text + rest}
        if self._chat:
            words = text + rest
            message = {"role": "assistant", "content": words or None if calls else words}
            content = {"message": message | {"refusal": None} | _called(calls)}
        return {
            "index": index,
            **content,
            "finish_reason": _finish(choice.finish, calls),
            "logprobs": self._logprobs(choice.tokens),
            **({} if choice.found is None else {"arbor": choice.found}),
        }

    def closing(self, ended: Sequence[tuple[int, RunEnded]]) -> dict[str, Any]:
        """Usage, and how the runs ended, in their order."""
        runs = [end for _, end in sorted(ended, key=lambda each: each[0])]
        return {
            "usage": usage([end.answers.cost for end in runs]),
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

    def roles(self) -> list[bytes]:
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
        """What a choice has grown by; with its end comes the seed, which repeats the request."""
        index = self.index(run, delta.choice)
        calls: list[dict[str, Any]] = []
        if self._chat:
            role = {} if index in self._begun else {"role": "assistant"}
            self._begun.add(index)
            reader = self._readers.setdefault(index, CallReader(self._planned.calls))
            text = reader.feed(delta.text)
            if delta.finish is not None:
                rest, calls = reader.end()
                text += rest
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            said = {"content": text} if text else {}
            content: dict[str, Any] = {"delta": role | said | _called(numbered)}
        else:
            content = {"text": delta.text}
        choice = {
            "index": index,
            **content,
            "finish_reason": _finish(delta.finish, calls),
            "logprobs": self._logprobs(delta.tokens),
            **({} if delta.found is None else {"arbor": delta.found}),
        }
        if delta.finish is not None:
            return self._chunk([choice], arbor={"seed": self._planned.seed})
        return self._chunk([choice])

    def last(self, ended: Sequence[tuple[int, RunEnded]]) -> bytes:
        """The chunk without choices that has the usage."""
        return self._chunk([], **self.closing(ended))

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


def _finish(finish: str | None, calls: Sequence[dict[str, Any]]) -> str | None:
    """OpenAI's reason for the end of a choice."""
    return "tool_calls" if calls and finish == "stop" else finish


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
