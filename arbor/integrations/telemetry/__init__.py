"""Searches as spans of OpenTelemetry, while they run and of a trace."""

from arbor.feature import Feature

FEATURE = Feature(
    parts={"format": {"otlp": "arbor.integrations.telemetry.otlp:to_otlp"}},
    extras={"otel": ("searches as spans of OpenTelemetry", ("opentelemetry-sdk",))},
)
