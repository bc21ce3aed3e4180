"""Traces as spans of OpenTelemetry."""

from arbor.feature import Feature

FEATURE = Feature(parts={"format": {"otlp": "arbor.integrations.telemetry.otlp:to_otlp"}})
