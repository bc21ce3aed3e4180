"""Arms of a comparison, as ``--arm`` names them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from arbor.cli.record_options import SolverOptions, value_of
from arbor.components import PARTS, split_spec
from arbor.errors import UsageError
from arbor.model.sampling_params import Sampling
from arbor.run.limits import RunLimits
from arbor.support.setting import settings_of

# settings that are the same for all arms, besides those of the model
SHARED = (
    "task",
    "controller",
    "budget",
    "seed",
    "threads",
    "deterministic",
    "disk_dir",
    "max_tokens",
)
_FOLDERS = re.compile(r"[^\s=,;][^=,;]*/(?=[^/=,;]*\.py:)")


@dataclass(frozen=True, slots=True)
class Arm:
    """One contestant of a comparison.

    Attributes:
        label: its name in tables, unique.
        controller: a name, perhaps with settings as ``,KEY=VALUE``.
        options: settings of the solver and limits of a run that replace the comparison's.
        settings: further settings of components, as ``--set`` takes them.
    """

    label: str
    controller: str
    options: Mapping[str, Any]
    settings: tuple[str, ...]

    def solver_options(self, shared: SolverOptions) -> SolverOptions:
        """The options of its solver; its own win over those of the comparison."""
        known = SolverOptions.known()
        own = {name: value for name, value in self.options.items() if name in known}
        own["controller"] = self.controller
        given: dict[str, Mapping[str, Any]] = {
            kind: split_spec(own.get(kind) or "")[1] for kind in PARTS
        }
        given["sampling"] = {name: own.get(name) for name in settings_of(Sampling)}
        rows = [
            f"{part}.{key}={value}"
            for part, own_of_part in given.items()
            for key, value in own_of_part.items()
            if value is not None
        ]
        return dataclasses.replace(shared.having(**own), set=(*shared.set, *rows, *self.settings))

    def run_options(self, shared: RunLimits, max_tokens: int | None) -> RunLimits:
        """The limits of its searches."""
        known = settings_of(RunLimits)
        own = {name: value for name, value in self.options.items() if name in known}
        return dataclasses.replace(shared, max_tokens=max_tokens, **own)


def read_arms(texts: Sequence[str], ctx: click.Context) -> list[Arm]:
    """Arms from ``[LABEL=]CONTROLLER[,KEY=VALUE…][;OPTION=VALUE…]``.

    An OPTION is a setting of the solver, a limit of a run, or a setting as ``--set`` takes it. An
    arm without a label is named by its text, files in it without their folders.

    Raises:
        UsageError: another form, a value that the option refuses, or a label given twice.
    """
    arms = [_arm(text, ctx) for text in texts]
    labels = [arm.label for arm in arms]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise UsageError(
            "arm",
            f"two arms are called '{twice[0]}'.",
            f"Give each a label of its own: --arm 'other={arms[labels.index(twice[0])].controller}'.",
            label=twice[0],
        )
    return arms


def _arm(text: str, ctx: click.Context) -> Arm:
    head, *parts = (part.strip() for part in text.split(";"))
    name, comma, rest = head.partition(",")
    label, equals, controller = name.partition("=")
    if not equals:
        label, controller = _FOLDERS.sub("", text.strip()), name
    if not label.strip() or not controller.strip():
        raise _wrong(text, "it names no controller")
    known = SolverOptions.known() | settings_of(RunLimits)
    others = {each.name for each in ctx.command.params} - {"set"}
    options: dict[str, Any] = {}
    settings = []
    for part in parts:
        key, equals, value = (each.strip() for each in part.partition("="))
        name = key.removeprefix("--").replace("-", "_")
        if not equals or not key or not value:
            raise _wrong(text, f"'{part}' is not OPTION=VALUE")
        if name in options:
            raise _wrong(text, f"it has '{key}' twice")
        each = known.get(name)
        if each is not None and name not in SHARED and each.about.heading != "Model":
            options[name] = value_of(each, value)
            if each.about.read is None:  # else it is read when the solver is built
                each.checked(options[name])
        elif each is not None or name in others:
            raise _wrong(text, f"'{key}' is the same for all arms")
        else:
            settings.append(part)
    return Arm(label.strip(), f"{controller.strip()}{comma}{rest}", options, tuple(settings))


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(
        "arm",
        f"--arm '{text}': {why}.",
        "As in --arm dpts or --arm 'greedy=chain;temperature=0'.",
        arm=text,
    )
