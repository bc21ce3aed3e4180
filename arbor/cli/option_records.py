"""Options of a command as a typed record, made once from what click has parsed."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from arbor.cli.component_settings import KINDS
from arbor.cli.configure import all_settings
from arbor.engine.mode_names import default_policy
from arbor.events import Detail

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from arbor.run.limits import RunLimits

    Record = TypeVar("Record", bound=DataclassInstance)


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """Options that build a solver, named as on the command line.

    Attributes:
        task, controller, verifier, aggregate, policy: a name, perhaps with settings as
            ``,KEY=VALUE``.
        audit_verify: sets the verifier's setting `audit`.
        set: further settings of components, each as ``KEY=VALUE`` or ``PART.KEY=VALUE``.
        temperature, top_p, top_k: None for the model's own.

    The other attributes are the arguments of `Solver`.
    """

    model: str
    revision: str | None
    trust_remote_code: bool
    dtype: str
    device: str
    backend: str
    task: str
    controller: str
    verifier: str
    max_depth: int | None
    path_tokens: int | None
    step_tokens: int | None
    set: tuple[str, ...]
    budget: str
    policy: str | None
    mode: Literal["lossless", "lossy"]
    rehydrate: Literal["selective", "span", "off"] | None
    msve: str | None
    max_expansions: int | None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    threads: int | None = None
    aggregate: str = "best"
    step_format: str | None = None
    branch_stop: str | None = None
    audit_verify: bool = False
    host: str | None = None
    host_bits: int | None = None
    staging: str | None = None
    disk: str | None = None
    disk_dir: str | None = None
    fetch: str = "auto"
    keep_kv: str | None = None
    keep_kv_size: str = "4GiB"
    share: Literal["exact", "prompts", "off", "similar", "audit"] = "exact"
    share_threshold: float = 0.82
    kv_probe: str = "kept"
    kv_dtype: str = "auto"
    weights: str = "auto"
    seed: int = 0
    deterministic: bool = False
    cuda_graphs: bool = True
    adapter: str | None = None

    @property
    def components(self) -> dict[str, str]:
        """Kind -> name, perhaps with settings."""
        policy = self.policy or default_policy(self.mode, self.rehydrate)
        return {kind: getattr(self, kind) for kind in KINDS} | {"policy": policy}

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling settings that were given."""
        asked = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run that are not settings of the solver.

    Attributes:
        timeout: seconds.
        max_tokens: of finished thoughts.
        first, confidence: see `Request`.
    """

    timeout: float | None
    max_tokens: int | None
    first: Literal["answer", "verified"] | None = None
    confidence: float | None = None

    @property
    def limits(self) -> RunLimits:
        """The limits as keyword arguments of a run."""
        return {
            "timeout": self.timeout,
            "max_tokens": self.max_tokens,
            "first": self.first,
            "confidence": self.confidence,
        }


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What a trace holds.

    Attributes:
        trace_level: detail of decoding.
        trace_text: whether the words of problem, thoughts and answer are in it.
    """

    trace_level: Detail
    trace_text: Literal["full", "none"]


def read_options(record: type[Record], values: Mapping[str, Any]) -> Record:
    """A command's options as a record.

    Args:
        record: a dataclass with a field for each option, or for a record of several.
        values: the options by name, as click gives them; `set` is completed from ``--config``.
    """
    if "set" in values:
        values = {**values, "set": all_settings(values)}
    return _record_of(record, values)


def _record_of(record: type[Record], values: Mapping[str, Any]) -> Record:
    hints = typing.get_type_hints(record)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        if dataclasses.is_dataclass(hints[field.name]):
            fields[field.name] = _record_of(hints[field.name], values)
        elif field.name in values:
            fields[field.name] = values[field.name]
    return record(**fields)
