"""A trace as spans of OpenTelemetry: the JSON of its protocol (OTLP), which collectors read.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any

from arbor._version import __version__
from arbor.integrations.telemetry.spans import Attributes, Moment, SpanBegins, SpanFold
from arbor.trace.read import Trace

INTERNAL = 1  # the kind of a span: neither client nor server
OK, ERROR = 1, 2


def to_otlp(trace: Trace) -> dict[str, Any]:
    """A trace as the body of a request to ``/v1/traces``; dump it as JSON.

    Ids follow from the run's name, so that a trace is converted to the same spans every time.
    """
    header = trace.header
    run = str(trace.path) if header is None else header.run
    origin_ns = 0 if header is None else _nanoseconds(header.created)
    trace_id = _digest(run, 16)
    fold = SpanFold(words=trace.words)
    spans: dict[str, dict[str, Any]] = {}
    changes = [
        change
        for event, seconds in zip(trace.events, trace.times, strict=True)
        for change in fold.feed(event, seconds)
    ]
    for change in [*changes, *fold.close()]:
        at = str(origin_ns + round(change.seconds * 1e9))
        if isinstance(change, SpanBegins):
            spans[change.key] = {
                "traceId": trace_id,
                "spanId": _digest(f"{run} {change.key}", 8),
                **(
                    {}
                    if change.parent is None
                    else {"parentSpanId": spans[change.parent]["spanId"]}
                ),
                "name": change.name,
                "kind": INTERNAL,
                "startTimeUnixNano": at,
                "attributes": _pairs(change.attributes),
                "events": [],
            }
        elif isinstance(change, Moment):
            moment = {"timeUnixNano": at, "name": change.name}
            spans[change.key]["events"].append({**moment, "attributes": _pairs(change.attributes)})
        else:
            span = spans[change.key]
            span["endTimeUnixNano"] = at
            span["attributes"] += _pairs(change.attributes)
            message = {"message": change.error} if change.error else {}
            span["status"] = {"code": ERROR if change.error else OK, **message}
    resource = {"service.name": "arbor", "service.version": __version__}
    scope = {"name": "arbor", "version": __version__}
    scoped = {"scope": scope, "spans": list(spans.values())}
    return {
        "resourceSpans": [{"resource": {"attributes": _pairs(resource)}, "scopeSpans": [scoped]}]
    }


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=size).hexdigest()


def _nanoseconds(created: str) -> int:
    """A time of ISO 8601 in nanoseconds since 1970; 0 for anything else."""
    try:
        return round(datetime.fromisoformat(created).timestamp() * 1000) * 1_000_000
    except (ValueError, OverflowError, OSError):
        return 0


def _pairs(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    """A value as the protocol writes it: integers of 64 bits are texts."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
