"""What a solver's settings mean, checked before anything loads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import torch

from arbor import registry
from arbor.engine.completing import Rehydrate
from arbor.engine.engine import Mode
from arbor.engine.loading import Source
from arbor.engine.sampling import Sampling
from arbor.errors import UsageError, unknown_setting
from arbor.kept import msve_file
from arbor.kernels.linear import batch_dependent
from arbor.limits import limit_of
from arbor.retention.base import Allocator, Scorer
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.tasks.base import Boundary

FLASHINFER = "flashinfer"  # both the backend and its package


def component_of(kind: str, given: Any, protocol: type[Any]) -> Any:
    """A component by its name or as it is, which has everything that is asked of its kind.

    Args:
        kind: as in `registry.build`.
        given: a name, a table of settings, a class or a ready component.
        protocol: what the kind has to have; a `Policy` has to be one.

    Raises:
        UsageError: something is missing; says what.
    """
    built = registry.build(kind, given)
    if protocol is Policy:
        wrong = "" if isinstance(built, Policy) else "is no arbor.retention.policy.Policy"
        parts = () if wrong else ((built.allocator, Allocator), (built.scorer, Scorer))
        lacking = [name for part, wanted in parts for name in lacks(part, wanted)]
    else:
        wrong, lacking = "", lacks(built, protocol)
    if lacking:
        wrong = f"has no {' and no '.join(repr(name) for name in lacking)}"
    if wrong:
        name = registry.spec_of(built)["name"]
        raise UsageError(
            "component-incomplete",
            f"'{name}' cannot be the {kind}: it {wrong}.",
            "docs/controller.md and docs/policy.md have examples, ARCHITECTURE.md what other kinds need.",
            kind=kind,
            lacking=lacking,
        )
    return built


def lacks(component: Any, protocol: type[Any]) -> list[str]:
    """Names that a protocol asks for and a component does not have."""
    wanted = {**vars(protocol), **getattr(protocol, "__annotations__", {})}
    return [name for name in wanted if not name.startswith("_") and not hasattr(component, name)]


def msve_of(given: MSVE | str | os.PathLike[str] | None, source: Source) -> MSVE:
    """The block values that were given, or those that were fitted to the model: beside its weights in a directory, in
    `kept_folder` for a model of the Hub."""
    if isinstance(given, MSVE):
        return given
    if given is not None:
        return MSVE.parse(os.fspath(given))
    if not source.path:  # a ready model
        return MSVE()
    folder = Path(source.path)
    fitted = folder / "msve.json"
    if not folder.is_dir():
        fitted = msve_file(source.path, source.revision)
    return MSVE.load(fitted) if fitted.is_file() else MSVE()


def regime_of(mode: str, rehydrate: str | None) -> tuple[Mode, Rehydrate]:
    """Mode and rehydration, checked together.

    Raises:
        UsageError: an unknown one, or two that do not go together.
    """
    if mode not in get_args(Mode):
        raise UsageError(
            "mode", f"there is no mode '{mode}'.", f"Known: {', '.join(get_args(Mode))}."
        )
    chosen = rehydrate or ("off" if mode == "lossy" else "selective")
    if chosen not in get_args(Rehydrate):
        known = ", ".join(get_args(Rehydrate))
        raise UsageError("rehydrate", f"there is no rehydration '{chosen}'.", f"Known: {known}.")
    if mode == "lossless" and chosen == "off":
        raise UsageError(
            "rehydrate", "lossless needs what was evicted back.", "Take mode=lossy, or selective."
        )
    return cast(Mode, mode), cast(Rehydrate, chosen)


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """How tokens are chosen, from some settings of it.

    Raises:
        UsageError: a setting that there is not, or that cannot be meant.
    """
    refuse_unknown("sampling", settings, [each.name for each in dataclasses.fields(Sampling)])
    return Sampling(**settings)


def refuse_unknown(whose: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a setting that there is not.

    Raises:
        UsageError: names it and the nearest one.
    """
    names = sorted(known)
    for name in settings:
        if name not in names:
            raise unknown_setting(f"{whose} has", name, names)


def boundary_of(boundary: Boundary, max_depth: int | None, step_tokens: int | None) -> Boundary:
    """A task's boundary with other limits.

    Raises:
        UsageError: a limit that is no whole number of at least 1.
    """
    return dataclasses.replace(
        boundary,
        max_depth=limit_of("max_depth", max_depth) or boundary.max_depth,
        max_tokens=limit_of("step_tokens", step_tokens) or boundary.max_tokens,
    )


def device_of(device: str) -> torch.device:
    """The device a user means; ``auto`` is CUDA where there is one.

    Raises:
        UsageError: there is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(
            "device", f"--device {device} is no device.", "Use auto, cpu or cuda."
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device", "--device cuda, but torch sees no GPU.", "Use --device cpu.")
    return chosen


def place_of(model: Any, dtype: str, device: str) -> torch.device:
    """The device of a ready model, which stays as it is.

    Raises:
        UsageError: another dtype or device was asked for.
    """
    weight: torch.Tensor = next(model.parameters())
    if dtype not in ("auto", dtype_name(weight.dtype)):
        raise UsageError(
            "dtype",
            f"dtype={dtype}, and the ready model's is {dtype_name(weight.dtype)}.",
            f"Leave dtype out, or pass model.to(torch.{dtype}).",
        )
    if device != "auto":
        chosen = device_of(device)
        if chosen.type != weight.device.type or chosen.index not in (None, weight.device.index):
            raise UsageError(
                "device",
                f"device={device}, and the ready model is on {weight.device}.",
                f"Leave device out, or pass model.to('{device}').",
            )
    return weight.device


def backend_of(backend: str, device: torch.device, deterministic: bool) -> str:
    """The attention backend a user means, checked; ``auto`` stays ``auto``, for what it is depends on the model.

    Raises:
        UnknownName: no such backend.
        UsageError: one that does not go with the other settings, or that cannot run here.
    """
    special = ("auto", FLASHINFER)
    if backend not in (*special, *registry.names("backend")) and ":" not in backend:
        raise registry.unknown("backend", backend, special)
    if deterministic and device.type != "cpu":
        raise UsageError(
            "deterministic",
            f"--deterministic runs on a CPU, and the device is {device}.",
            "Use --device cpu, or leave --deterministic out.",
        )
    if deterministic and backend not in ("auto", "rowwise"):
        raise UsageError(
            "backend",
            f"--deterministic attends row by row, which --attn {backend} does not.",
            "Leave one of them out, or use --attn rowwise.",
        )
    if backend == FLASHINFER and (device.type != "cuda" or find_spec(FLASHINFER) is None):
        raise UsageError(
            "backend",
            "--attn flashinfer needs a GPU and the package flashinfer.",
            "Use --attn torch, or install arbor-search[cuda] on a machine with a GPU.",
        )
    return backend


def refuse_batch_dependent(model: Any) -> None:
    """Refuse to call a model deterministic whose layers are not.

    Raises:
        UsageError: names them.
    """
    found = batch_dependent(model)
    if found:
        raise UsageError(
            "deterministic",
            f"--deterministic: in model_type '{model.config.model_type}' a row's result depends on the other rows of the "
            f"batch in {' and '.join(dict.fromkeys(found.values()))} ({next(iter(found))}, {len(found)} in all).",
            "Leave --deterministic out, or take a model without experts.",
            layers=list(found),
        )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
