"""Settings of a solver, checked and resolved before anything loads."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast, get_args

from arbor import components
from arbor.engine.hooks import BranchHook
from arbor.engine.mode_names import SIMILAR, Mode, Rehydrate, Share
from arbor.errors import UsageError, unknown_setting
from arbor.feature import hook
from arbor.model.fetch_costs import FetchCosts
from arbor.model.level_rule import LevelRule
from arbor.model.loading import ModelLocation
from arbor.model.sampling_params import Sampling
from arbor.retention.base import CalibratedScorer
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.run.limits import (
    check_count,
    check_rehydration,
    check_sharing,
    check_staging,
    check_tiers,
)
from arbor.run.plugin_answers import unchecked
from arbor.run.tier_sizes import TierSizes
from arbor.support.cache_dir import msve_file
from arbor.tasks.base import BlockLimits, Task
from arbor.tasks.step_format import StepFormat
from arbor.tasks.worded import Worded
from arbor.verifiers.base import TakesCalibration, Verifier, parts_of
from arbor.verifiers.exact import Exact

P = ParamSpec("P")
R = TypeVar("R")

# settings of a solver that are texts, and those that are true or false
TEXTS = (
    "model",
    "revision",
    "adapter",
    "mode",
    "rehydrate",
    "share",
    "fetch",
    "disk_dir",
    "keep_kv",
    "kv_probe",
    "branch_stop",
    "msve",
    "dtype",
    "kv_dtype",
    "weights",
    "device",
    "backend",
)
KV_PROBE = ("kept", "measure", "off")  # or the numbers of a measurement
FETCH = ("auto", "always")  # or the numbers of a measurement
SWITCHES = ("deterministic", "cuda_graphs", "debug")


def resolve_msve(given: MSVE | str | os.PathLike[str] | None, source: ModelLocation) -> MSVE:
    """The block values given, or those fitted to the model, or the defaults.

    Fitted values lie in the model's directory, or in the cache directory for a model of the Hub.
    """
    if isinstance(given, MSVE):
        return given
    if given is not None:
        return MSVE.parse(os.fspath(given))
    if not source.path:  # a ready model
        return MSVE()
    folder = Path(source.place)
    fitted = folder / "msve.json"
    if not folder.is_dir():
        fitted = msve_file(source.place, source.revision)
    return MSVE.load(fitted) if fitted.is_file() else MSVE()


def check_calibration(policy: Policy) -> None:
    """Read the file of a calibrated scorer, before anything loads.

    Raises:
        UsageError: the file cannot be read, or holds something else.
    """
    if isinstance(policy.scorer, CalibratedScorer):
        policy.scorer.check_file()


def resolve_verifier(verifier: Verifier, task: Task, source: ModelLocation) -> Verifier:
    """A verifier with the thresholds calibrated for the model and the task, where it takes any.

    They lie in the model's directory, or in the cache directory for a model of the Hub.

    Raises:
        UsageError: the exact verifier is asked for, and the task has no exact checker.
    """
    exact = any(isinstance(part, Exact) for part in parts_of(verifier))
    if exact and isinstance(own := unchecked(task), Worded) and type(own).value is Worded.value:
        raise own.no_exact_checker()
    if not isinstance(verifier, TakesCalibration) or not source.path:
        return verifier
    name = str(components.spec_of(task)["name"])
    return verifier.calibrated(source.place, source.revision, name)


def resolve_mode(mode: str, rehydrate: str | None) -> tuple[Mode, Rehydrate]:
    """Mode and rehydration, checked together.

    Raises:
        UsageError: unknown, or not possible together.
    """
    if mode not in get_args(Mode):
        raise UsageError("mode", f"unknown mode '{mode}'.", f"Known: {', '.join(get_args(Mode))}.")
    chosen = rehydrate or ("off" if mode == "lossy" else "selective")
    if chosen not in get_args(Rehydrate):
        known = ", ".join(get_args(Rehydrate))
        raise UsageError("rehydrate", f"unknown rehydration '{chosen}'.", f"Known: {known}.")
    check_rehydration(mode, chosen)
    return cast(Mode, mode), cast(Rehydrate, chosen)


def resolve_tiers(
    host: str | int | None,
    disk: str | int | None,
    disk_dir: str | os.PathLike[str] | None,
    rehydrate: str,
    *,
    host_bits: int | None = None,
    staging: str | int | None = None,
    mode: str = "lossless",
    kv_dtype: str = "auto",
) -> TierSizes:
    """Sizes of the lower tiers, checked together with mode, rehydration and dtype of the KV.

    Raises:
        UsageError: not a size, nothing ever comes back, or KV may be neither packed nor read in
            host memory.
    """
    sizes = TierSizes.parse(host, disk, disk_dir, host_bits, staging)
    check_staging(sizes.staging is not None, mode, rehydrate)
    returns = bool(sizes) and sizes.staging is None  # else it is read where it is
    check_tiers(returns, rehydrate, host_bits=host_bits, mode=mode, kv_dtype=kv_dtype)
    return sizes


def resolve_share(share: str, threshold: float, mode: str, rehydrate: str | None) -> Share:
    """A kind of sharing, checked together with its threshold and the mode.

    Raises:
        UsageError: unknown, or not possible together.
    """
    check_sharing(share, mode, rehydrate)
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not (number and -1 <= threshold <= 1):
        raise UsageError(
            "share", f"share_threshold is {threshold!r}.", "It is a cosine, between -1 and 1."
        )
    if share in SIMILAR:
        hook_for("share", share)
    return cast(Share, share)


def resolve_branch_stop(rule: BranchHook | str | None, mode: str) -> BranchHook | None:
    """A rule by which branches end early, checked together with the mode.

    Raises:
        UsageError: an invalid rule, or lossy mode.
    """
    if rule is None:
        return None
    if mode == "lossy":
        raise UsageError(
            "branch-stop",
            "branches are compared at the same length, and in lossy mode not all of them decode "
            "together.",
            "Use --branch-stop in lossless mode.",
        )
    parsed: BranchHook = hook_for("branch_stop", str(rule))(rule)
    return parsed


def check_kv_probe(setting: str) -> str:
    """A setting of the KV probe.

    Raises:
        UsageError: unknown.
    """
    if setting not in KV_PROBE:
        LevelRule.parse(setting)
    if setting == "measure":
        hook_for("kv_probe", setting)
    return setting


def hook_for(setting: str, value: str) -> Any:
    """What takes part in the engine's work for a setting.

    Raises:
        UsageError: the folder that has it was taken out.
    """
    found = hook(setting)
    if found is None:
        raise UsageError(
            setting.replace("_", "-"),
            f"{setting}={value}: this copy of arbor lacks the folder of arbor/papers that does it.",
            "Leave the setting out, or install arbor-search whole.",
        )
    return found


def check_fetch(setting: str) -> str:
    """A setting of `Solver.fetch`.

    Raises:
        UsageError: unknown.
    """
    if setting not in FETCH:
        FetchCosts.parse(setting)
    return setting


def resolve_sampling(settings: Mapping[str, Any], defaults: Sampling | None = None) -> Sampling:
    """Sampling with some settings changed.

    Args:
        settings: by name.
        defaults: the other settings.

    Raises:
        UsageError: an unknown setting, or an invalid value.
    """
    refuse_unknown("sampling", settings, [each.name for each in dataclasses.fields(Sampling)])
    return dataclasses.replace(defaults or Sampling(), **settings)


def refuse_unknown(owner: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an unknown setting.

    Raises:
        UsageError: names it and the closest known one.
    """
    names = sorted(known)
    for name in settings:
        if name not in names:
            raise unknown_setting(f"{owner} has", name, names)


def known_keywords(owner: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a call: an unknown keyword is a `UsageError` that names the closest known one.

    Args:
        owner: whose settings the keywords are, as in ``the solver``.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        _, *known = inspect.signature(call).parameters  # after self

        @functools.wraps(call)
        def checked(*args: P.args, **settings: P.kwargs) -> R:
            refuse_unknown(owner, settings, known)
            return call(*args, **settings)

        return checked

    return decorate


def check_plain_types(settings: Mapping[str, Any]) -> None:
    """Refuses values of a configuration that are of another type than their setting.

    Raises:
        UsageError: names the setting and its type.
    """
    for names, kind, wanted in (
        (TEXTS, str | os.PathLike, "text"),
        (SWITCHES, bool, "true or false"),
    ):
        for name in names:
            value = settings.get(name)
            if value is not None and not isinstance(value, kind):
                raise UsageError(
                    "setting-type", f"{name} = {value}: it must be {wanted}.", setting=name
                )


def resolve_boundary(
    boundary: BlockLimits,
    max_depth: int | None,
    step_tokens: int | None,
    step_format: StepFormat | str | Mapping[str, Any] | None = None,
    path_tokens: int | None = None,
) -> BlockLimits:
    """A task's boundary with other limits; None keeps the task's.

    Raises:
        UsageError: a limit that is not a whole number of at least 1, or an invalid format.
        InputError: the file of a format cannot be read.
    """
    form = boundary.form if step_format is None else StepFormat.parse(step_format)
    if form is not None and form is not boundary.form:
        from arbor.engine.grammar import check_format

        check_format(form)
    return dataclasses.replace(
        boundary,
        max_depth=check_count("max_depth", max_depth) or boundary.max_depth,
        max_tokens=check_count("step_tokens", step_tokens) or boundary.max_tokens,
        path_tokens=check_count("path_tokens", path_tokens) or boundary.path_tokens,
        form=form,
    )
