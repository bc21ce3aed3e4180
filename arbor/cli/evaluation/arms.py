"""Arms of a comparison, as ``--arm`` names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from arbor.cli.option_records import RunOptions, SolverOptions
from arbor.errors import UsageError

# options that an arm may have of its own; the others are the same for all
OF_SOLVER = (
    "verifier",
    "aggregate",
    "policy",
    "mode",
    "rehydrate",
    "host",
    "host_bits",
    "staging",
    "disk",
    "fetch",
    "max_depth",
    "path_tokens",
    "step_tokens",
    "max_expansions",
    "temperature",
    "top_p",
    "top_k",
)
OF_RUN = ("timeout", "first", "confidence")


@dataclass(frozen=True, slots=True)
class Arm:
    """One contestant of a comparison.

    Attributes:
        label: its name in tables, unique.
        controller: a name, perhaps with settings as ``,KEY=VALUE``.
        options: those of `OF_SOLVER` and `OF_RUN` that replace the comparison's.
        settings: further settings of components, as ``--set`` takes them.
    """

    label: str
    controller: str
    options: Mapping[str, Any]
    settings: tuple[str, ...]

    def solver_options(self, shared: SolverOptions) -> SolverOptions:
        """The options of its solver."""
        own = {name: value for name, value in self.options.items() if name in OF_SOLVER}
        settings = (*shared.set, *self.settings)
        return dataclasses.replace(shared, controller=self.controller, set=settings, **own)

    def run_options(self, shared: RunOptions, max_tokens: int | None) -> RunOptions:
        """The limits of its searches."""
        own = {name: value for name, value in self.options.items() if name in OF_RUN}
        return dataclasses.replace(shared, max_tokens=max_tokens, **own)


def read_arms(texts: Sequence[str], ctx: click.Context) -> list[Arm]:
    """Arms from ``[LABEL=]CONTROLLER[,KEY=VALUE…][;OPTION=VALUE…]``.

    An OPTION is one of `OF_SOLVER` or `OF_RUN`, or a setting as ``--set`` takes it. An arm without
    a label is named by its text.

    Args:
        texts: one for each arm.
        ctx: of the command, whose options read the values.

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
        label, controller = text.strip(), name
    if not label.strip() or not controller.strip():
        raise _wrong(text, "it names no controller")
    known = {each.name: each for each in ctx.command.params}
    options: dict[str, Any] = {}
    settings = []
    for part in parts:
        key, equals, value = (each.strip() for each in part.partition("="))
        option = key.removeprefix("--").replace("-", "_")
        if not equals or not key or not value:
            raise _wrong(text, f"'{part}' is not OPTION=VALUE")
        if option in options:
            raise _wrong(text, f"it has '{key}' twice")
        if option in (*OF_SOLVER, *OF_RUN):
            options[option] = known[option].type_cast_value(ctx, value)
        elif option in known and option != "set":
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
