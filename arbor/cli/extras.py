"""Extras: the optional packages of arbor, and what each adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from arbor.feature import features


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


_CORE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "adapters": ("LoRA weights (adapter)", ("peft",)),
    "cuda": (
        "FlashInfer's attention on NVIDIA GPUs",
        ("flashinfer-python", "accelerate", "triton"),
    ),
    "gguf": ("models in GGUF files", ("gguf", "accelerate")),
    "hub": ("data sets of the Hub in arbor eval", ("datasets",)),
    "math": ("the grader math", ("math-verify",)),
    "parquet": ("Parquet files in arbor eval", ("pyarrow",)),
    "structured": ("formats of thoughts (step_format)", ("xgrammar",)),
}
EXTRAS: Mapping[str, Extra] = {
    name: Extra(*about)
    for name, about in sorted(
        [*_CORE.items(), *(each for feature in features() for each in feature.extras.items())]
    )
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
