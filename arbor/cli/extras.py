"""Extras: the optional packages of arbor, and what each adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, slots=True)
class Extra:
    """Optional packages, ``pip install 'arbor-search[NAME]'``.

    Attributes:
        adds: what works with them.
        packages: names of distributions.
    """

    adds: str
    packages: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages that are not installed."""
        return tuple(each for each in self.packages if version_of(each) is None)


EXTRAS: Mapping[str, Extra] = {
    "adapters": Extra("LoRA weights (adapter)", ("peft",)),
    "cuda": Extra(
        "FlashInfer's attention on NVIDIA GPUs", ("flashinfer-python", "accelerate", "triton")
    ),
    "gguf": Extra("models in GGUF files", ("gguf", "accelerate")),
    "hub": Extra("data sets of the Hub in arbor eval", ("datasets",)),
    "inspect": Extra("inspect_ai's provider arbor", ("inspect_ai",)),
    "lm-eval": Extra("lm-eval's model arbor", ("lm_eval",)),
    "math": Extra("the grader math", ("math-verify",)),
    "otel": Extra("searches as spans of OpenTelemetry", ("opentelemetry-sdk",)),
    "parquet": Extra("Parquet files in arbor eval", ("pyarrow",)),
    "ray": Extra("arbor eval --workers", ("ray",)),
    "server": Extra("arbor serve", ("fastapi", "prometheus_client", "pydantic", "uvicorn")),
    "structured": Extra("formats of thoughts (step_format)", ("xgrammar",)),
}


def extra_states() -> dict[str, str]:
    """Each extra: ``installed``, or what it would add and the packages it lacks."""
    return {
        name: f"adds {extra.adds}; not installed: {', '.join(extra.missing)}"
        if extra.missing
        else f"installed: {extra.adds}"
        for name, extra in EXTRAS.items()
    }


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
