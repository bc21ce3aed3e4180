"""Requests planned: what each prompt or problem of a request runs, checked before it waits."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from arbor.budget import Budget
from arbor.errors import UsageError
from arbor.events import MOST_INTEGER, Detail
from arbor.integrations.server.refusals import Refusal, without_paths
from arbor.integrations.server.schema import (
    ChatRequest,
    CompletionRequest,
    Generating,
    Message,
    SearchFields,
    SolveRequest,
)
from arbor.integrations.server.search_changes import search_changes, search_options
from arbor.integrations.server.settings import ServerSettings
from arbor.integrations.server.tool_calls import writes_calls
from arbor.model.control_tokens import encode_raw
from arbor.model.known_tokens import check_known
from arbor.model.sampling_params import Sampling
from arbor.run.choices import copies_of
from arbor.run.conversation import conversation_tokens, plain_decoding, problem_of, with_system
from arbor.run.request import Options
from arbor.run.run import Run
from arbor.run.worker import SharedEngine
from arbor.support.texts import one_line
from arbor.tasks.plain_text import plain_problem
from arbor.tasks.step_format import StepFormat

COMPLETION_TOKENS = 16  # OpenAI's default
MOST_CALLS = 128  # of functions in one choice


@dataclass(frozen=True, slots=True)
class Planned:
    """What a request runs.

    Attributes:
        runs: one for each prompt or problem.
        choices: of each.
        seed: of all.
        timeout_s: from arrival to end.
        stops: stop strings of plain decoding.
        searched: whether they are searches.
        with_logprobs: whether each token's log probability is wanted.
        calls: calls of functions that are read in each choice, at most; 0: they stay text.
        copies: how many of these choices are one that was decoded once: greedy ones are equal.
    """

    runs: tuple[Run, ...]
    choices: int
    seed: int
    timeout_s: float
    stops: tuple[str, ...]
    searched: bool
    with_logprobs: bool
    calls: int = 0
    copies: int = 1


def plan_chat(body: ChatRequest, engine: SharedEngine, settings: ServerSettings) -> Planned:
    """The run of a chat.

    Raises:
        Refusal, ArborError: it cannot be run.
    """
    most = body.max_completion_tokens or body.max_tokens
    if body.max_tokens not in (None, most):
        words = "max_tokens and max_completion_tokens are the same; give one."
        raise Refusal(400, "invalid_request", words, param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        words = "top_logprobs needs logprobs: true."
        raise Refusal(400, "invalid_request", words, param="top_logprobs")
    planning = _Planning(body, engine, settings, bool(body.logprobs), body.top_logprobs or 0)
    turns = _turns(body.messages)
    form = None if body.response_format is None else body.response_format.form
    if body.search is not None:
        for name, given in (("tools", body.offered), ("response_format", form)):
            if given:
                raise _not_of_a_search(name)
        with _of_the_messages():
            system, problem = problem_of(turns)
        return planning.searches(body.search, [problem], most, system)
    if form is not None:
        _check_form(form)
    tokenizer = engine.setup.checkpoint.read().tokenizer
    tokens = _chat_tokens(tokenizer, turns, body.offered)
    text = "\n\n".join(turn["content"] for turn in turns)
    planned = planning.plain([(tokens, text)], most, form)
    if not body.offered or not writes_calls(tokenizer):
        return planned
    calls = 1 if body.parallel_tool_calls is False else MOST_CALLS
    return dataclasses.replace(planned, calls=calls)


def plan_completion(
    body: CompletionRequest, engine: SharedEngine, settings: ServerSettings
) -> Planned:
    """The runs of a completion.

    Raises:
        Refusal, ArborError: it cannot be run.
    """
    planning = _Planning(body, engine, settings, body.logprobs is not None, body.logprobs or 0)
    prompts = body.prompts
    if body.search is not None:
        texts = [each for each in prompts if isinstance(each, str)]
        if len(texts) < len(prompts):
            raise Refusal(400, "invalid_request", "A search needs text.", param="prompt")
        return planning.searches(body.search, texts, body.max_tokens)
    checkpoint = engine.setup.checkpoint.read()
    tokenizer, vocabulary = checkpoint.tokenizer, checkpoint.info.vocabulary
    given: list[tuple[list[int], str]] = []
    for each in prompts:
        tokens = encode_raw(tokenizer, each) if isinstance(each, str) else each
        check_known(tokens, vocabulary, "the prompt", tokenizer)
        given.append((tokens, each if isinstance(each, str) else tokenizer.decode(each)))
    return planning.plain(given, body.max_tokens or COMPLETION_TOKENS)


def plan_solve(body: SolveRequest, engine: SharedEngine, settings: ServerSettings) -> Planned:
    """The run of a problem.

    Raises:
        Refusal, ArborError: it cannot be run.
    """
    generating = body.generating
    assert generating.arbor is not None, "a problem is searched"
    planning = _Planning(generating, engine, settings, False, detail=body.trace_level)
    return planning.searches(generating.arbor, [body.problem], body.max_tokens)


def _check_form(form: StepFormat) -> None:
    """Refuse a schema that no text can be held to."""
    from arbor.engine.grammar import check_format

    try:
        check_format(form)
    except UsageError as error:
        words = f"{error.message} {error.hint if error.code == 'extra-missing' else ''}".strip()
        raise Refusal(
            400, "invalid_request", f"response_format: {words}", param="response_format"
        ) from error


def _not_of_a_search(name: str) -> Refusal:
    return Refusal(400, "invalid_request", f"A search takes no {name}; leave it out.", param=name)


def _chat_tokens(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[int]:
    """`conversation_tokens` of a request."""
    try:
        return conversation_tokens(tokenizer, turns, tools)
    except UsageError:
        raise
    except Exception as error:  # the template's own
        raise Refusal(
            400,
            "chat_template",
            "The model's chat template refuses these messages: "
            f"{without_paths(one_line(str(error))[:200])}.",
            param="messages",
        ) from error


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of a request as chat templates read them: arguments of calls are objects."""
    turns = []
    for message in messages:
        turn: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
        }
        for name in ("name", "tool_call_id"):
            if value := getattr(message, name):
                turn[name] = value
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": each.id,
                    "type": each.type,
                    "function": {"name": each.function.name, "arguments": each.function.read},
                }
                for each in message.tool_calls
            ]
        turns.append(turn)
    return turns


@contextmanager
def _of_the_messages() -> Iterator[None]:
    """Refuse messages that a task cannot take."""
    try:
        yield
    except UsageError as error:
        raise Refusal(
            400, "invalid_request", f"{error.message} {error.hint}", param="messages"
        ) from error


class _Planning:
    """Plans the runs of one request."""

    def __init__(
        self,
        body: Generating,
        engine: SharedEngine,
        settings: ServerSettings,
        with_logprobs: bool,
        alternatives: int = 0,
        detail: Detail = "events",
    ) -> None:
        self._body = body
        self._alternatives = alternatives
        self._detail = detail
        self._engine = engine
        self._settings = settings
        self._with_logprobs = with_logprobs
        self._choices = body.n or 1
        self._seed = secrets.randbits(32) if body.seed is None else body.seed % (MOST_INTEGER + 1)
        asked = None if body.arbor is None else body.arbor.timeout
        self._timeout_s = settings.timeout if asked is None else min(asked, settings.timeout)
        self._check_stops()

    def plain(
        self,
        prompts: Sequence[tuple[list[int], str]],
        max_tokens: int | None,
        form: StepFormat | None = None,
    ) -> Planned:
        """Plain decoding.

        Args:
            prompts: token ids and text of each.
            max_tokens: of each choice, as far as the server allows and the context holds them;
                None: that many.
            form: what each choice has to match; None: anything.
        """
        self._check_count(len(prompts))
        copies = copies_of(self._choices, self._sampling())
        choices = self._choices // copies
        runs = [self._plain_run(*prompt, choices, max_tokens, form) for prompt in prompts]
        return self._planned(runs, searched=False, copies=copies)

    def searches(
        self,
        search: SearchFields,
        problems: Sequence[str],
        max_tokens: int | None,
        system: str = "",
    ) -> Planned:
        """A search of each problem.

        Args:
            search: how.
            problems: as a user types them.
            max_tokens: that each generates.
            system: the system message; empty for the task's.
        """
        self._check_count(len(problems))
        if self._with_logprobs or self._body.stops:
            raise _not_of_a_search("logprobs" if self._with_logprobs else "stop")
        setup = self._engine.setup
        own = self._engine.tokens is not None  # searches have budgets of their own
        asked = None if own or search.budget is None else Budget.parse(search.budget)
        if asked not in (None, setup.budget):
            raise UsageError(
                "budget-shared",
                f"all searches here share a budget of {setup.budget}, and this one asks for {asked}.",
                f"Give {setup.budget}, or leave it out.",
            )
        changes = search_changes(search, setup, self._settings)
        with _of_the_messages():
            changes["task"] = with_system(changes["task"], system)
        changes["sampling"] = self._sampling()
        options = search_options(search, max_tokens, self._seed, self._timeout_s, self._settings)
        options["trace_level"] = self._detail
        runs = [self._engine.prepare(problem, options, **changes) for problem in problems]
        return self._planned(runs, searched=True)

    def _planned(self, runs: Sequence[Run], *, searched: bool, copies: int = 1) -> Planned:
        return Planned(
            tuple(runs),
            self._choices,
            self._seed,
            self._timeout_s,
            self._body.stops,
            searched,
            self._with_logprobs,
            copies=copies,
        )

    def _plain_run(
        self,
        tokens: list[int],
        text: str,
        choices: int,
        max_tokens: int | None,
        form: StepFormat | None,
    ) -> Run:
        if not tokens:
            raise Refusal(400, "invalid_request", "The prompt is empty.")
        context = self._engine.setup.checkpoint.read().info.context
        left = context - len(tokens)
        if left < 1:
            raise Refusal(
                400,
                "context_length_exceeded",
                f"The prompt has {len(tokens):,} tokens, and the model's context of {context:,} "
                "has no room for one more.",
            )
        if self._engine.tokens is not None:  # of KV; else a part of what there is
            left = min(left, max(1, self._engine.tokens - len(tokens)))
        most = min(self._settings.max_tokens, left, max_tokens or left)
        options: Options = {"seed": self._seed, "timeout": self._timeout_s}
        if self._body.stream or self._with_logprobs:
            options["trace_level"] = "tokens"
        return self._engine.prepare(
            plain_problem(tokens, text),
            options,
            **plain_decoding(
                self._body.stops, most, self._sampling(), choices, form, self._alternatives
            ),
        )

    def _sampling(self) -> Sampling:
        """The server's sampling with what the request changes."""
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {n: value for n in names if (value := getattr(self._body, n)) is not None}
        if given.get("top_k") == -1:  # off, as vLLM has it
            given["top_k"] = 0
        return dataclasses.replace(self._engine.setup.resolved_sampling, **given)

    def _check_count(self, prompts: int) -> None:
        most = self._settings.max_choices
        if prompts * self._choices > most:
            words = (
                f"{prompts:,} prompts with {self._choices:,} choices each; the server allows "
                f"{most:,} choices in one request."
            )
            raise Refusal(400, "limit_exceeded", words, param="n" if prompts == 1 else "prompt")

    def _check_stops(self) -> None:
        stops, settings = self._body.stops, self._settings
        if len(stops) > settings.max_stops:
            words = f"{len(stops):,} stop strings; the server allows {settings.max_stops}."
            raise Refusal(400, "limit_exceeded", words, param="stop")
        if any(not stop or len(stop) > settings.stop_length for stop in stops):
            words = f"A stop string has 1 to {settings.stop_length} characters."
            raise Refusal(400, "invalid_request", words, param="stop")
