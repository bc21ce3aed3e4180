"""ArborAPI: a model of inspect_ai that runs on arbor's engine, decoded plainly or searched."""

from __future__ import annotations

import dataclasses
import inspect
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import anyio
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from arbor.errors import ArborError, InputError, UsageError
from arbor.events import MOST_INTEGER
from arbor.model.sampling_params import Sampling
from arbor.run.choices import PathTokens, PlainAnswers, RunCost, TextStream, TextToken, copies_of
from arbor.run.conversation import (
    conversation_tokens,
    plain_decoding,
    problem_of,
    stepped_search,
    with_system,
)
from arbor.run.limits import check_count, limited
from arbor.run.planning import path_within
from arbor.run.plugin_answers import check_boundary
from arbor.run.request import Options
from arbor.run.run import Run
from arbor.run.settings import Settings
from arbor.run.solution import Solution
from arbor.run.stream import SearchJob
from arbor.run.worker import SharedEngine
from arbor.solver import Solver
from arbor.support.setting import settings_of
from arbor.support.texts import one_line
from arbor.tasks.base import Problem
from arbor.tasks.plain_text import SteppedText, plain_problem
from arbor.verifiers.base import OwnsModel, parts_of

MOST_TOKENS = 2048  # of a continuation where no number is given, as for inspect's own providers
STEP_TOKENS = 128
MOST_EXPANSIONS = 256
SAMPLING = ("temperature", "top_p", "top_k")
COMPONENTS = ("task", "controller", "verifier", "aggregate")
# Options of a generation that would change the text, and that arbor does not have.
WITHOUT = (
    "best_of",
    "frequency_penalty",
    "logit_bias",
    "presence_penalty",
    "prompt_logprobs",
    "response_schema",
    "suffix",
    "top_logprobs",
)


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """What a search for a message changes of the usual one.

    Attributes:
        task: reads the problem and writes the prompt; by default the conversation is continued.
        controller, verifier, aggregate: as in `arbor.Solver`.
        budget: KV of the search, as in `arbor.Solver`.
        max_expansions: leaves grown in all.
        max_depth: steps of a path.
        path_tokens: of a path; for a search without a task, the message's tokens.
        step_tokens: of a step.
        first, confidence, timeout: as in `arbor.Solver.solve`.
    """

    task: Any = None
    controller: Any = None
    verifier: Any = None
    aggregate: Any = None
    budget: float | str = "full"
    max_expansions: int = MOST_EXPANSIONS
    max_depth: int | None = None
    path_tokens: int | None = None
    step_tokens: int | None = None
    first: Any = None
    confidence: float | None = None
    timeout: float | None = None

    def changed(self, given: Mapping[str, Any]) -> Self:
        """These settings with others.

        Raises:
            UsageError: an unknown name.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in given:
            if name not in known:
                raise UsageError(
                    "inspect-setting",
                    f"a search has no setting '{name}'.",
                    f"Known: {', '.join(known)}.",
                )
        return dataclasses.replace(self, **{name: _text(value) for name, value in given.items()})


class ArborAPI(ModelAPI):
    """A model of inspect_ai that runs on arbor's engine.

    Without a controller or a task, messages are decoded plainly; with one they are searched, and
    the message is the best path. All samples share one engine.

    Args:
        model_name: a directory, a Hub id, or ``builtin:sapling``.
        base_url, api_key: without effect.
        config: inspect's.
        model_path: a directory or Hub id in place of the name.
        concurrency: messages in progress at a time.
        kv_tokens: fixed KV of all of them; by default as much as their budgets need.
        model_args: fields of `SearchSettings`, and other settings of `arbor.Solver`.

    Raises:
        PrerequisiteError: an invalid setting, or no such model.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - inspect's own default
        model_path: str | None = None,
        concurrency: int = 8,
        kv_tokens: int | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        names = {field.name for field in dataclasses.fields(SearchSettings)}
        search = {name: model_args.pop(name) for name in names & model_args.keys()}
        known = inspect.signature(Solver).parameters
        with _reported_by_inspect():
            for name in model_args:
                if name not in known:
                    raise UsageError(
                        "inspect-setting",
                        f"neither a search nor a model has a setting '{name}'.",
                        "docs/server.md lists them; others are those of arbor.Solver.",
                    )
            self._at_once = check_count("concurrency", concurrency) or 1
            self._given_tokens = check_count("kv_tokens", kv_tokens)
            self._usual = SearchSettings().changed(search)
            self._searches = self._usual.controller is not None or self._usual.task is not None
            parts = {
                kind: getattr(self._usual, kind)
                for kind in COMPONENTS
                if getattr(self._usual, kind) is not None
            }
            self._solver = Solver(
                model_path or model_name,
                **{"task": SteppedText(), **parts},
                record_bytes=0,
                **{name: _text(value) for name, value in model_args.items()},
            )
        self._loading, self._planning = threading.Lock(), threading.Lock()
        self._loaded: SharedEngine | None = None

    # What inspect asks of every model

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """The next message of a conversation.

        Raises:
            PrerequisiteError: tools, or an option that arbor does not have.
            ArborError: the search failed.
        """
        call = _Call()
        with _reported_by_inspect():
            asked = _MessageRequest.of(input, tools, config, self._usual, self._searches)
            try:
                return await anyio.to_thread.run_sync(
                    self._answer, call, asked, abandon_on_cancel=True
                )
            except anyio.get_cancelled_exc_class():
                call.abandon()
                raise

    def max_connections(self) -> int:
        """As many as are in progress at a time."""
        return self._at_once

    def connection_key(self) -> str:
        """The model's name: each has an engine of its own."""
        return str(self.model_name)

    async def count_text_tokens(self, text: str) -> int:
        """Tokens of a text, by the model's tokenizer."""
        return len(self._solver.tokenizer.encode(text, add_special_tokens=False))

    def close(self) -> None:
        """Free the model."""
        self._loaded = None
        self._solver.close()

    # One message, in a thread of its own

    def _shared(self) -> SharedEngine:
        """The engine, loaded by the first message."""
        with self._loading:
            if self._loaded is None:
                self._solver.load()
                self._loaded = self._solver.shared(self._at_once, self._given_tokens)
            return self._loaded

    def _answer(self, call: _Call, asked: _MessageRequest) -> ModelOutput:
        shared = self._shared()
        try:
            with self._planning:
                run, left = self._planned(shared, asked)
        except InputError as error:
            if error.code != "problem-too-long":
                raise
            return ModelOutput.from_content(
                self.model_name, "", stop_reason="model_length", error=str(error)
            )
        job = call.begin(shared, run)
        solution = job.solution()
        if asked.search is None:
            texts, cost = _decoded(job, asked, left, self._decode)
        else:
            texts, cost = _searched(job, solution, asked, left, self._decode)
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(*each) for each in texts],
            usage=ModelUsage(
                input_tokens=cost.prompt,
                output_tokens=cost.generated,
                total_tokens=cost.prompt + cost.generated,
                input_tokens_cache_read=cost.reused,
            ),
            metadata={"arbor": _facts(solution, asked.seed, asked.search is not None)},
        )

    def _choice(
        self, text: str, stop_reason: StopReason, tokens: Sequence[TextToken]
    ) -> ChatCompletionChoice:
        content = [Logprob(token=each.text, logprob=each.logprob) for each in tokens]
        return ChatCompletionChoice(
            message=ChatMessageAssistant(content=text, model=self.model_name, source="generate"),
            stop_reason=stop_reason,
            logprobs=Logprobs(content=content) if content else None,
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._solver.tokenizer.decode(tokens, skip_special_tokens=True))

    def _planned(self, shared: SharedEngine, asked: _MessageRequest) -> tuple[Run, int | None]:
        """The run of a message; tokens of it that the context holds, where those are fewer than
        were asked for.

        Raises:
            ArborError: it cannot be run; an `InputError` where the conversation fills the context.
        """
        chosen = {name: value for name, value in asked.sampling.items() if value is not None}
        sampling = dataclasses.replace(shared.setup.resolved_sampling, **chosen)
        options: Options = {"seed": asked.seed}
        if asked.with_logprobs:
            options["trace_level"] = "tokens"
        search = asked.search
        if search is not None:
            options |= {
                "budget": search.budget,
                "first": search.first,
                "confidence": search.confidence,
                "timeout": search.timeout,
            }
            if search.task is not None:
                system, problem = problem_of(asked.messages)
                changes = self._parts(shared, search, sampling)
                changes["task"] = with_system(changes["task"], system)
                return shared.prepare(problem, options, **changes), None
        if search is None:
            asked_tokens, parts = asked.max_tokens, {}
        else:
            given = check_count("path_tokens", search.path_tokens)
            asked_tokens, parts = given or asked.max_tokens, self._parts(shared, search, sampling)

        def within(most: int) -> dict[str, Any]:
            if search is None:
                choices = asked.choices // copies_of(asked.choices, sampling)
                return plain_decoding(asked.ends, most, sampling, choices)
            step = search.step_tokens or STEP_TOKENS
            own = stepped_search(asked.ends, most, step, sampling)
            return parts | own | {"boundary": limited(own["boundary"], search.max_depth)}

        text = self._conversation(asked)
        whole = dataclasses.replace(shared.setup, **within(asked_tokens))
        context, prompt = whole.checkpoint.read().info.context, len(text.data["tokens"])
        fits = path_within(whole, text, context - prompt)
        if not fits:
            raise InputError(
                "problem-too-long",
                f"the conversation has {prompt:,} tokens; the context of {context:,} has no room "
                "for a message after it"
                f"{' and for the question about it' if whole.verifier.needs_model else ''}.",
                "Shorten it.",
            )
        if fits == whole.boundary.longest_path:
            return shared.prepare(text, options, **within(asked_tokens)), None
        return shared.prepare(text, options, **within(fits)), fits

    def _conversation(self, asked: _MessageRequest) -> Problem:
        """The conversation as a text to continue."""
        try:
            tokens = conversation_tokens(self._solver.tokenizer, asked.messages)
        except ArborError:
            raise
        except Exception as error:  # the template's own
            raise UsageError(
                "chat-template",
                f"the model's chat template refuses these messages: {one_line(str(error))[:200]}.",
                "Put a system message into the user's, if it is that.",
            ) from error
        text = "\n\n".join(each["content"] for each in asked.messages)
        return plain_problem(tokens, text, is_conversation=True)

    def _parts(
        self, shared: SharedEngine, search: SearchSettings, sampling: Sampling
    ) -> dict[str, Any]:
        """The fields of `Setup` that a search changes."""
        setup = shared.setup
        changes: dict[str, Any] = {}
        for kind in COMPONENTS:
            given, usual = getattr(search, kind), getattr(self._usual, kind)
            own = getattr(setup, kind)
            same = given is None or given == usual
            changes[kind] = own if same else settings_of(Settings)[kind].checked(given)
        verifier = changes["verifier"]
        if verifier is not setup.verifier and any(
            isinstance(part, OwnsModel) for part in parts_of(verifier)
        ):
            raise UsageError(
                "inspect-verifier",
                "a verifier with a model of its own is loaded with the provider.",
                "Name it there: -M verifier=prm,model=DIR.",
            )
        usual_task = changes["task"] is setup.task
        boundary = setup.boundary if usual_task else check_boundary(changes["task"])
        return changes | {
            "boundary": limited(boundary, search.max_depth, search.step_tokens, search.path_tokens),
            "max_expansions": search.max_expansions,
            "sampling": sampling,
        }


class _Call:
    """A message in progress, which the event loop may give up at any moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: SearchJob | None = None
        self._abandoned = False

    def begin(self, shared: SharedEngine, run: Run) -> SearchJob:
        with self._lock:
            self._job = job = shared.begin(run)
            if self._abandoned:
                job.abandon()
        return job

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._job is not None:
                self._job.abandon()


@dataclass(frozen=True, slots=True)
class _MessageRequest:
    """What is asked of the model.

    Attributes:
        messages: with ``role`` and ``content``.
        search: None: plain decoding.
        ends: strings that end the message.
        max_tokens: of it.
        choices: number of them.
        seed: of the run.
        sampling: by name; None: the model's.
        with_logprobs: whether tokens have their log probabilities.
    """

    messages: tuple[dict[str, str], ...]
    search: SearchSettings | None
    ends: tuple[str, ...]
    max_tokens: int
    choices: int
    seed: int
    sampling: Mapping[str, Any]
    with_logprobs: bool

    @classmethod
    def of(
        cls,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolInfo],
        config: GenerateConfig,
        usual: SearchSettings,
        searches: bool,
    ) -> _MessageRequest:
        """Read inspect's request.

        Raises:
            UsageError: something that arbor does not have.
        """
        if tools:
            raise UsageError("inspect-tools", "arbor calls no tools.", "Leave them out.")
        body = config.extra_body or {}
        unknown = [name for name in WITHOUT if getattr(config, name, None)]
        unknown += [f"{name} (in extra_body)" for name in body if name != "arbor"]
        if unknown:
            raise UsageError(
                "inspect-option",
                f"options of a generation that arbor does not have: {', '.join(unknown)}.",
                "Leave them out.",
            )
        given = body.get("arbor")
        if given is not None and not isinstance(given, Mapping):
            raise UsageError(
                "inspect-setting",
                f"extra_body: arbor is {given!r:.40}.",
                "It is an object, as in {'controller': 'tot'}.",
            )
        search = usual if searches else None
        if given is not None:
            search = usual.changed(given)
        ends = tuple(end for end in config.stop_seqs or () if end)
        if search is not None and search.task is not None and ends:
            raise UsageError(
                "inspect-option",
                "stop sequences of a search whose task says where a text ends.",
                "Leave out stop_seqs, or the task.",
            )
        seed = secrets.randbits(32) if config.seed is None else config.seed % (MOST_INTEGER + 1)
        return cls(
            tuple(_turn(message) for message in messages),
            search,
            ends,
            check_count("max_tokens", config.max_tokens) or MOST_TOKENS,
            check_count("num_choices", config.num_choices) or 1,
            seed,
            {name: getattr(config, name) for name in SAMPLING},
            bool(config.logprobs),
        )


Choice = tuple[str, StopReason, Sequence[TextToken]]


def _decoded(
    job: SearchJob, asked: _MessageRequest, left: int | None, decode: Any
) -> tuple[list[Choice], RunCost]:
    """The choices of plain decoding."""
    copies = copies_of(asked.choices, job.run.setup.resolved_sampling)
    answers = PlainAnswers(
        decode,
        job.run.prompt,
        asked.choices // copies,
        asked.ends,
        with_logprobs=asked.with_logprobs,
        copies=copies,
    )
    texts = [""] * asked.choices
    tokens: list[list[TextToken]] = [[] for _ in texts]
    cut: StopReason = "max_tokens" if left is None else "model_length"
    reasons = [cut] * asked.choices
    for event in _events(job):
        for delta in answers.feed(event):
            texts[delta.choice] += delta.text
            tokens[delta.choice] += delta.tokens
            if delta.finish == "stop":
                reasons[delta.choice] = "stop"
    return list(zip(texts, reasons, tokens, strict=True)), answers.cost


def _searched(
    job: SearchJob, solution: Solution, asked: _MessageRequest, left: int | None, decode: Any
) -> tuple[list[Choice], RunCost]:
    """The choices of a search: its best path, then other finished ones."""
    paths, cost = PathTokens(), RunCost()
    for event in _events(job):
        paths.feed(event)
        cost.count(event)
    is_cut = {each.node: each.cut for each in solution.candidates}
    choices: list[Choice] = []
    for node in list(dict.fromkeys([*solution.path[-1:], *is_cut]))[: asked.choices]:
        ids = paths.ids(node)
        stream = TextStream(decode, job.run.prompt, asked.ends)
        pieces = [
            stream.feed(ids, paths.logprobs(node) if asked.with_logprobs else ()),
            stream.end(by_token=paths.stop(node) == "eos"),
        ]
        full = left is not None and len(ids) >= left
        reason: StopReason = "stop"
        if is_cut.get(node, True):
            reason = "model_length" if full else "max_tokens"
        text = "".join(piece.text for piece in pieces)
        choices.append((text, reason, [token for piece in pieces for token in piece.tokens]))
    return choices or [("", "max_tokens", ())], cost


def _events(job: SearchJob) -> Iterator[Any]:
    while (event := job.events.get()) is not None:
        yield event


def _facts(solution: Solution, seed: int, searched: bool) -> dict[str, Any]:
    """What the log has of a run in addition."""
    metrics = solution.metrics
    facts: dict[str, Any] = {
        "seed": seed,
        "status": solution.finish_reason,
        "limit": solution.limit,
        "tokens_generated": metrics.tokens_generated,
        "tokens_recomputed": metrics.tokens_recomputed,
        "tokens_fetched": metrics.tokens_fetched,
        "peak_tokens": metrics.peak_tokens,
        "budget_tokens": metrics.budget_tokens,
        "seconds": metrics.wall_s,
    }
    if searched:
        facts |= {
            "answer": solution.answer,
            "score": solution.score,
            "blocks": metrics.blocks,
            "finished_paths": len(solution.candidates),
        }
    return facts


def _turn(message: ChatMessage) -> dict[str, str]:
    """A message as the chat template reads it.

    Raises:
        UsageError: it has something other than text.
    """
    parts = [] if isinstance(message.content, str) else message.content
    other: list[str] = [part.type for part in parts if part.type != "text"]
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        other.append("tool calls")
    if other:
        hint = "Give reasoning_history='none'." if other[0] == "reasoning" else "Give text only."
        raise UsageError("inspect-messages", f"a message has {other[0]}.", hint)
    return {"role": message.role, "content": message.text}


def _text(value: Any) -> Any:
    """A setting; inspect's command line cuts ``tot,beam=3`` at the comma."""
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return value


@contextmanager
def _reported_by_inspect() -> Iterator[None]:
    """Report a user's mistake as inspect does: in a sentence, without a traceback."""
    try:
        yield
    except UsageError as error:
        raise PrerequisiteError(str(error)) from error
    except ArborError as error:
        if error.exit_code != 5:  # no such model, or one that arbor does not run
            raise
        raise PrerequisiteError(str(error)) from error
