"""Settings: the one configuration of a solver, from the settings that each feature declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from arbor import components, registry
from arbor.aggregate.base import Aggregate
from arbor.budget import Budget
from arbor.controllers.base import Controller
from arbor.engine.hooks import HookSettings
from arbor.engine.mode_names import default_policy, have_own_budgets
from arbor.errors import UsageError
from arbor.events import MOST_INTEGER, Listener
from arbor.model.fetch_costs import FetchSettings
from arbor.model.level_rule import LevelSettings
from arbor.model.sampling_params import Sampling
from arbor.retention.base import Allocator, CalibratedScorer, Scorer
from arbor.retention.policy import Policy
from arbor.run.limits import BoundarySettings, RunLimits
from arbor.run.listeners import MOST_BYTES
from arbor.run.plugin_answers import page_of
from arbor.run.tiers import TierSettings
from arbor.support.setting import (
    checked_values,
    refuse_unknown,
    refuse_unused,
    setting,
    settings_of,
)
from arbor.tasks.base import Task
from arbor.tasks.worded import Worded
from arbor.verifiers.base import Verifier


def resolve_component(kind: str, given: Any, protocol: type[Any]) -> Any:
    """A component with every member that its kind needs.

    Args:
        kind: as in `components.build`.
        given: a name, a table of settings, a class or a ready component; for a policy also an
            allocator, which becomes `Policy(allocator)`.
        protocol: the members needed; for a policy the class `Policy`.

    Raises:
        UsageError: a member is missing; names it.
    """
    built = components.build(kind, given)
    if protocol is Policy:
        if isinstance(built, Allocator):
            built = Policy(built)
        wrong = "" if isinstance(built, Policy) else "is not an arbor.retention.policy.Policy"
        if isinstance(built, Scorer):
            wrong += f" but a scorer: write Policy(allocator, {type(built).__name__}(…))"
        parts = () if wrong else ((built.allocator, Allocator), (built.scorer, Scorer))
        missing = [name for part, wanted in parts for name in missing_members(part, wanted)]
        for part, _ in parts:
            if isinstance(part, type):
                wrong = f"has a class as a part: write {part.__name__}(…)"
    else:
        wrong, missing = "", missing_members(built, protocol)
    if missing:
        wrong = f"has no {' and no '.join(repr(name) for name in missing)}"
    if wrong:
        name = components.spec_of(built)["name"]
        raise UsageError(
            "component-incomplete",
            f"'{name}' cannot be the {kind}: it {wrong}.",
            f"docs/{page_of(kind)}.md has a complete example.",
            kind=kind,
            lacking=missing,
        )
    return built


def missing_members(component: Any, protocol: type[Any]) -> list[str]:
    """Public names of a protocol that a component does not have."""
    wanted = {**vars(protocol), **getattr(protocol, "__annotations__", {})}
    return [name for name in wanted if not name.startswith("_") and not _has(component, name)]


def _has(component: Any, name: str) -> bool:
    try:
        return hasattr(component, name)
    except Exception:  # a property that fails, which its use reports
        return True


CONCURRENCY = 8  # searches in progress at a time by default: docs/experiments/server.md


def _component(kind: str, protocol: type[Any]) -> Any:
    return partial(resolve_component, kind, protocol=protocol)


def _sampling(given: Sampling | Mapping[str, Any]) -> Sampling | Mapping[str, Any]:
    """Sampling, or some of its settings; those of the model are not known yet."""
    if isinstance(given, Sampling):
        return given
    if not isinstance(given, Mapping):
        message = f"sampling = {given!r:.60}: it must be a table of settings."
        raise UsageError("setting-type", message, setting="sampling")
    sampling_with(given)
    return given


def sampling_with(given: Mapping[str, Any], usual: Sampling | None = None) -> Sampling:
    """Sampling with some settings changed.

    Raises:
        UsageError: an unknown setting, or an invalid value.
    """
    refuse_unknown("sampling", given, settings_of(Sampling))
    return Sampling(**{**({} if usual is None else vars(usual)), **given})


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """What is searched, by which parts, and how much KV it keeps.

    Attributes:
        task, controller, verifier: a name, perhaps with settings (``tot,beam=3``), a table
            (``{"name": "tot", "beam": 3}``), or a ready component.
        aggregate: what chooses the answer among the finished paths, likewise: ``best`` (the best
            path's), ``argmax``, ``majority`` or ``weighted``.
        budget: the part kept of what full retention of the same search holds, in (0, 1], and one
            expansion in any case; or ``8192tok``, ``6GiB``; ``full``. See docs/budget.md.
        policy: what blocks off the running paths keep on the device: likewise a name, a table or a
            ready policy; an allocator alone stands for `Policy(allocator)`. By default ``reentry``,
            and ``ends`` in lossy mode where nothing comes back.
        sampling: how tokens are chosen; a mapping changes some of the defaults, which are those of
            the model's `generation_config.json` if it samples, else those of `Sampling`.
        max_expansions: leaves grown in all.
        threads: CPU threads of torch while the solver loads or searches; then torch's number is
            restored. By default one for models below 50 million parameters, whose threads would
            mostly wait, unless ``OMP_NUM_THREADS`` is set; torch's own number for a larger one.
        seed: of every random stream.
        listeners: functions or `Callback`s, called with every event in order. An exception in one
            ends the run; `StopSearch` ends the search with its best so far.
        record_bytes: most bytes of memory in which a solution keeps the packed events of a search
            without a trace, for `Solution.show`, `replay` and `to_html`; 0 keeps none.
        debug: poison freed KV with NaN and check every invariant after every change (slow).
    """

    task: Task = setting(
        "game24",
        "Kind of problem; see 'arbor list tasks'.",
        shown="short",
        metavar="NAME",
        read=_component("task", Task),
        recorded="always",
        names="task",
        requested=True,
    )
    controller: Controller = setting(
        "tot",
        "Chooses the leaves to grow; see 'arbor list controllers'.",
        shown="short",
        metavar="NAME",
        read=_component("controller", Controller),
        recorded="always",
        names="controller",
        requested=True,
    )
    verifier: Verifier = setting(
        "self",
        "Judges thoughts; see 'arbor list verifiers'.",
        metavar="NAME",
        read=_component("verifier", Verifier),
        recorded="always",
        names="verifier",
        requested=True,
    )
    aggregate: Aggregate = setting(
        "best",
        "Chooses the answer of the finished paths; see 'arbor list aggregates'.",
        metavar="NAME",
        read=_component("aggregate", Aggregate),
        names="aggregate",
        requested=True,
    )
    budget: Budget = setting(
        "full",
        "KV to keep: a part of full retention's (0.25), or a size (8192tok, 6GiB).",
        heading="KV budget",
        shown="short",
        metavar="X",
        read=Budget.parse,
        recorded="always",
        requested=True,
    )
    policy: Policy = setting(
        None,
        "Eviction policy (arbor list policies). Default: reentry; lossy: ends.",
        heading="KV budget",
        shown="short",
        metavar="NAME[,KEY=VALUE]",
        read=_component("policy", Policy),
        recorded="always",
        names="policy",
    )
    sampling: Sampling | Mapping[str, Any] | None = setting(
        None,
        "How tokens are chosen: temperature, top_p, top_k, min_p, arithmetic.",
        heading="Sampling",
        shown="code",
        read=_sampling,
        recorded="always",
    )
    seed: int = setting(
        0,
        "Seed of all random streams.",
        heading="Sampling",
        shown="short",
        least=0,
        most=MOST_INTEGER,
        recorded="always",
    )
    max_expansions: int | None = setting(
        None,
        "Most leaves to grow.",
        heading="Limits",
        shown="set",
        least=1,
        recorded="always",
        requested=True,
    )
    threads: int | None = setting(
        None,
        "CPU threads of torch; default: one for small models.",
        heading="Limits",
        shown="set",
        least=1,
        most=1024,
        recorded="never",
    )
    listeners: tuple[Listener, ...] = setting(
        (), "Called with every event.", shown="code", read=tuple, recorded="never"
    )
    record_bytes: int = setting(
        MOST_BYTES, "Most bytes of kept events.", shown="code", least=0, recorded="never"
    )
    debug: bool = setting(False, "Check every invariant.", shown="code", recorded="never")


@dataclass(frozen=True, kw_only=True)
class Settings(
    HookSettings,
    LevelSettings,
    FetchSettings,
    TierSettings,
    BoundarySettings,
    SolverSettings,
):
    """Every setting of a solver, checked; `Solver` and the command line take them by name."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The settings that a user gives; the others have their defaults.

        Raises:
            ArborError: unknown, invalid, or not possible together; nothing was loaded.
        """
        given = {**given}
        known = settings_of(cls)
        for name in given.keys() - known.keys():
            _refuse_of_others(
                name, {kind: given.get(kind, known[kind].default) for kind in components.PARTS}
            )
        if "task" in given or "controller" in given:
            task = given["task"] = known["task"].checked(given.get("task", known["task"].default))
            given["controller"] = with_breadth(
                given.get("controller", known["controller"].default), task
            )
        mode = known["mode"].checked(given.get("mode", known["mode"].default))
        if given.get("rehydrate") is None:
            given["rehydrate"] = "off" if mode == "lossy" else "selective"
        if given.get("policy") is None:
            given["policy"] = default_policy(mode, given["rehydrate"])
        settings = cls(**dict(checked_values(cls, "the solver", given)))
        settings.check_together()
        # attention that reads host memory shares nothing
        return replace(settings, share="off") if settings.staged else settings

    def check_together(self) -> None:
        """Refuses settings that contradict each other.

        Raises:
            UsageError: names them.
        """
        refuse_unused(self)
        self.check_modes()
        if isinstance(self.policy.scorer, CalibratedScorer):
            self.policy.scorer.check_file()
        self.check_tiers()
        policy = self.policy
        check_granularity(policy, self.mode, staged=self.staged)
        if policy.destroys and (self.mode != "lossy" or self.rehydrate != "off"):
            raise UsageError(
                "mode",
                f"the policy '{policy.name}' destroys tokens (the last tier of the memory "
                "hierarchy), and what has left is computed again in this mode.",
                "Take mode=lossy without rehydrate, or another policy.",
            )
        if policy.packs and (self.host_bits is None or not self.staged):
            raise UsageError(
                "host-bits",
                f"the policy '{policy.name}' packs tokens (packed), and no tier has few bits and is "
                "read where it is.",
                "Give host, host_bits=8 and staging too, or a policy that packs nothing.",
            )
        self.check_hooks()

    @property
    def own_budgets(self) -> bool:
        """Whether each of several searches keeps within its own budget."""
        return have_own_budgets(self.mode, self.share, staged=self.staged)

    @property
    def at_once(self) -> int:
        """Searches in progress at a time by default: one where a result depends on others."""
        return CONCURRENCY if self.mode == "lossless" or self.own_budgets else 1

    @property
    def unrecorded(self) -> dict[str, Any]:
        """Settings that no configuration holds: those of this machine and of this process."""
        found = {
            name: getattr(self, name)
            for name, each in settings_of(Settings).items()
            if each.about.recorded == "never"
        }
        return {
            name: value.absolute() if isinstance(value, Path) else value
            for name, value in found.items()
        }


def check_granularity(policy: Policy, mode: str, *, staged: bool = False) -> None:
    """Refuses KV heads with tokens of their own where tokens have to come back one by one, or are
    read in host memory (`staged`).

    Raises:
        UsageError: these settings contradict each other.
    """
    if policy.by_head and mode != "lossy":
        raise UsageError(
            "granularity",
            "granularity=head: a slot that is kept holds another token in each KV head, and lossless "
            "mode keeps exact KV.",
            f"Take mode=lossy, or {policy.by_token}.",
        )
    if policy.by_head and staged:
        raise UsageError(
            "granularity",
            "granularity=head: records in host memory hold whole tokens, and with staging attention "
            "reads them there.",
            f"Leave out staging, or take {policy.by_token}.",
        )


def recorded(settings: Settings) -> dict[str, Any]:
    """Settings as JSON has them; `Settings.of` reads them back.

    Those of the machine are left out, and those that are recorded only where they differ from their
    default.
    """
    found: dict[str, Any] = {}
    for name, each in settings_of(Settings).items():
        value = getattr(settings, name)
        usual = each.about.recorded == "if_set" and value == each.checked(each.default)
        if each.about.recorded == "never" or usual:
            continue
        of_component = each.about.names in registry.KINDS
        found[name] = components.spec_of(value) if of_component else _plain(value)
    return found


def recorded_of_machine(settings: Settings) -> dict[str, Any]:
    """Settings of this machine that differ from their default, as JSON has them, for a user who
    saves what he gave.

    Trust is never among them, so that no file gives it.
    """
    known = settings_of(Settings)
    return {
        name: _plain(value)
        for name, value in settings.unrecorded.items()
        for each in [known[name]]
        if each.about.shown != "code" and name != "trust_remote_code"
        if value != each.checked(each.default)
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)


# by name of a controller: what ends in minutes on two cores with 1.5 billion parameters
NARROW: Mapping[str, Mapping[str, int]] = {
    "tot": {"beam": 2, "width": 3, "max_visited": 24},
    "beam": {"beam_size": 2, "width": 3},
    "dvts": {"subtrees": 2, "width": 3},
    "rebase": {"width": 6},
    "ets": {"width": 6},
    "best-first": {"width": 3, "expansions": 8},
    "dpts": {"width": 3, "max_visited": 24},
    "mcts": {"width": 3, "simulations": 8},
    "rap": {"width": 3, "simulations": 8},
    "rstar": {"width": 3, "simulations": 8},
    "rest-mcts": {"width": 3, "simulations": 8},
    "ab-mcts": {"thoughts": 24},
}


def with_breadth(controller: Any, task: Task) -> Any:
    """A controller as a user names it, with the breadth that the task's searches have by default.

    Settings that are given stay; a ready controller is left as it is.
    """
    if not isinstance(task, Worded):
        return controller
    if isinstance(controller, str):
        name, given = components.split_spec(controller)
    elif isinstance(controller, Mapping):
        name, given = str(controller.get("name")), dict(controller)
    else:
        return controller
    return {**NARROW.get(name, {}), **given, "name": name}


def _refuse_of_others(name: str, chosen: Mapping[str, Any]) -> None:
    """Refuse a setting that is not the solver's and belongs to what it is made of, or to a run.

    Args:
        name: the setting.
        chosen: the components, as a user gives them, by kind.

    Raises:
        UsageError: says where it belongs.
    """
    places = [
        f"Solver({kind}='{label},{name}=…')"
        for kind, given in chosen.items()
        for label, component in [_named(kind, given)]
        if name in components.settings_of(component)
    ]
    if name in settings_of(Sampling):
        places.append(f"Solver(sampling={{'{name}': …}})")
    if name in {*settings_of(RunLimits), "trace"}:
        places.append(f"solve(…, {name}=…)")
    if places:
        what = f"'{name}' is no setting of the solver itself."
        raise UsageError("unknown-setting", what, f"Give {' or '.join(places)}.", setting=name)


def _named(kind: str, given: Any) -> tuple[str, Any]:
    """The name of a component that a user gives, and what has its settings."""
    if isinstance(given, Mapping):
        given = given.get("name", "")
    if not isinstance(given, str):
        return registry.name_of(given), given
    name = components.split_spec(given)[0]
    return name, registry.resolve(kind, name)
