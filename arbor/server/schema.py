"""Bodies of requests: OpenAI's fields as far as they are supported, and the search under `arbor`.

A field that changes nothing here is accepted (`user`); one that is not supported is accepted with
the value that switches it off, and refused otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_MESSAGES = 1024
Count = Annotated[int, Field(ge=1, le=2**31)]
Words = Annotated[str, Field(max_length=256)]
Token = Annotated[int, Field(ge=0, le=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(gt=0, le=1)]
Setting = bool | int | float | Annotated[str, Field(max_length=64)] | None
Component = Words | dict[Words, Setting]


class Body(BaseModel):
    """A JSON object of known fields with exact types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Search(Body):
    """How a problem is searched; an empty object is the server's own search.

    Attributes:
        task: name; by default the server's.
        controller, verifier, aggregate: a name, or an object with a ``name`` and settings that are
            numbers, truth values or words of a fixed set; by default the server's.
        budget: as in `Solver`; by default all KV of the server.
        max_expansions, max_depth, path_tokens, step_tokens, first, confidence: as in `Solver`.
        timeout: seconds for the request, its wait included.
    """

    task: Words | None = None
    controller: Component | None = None
    verifier: Component | None = None
    aggregate: Component | None = None
    budget: Words | float | None = None
    max_expansions: Count | None = None
    max_depth: Count | None = None
    path_tokens: Count | None = None
    step_tokens: Count | None = None
    first: Literal["answer", "verified"] | None = None
    confidence: Share | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None

    @property
    def is_only_a_deadline(self) -> bool:
        """Whether nothing but the deadline is given, which asks for no search."""
        return self.model_fields_set == {"timeout"}


class SolveRequest(Search):
    """The body of ``/v1/solve``: a problem and how it is searched.

    Attributes:
        problem: as a user types it.
        stream: send every event as it happens; else the solution alone.
        trace_level: detail of decoding in events, as in `Solver.solve`.
        seed, max_tokens, temperature, top_p, top_k: as in completions.
    """

    problem: Annotated[str, Field(min_length=1)]
    model: Words | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stream: bool = True
    trace_level: Literal["events", "steps", "tokens"] = "events"

    @property
    def generating(self) -> Generating:
        """The same in the form of other requests."""
        names = ("model", "seed", "max_tokens", "temperature", "top_p", "top_k")
        given = {name: getattr(self, name) for name in names}
        search = {name: getattr(self, name) for name in Search.model_fields}
        return Generating(**given, arbor=Search(**search))


class StreamOptions(Body):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(Body):
    """OpenAI's ``response_format``; only text is supported."""

    type: Literal["text"]


class Generating(Body):
    """Fields that chats and completions share."""

    model: Words | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    n: Count | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    arbor: Search | None = None
    # without effect
    user: str | None = None
    # only as switched off
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    extra_body: Annotated[dict[str, Any], Field(max_length=0)] | None = None  # its_hub sends {}

    @property
    def search(self) -> Search | None:
        """The search; None: plain decoding."""
        return None if self.arbor is None or self.arbor.is_only_a_deadline else self.arbor

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="after")
    def _check(self) -> Generating:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: Words | None = None

    @property
    def text(self) -> str:
        """The content."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(Generating):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    # without effect
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    # only as switched off
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionRequest(Generating):
    """The body of ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    # only as switched off
    echo: Literal[False] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    best_of: Count | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported; a search chooses among more")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]
