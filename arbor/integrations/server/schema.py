"""Bodies of requests: OpenAI's fields as far as they are supported, and the search under `arbor`.

A field that changes nothing here is accepted (`user`), and so is any other that is null or empty;
one that is not supported is accepted with the value that switches it off, and refused otherwise.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from arbor.events import MOST_INTEGER, Detail
from arbor.run.limits import RunLimits
from arbor.run.request import TraceDetail
from arbor.run.settings import Settings
from arbor.support.setting import Setting, settings_of
from arbor.tasks.step_format import StepFormat

MOST_MESSAGES = 1024
MOST_ALTERNATIVES = 20  # to a token
NOTHING: tuple[Any, ...] = (None, "", [], {})  # values of a field that say nothing
Count = Annotated[int, Field(ge=1, le=2**31)]
Words = Annotated[str, Field(max_length=256)]
Tokens = Annotated[int, Field(ge=1)]  # any number: as many are generated as there may be
Token = Annotated[int, Field(ge=0, le=2**31)]
Seed = Annotated[int, Field(ge=-MOST_INTEGER - 1, le=MOST_INTEGER)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Alternatives = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]
Plain = bool | int | float | Annotated[str, Field(max_length=64)] | None
Component = Words | dict[Words, Plain]


def off(*values: Any) -> AfterValidator:
    """What checks a field that is not supported: what says nothing (`NOTHING`) and the values that
    switch it off pass."""

    def check(given: Any) -> Any:
        for each in values:
            if given == each and isinstance(given, bool) == isinstance(each, bool):
                return given
        if given in NOTHING:
            return None
        shown = " or ".join(json.dumps(each) for each in (*values, None)[: max(1, len(values))])
        raise ValueError(f"this value is not supported; leave the field out or send {shown}")

    return AfterValidator(check)


class Body(BaseModel):
    """A JSON object of known fields with exact types; other fields have to say nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, given: Any) -> Any:
        """Leave out unknown fields that are null or empty."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in given.items() if key in known or value not in NOTHING}


def _type_of(each: Setting) -> Any:
    """The type of a field for a setting that requests may give, with its bounds."""
    about = each.about
    if about.names:
        return Component
    if each.choices:
        return Literal[each.choices]
    if each.types == (bool,):
        return bool
    bounds: dict[str, Any] = {"gt" if about.above else "ge": about.least, "le": about.most}
    if each.types == (int,):
        return Annotated[int, Field(**{**bounds, "le": about.most or 2**31})]
    return Annotated[float, Field(**bounds)] if each.types == (float,) else Words | float


# how a problem is searched, as the settings of a solver and the limits of a run declare it
_DECLARED: dict[str, Any] = {
    name: (_type_of(each) | None, None)
    for record in (Settings, RunLimits)
    for name, each in settings_of(record).items()
    if each.about.requested
}
_Declared: Any = create_model("_Declared", __base__=Body, **_DECLARED)


class SearchFields(_Declared):  # type: ignore[misc]
    """How a problem is searched; an empty object is the server's own search.

    Its fields are the settings declared as `requested`, as in `Solver` and `Solver.solve`; by
    default the server's. A component is a name, or an object with a ``name`` and settings that are
    numbers, truth values or words of a fixed set. The budget is all KV of the server by default,
    and `timeout` the seconds of the request, its wait included.
    """

    @property
    def is_only_a_deadline(self) -> bool:
        """Whether nothing but the deadline is given, which asks for no search."""
        return bool(self.model_fields_set == {"timeout"})

    def given(self, record: type[Any]) -> dict[str, Any]:
        """The fields that are given and that a record declares, by name."""
        found = {name: getattr(self, name, None) for name in settings_of(record)}
        return {name: value for name, value in found.items() if value is not None}


class TokenFields(Body):
    """How tokens are chosen, in all requests."""

    model: Words | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
    max_tokens: Tokens | None = None


class SolveRequest(SearchFields, TokenFields):
    """The body of ``/v1/solve``: a problem and how it is searched.

    Attributes:
        problem: as a user types it.
        stream: send every event as it happens; else the solution alone.
        trace_level: detail of decoding in events, as in `Solver.solve`.
    """

    problem: Annotated[str, Field(min_length=1)]
    stream: bool = True
    trace_level: Detail = TraceDetail.trace_level

    @property
    def generating(self) -> Generating:
        """The same in the form of other requests."""
        given = {name: getattr(self, name) for name in TokenFields.model_fields}
        search = {name: getattr(self, name) for name in SearchFields.model_fields}
        return Generating(**given, arbor=SearchFields(**search))


class StreamOptions(Body):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    """The schema of a `ResponseFormat`; names and descriptions have no effect."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's ``response_format``: a text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError('json_schema goes with the type "json_schema", and that one needs it')
        return self

    @property
    def form(self) -> StepFormat | None:
        """What the text has to match; None: anything."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return StepFormat("json", json.dumps(schema))


class Generating(TokenFields):
    """Fields that chats and completions share."""

    n: Count | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    arbor: SearchFields | None = None
    # without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # only as switched off
    frequency_penalty: Annotated[Any, off(0)] = None
    presence_penalty: Annotated[Any, off(0)] = None
    repetition_penalty: Annotated[Any, off(1)] = None
    length_penalty: Annotated[Any, off(1)] = None
    typical_p: Annotated[Any, off(1)] = None
    min_tokens: Annotated[Any, off(0)] = None
    logit_bias: Annotated[Any, off({})] = None
    ignore_eos: Annotated[Any, off(False)] = None
    use_beam_search: Annotated[Any, off(False)] = None
    include_stop_str_in_output: Annotated[Any, off(False)] = None
    skip_special_tokens: Annotated[Any, off(True)] = None
    extra_body: Annotated[Any, off({})] = None  # its_hub sends it

    @property
    def search(self) -> SearchFields | None:
        """The search; None: plain decoding."""
        return None if self.arbor is None or self.arbor.is_only_a_deadline else self.arbor

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings; none for an empty text."""
        if not self.stop:
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
    # without effect
    cache_control: Any = None


class CalledFunction(Body):
    """A function that a model has called, with its arguments as JSON."""

    name: Words
    arguments: str
    # without effect: what OpenAI's client adds as it parses them
    parsed_arguments: Any = None

    @model_validator(mode="after")
    def _check(self) -> CalledFunction:
        if not isinstance(self.read, dict):
            raise ValueError("arguments are the text of a JSON object")
        return self

    @property
    def read(self) -> Any:
        """The arguments; None: not JSON."""
        try:
            return json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None


class ToolCall(Body):
    """A call in an assistant's message."""

    id: Words | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    # without effect
    index: Annotated[int, Field(ge=0)] | None = None  # of a streamed one
    cache_control: Any = None


class Function(Body):
    """A function that a model may call."""

    name: Words
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """OpenAI's ``tools``: functions."""

    type: Literal["function"]
    function: Function
    # without effect
    cache_control: Any = None


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: Words | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Words | None = None
    # without effect
    cache_control: Any = None
    parsed: Any = None  # the content, as OpenAI's client parses it
    type: Literal["text"] | None = None  # lm-eval sends it
    # only as switched off
    refusal: Annotated[Any, off()] = None
    audio: Annotated[Any, off()] = None
    annotations: Annotated[Any, off([])] = None
    function_call: Annotated[Any, off()] = None

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to an assistant's message")
        if self.tool_call_id and self.role != "tool":
            raise ValueError("tool_call_id belongs to a tool's message")
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        return self

    @property
    def text(self) -> str:
        """The content; empty where there is none."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class ChatRequest(Generating):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, off("auto", "none")] = None
    response_format: ResponseFormat | None = None
    # without effect
    parallel_tool_calls: bool | None = None
    # only as switched off
    add_generation_prompt: Annotated[Any, off(True)] = None
    continue_final_message: Annotated[Any, off(False)] = None
    functions: Annotated[Any, off([])] = None
    function_call: Annotated[Any, off("none", "auto")] = None
    modalities: Annotated[Any, off(["text"])] = None
    audio: Annotated[Any, off()] = None
    prediction: Annotated[Any, off()] = None
    web_search_options: Annotated[Any, off()] = None
    reasoning_effort: Annotated[Any, off("none")] = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return []
        return [
            each.model_dump(exclude_none=True, exclude={"cache_control"})
            for each in self.tools or ()
        ]


class CompletionRequest(Generating):
    """The body of ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Alternatives | None = None  # 0: those of the chosen tokens alone
    # only as switched off
    echo: Annotated[Any, off(False)] = None
    suffix: Annotated[Any, off("")] = None
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
