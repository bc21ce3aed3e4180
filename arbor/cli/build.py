"""From options to a solver: everything that can be checked without torch is checked before torch is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from arbor import components, registry
from arbor.budget import Budget
from arbor.errors import UsageError, unknown_setting

if TYPE_CHECKING:
    from arbor.solver import Solver

KINDS = ("controller", "verifier", "task", "policy")
PARTS = (*KINDS, "sampling")
SWITCH = {"true": True, "false": False}
SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number"),
    "top_p": (float, "a number"),
    "top_k": (int, "a number"),
    "arithmetic": (SWITCH.__getitem__, "true or false"),
}


def build_solver(given: Mapping[str, Any], problem: str | None = None) -> Solver:
    """A solver from the options of the command line.

    Args:
        given: option name -> value.
        problem: checked by the task, if given.

    Raises:
        ArborError: what cannot be meant.
    """
    Budget.parse(given["budget"])
    for kind in KINDS:
        name, _ = components.split_spec(given[kind])
        if ":" not in name and name not in registry.names(kind):
            registry.resolve(kind, name)  # raises, and says the nearest name
    settings = parse_settings(given)
    task = components.build("task", given["task"], **settings["task"])
    if problem is not None:
        task.parse(problem)
    controller = components.build("controller", given["controller"], **settings["controller"])

    from arbor.solver import Solver

    flags = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    return Solver(
        given["model"],
        revision=given["revision"],
        trust_remote_code=given["trust_remote_code"],
        task=task,
        controller=controller,
        verifier=components.build("verifier", given["verifier"], **settings["verifier"]),
        budget=given["budget"],
        policy=components.build("policy", given["policy"], **settings["policy"]),
        mode=given["mode"],
        rehydrate=given["rehydrate"],
        msve=given["msve"],
        sampling=settings["sampling"] | flags,
        max_depth=given["depth"],
        step_tokens=given["step_tokens"],
        max_expansions=given.get("max_expansions"),
        dtype=given["dtype"],
        device=given["device"],
        backend=given["attn"],
        seed=given.get("seed", 0),
        deterministic=given.get("deterministic", False),
    )


def known_policy(text: str) -> str:
    """A policy with its settings as ``NAME,KEY=VALUE``, written in one way; it is only looked for.

    Raises:
        UsageError: no such policy, or what follows is not KEY=VALUE.
    """
    name, settings = components.split_spec(text)
    if ":" not in name:
        registry.resolve("policy", name)  # raises, and says the nearest name
    return ",".join((name, *(f"{key}={value}" for key, value in settings.items())))


def parse_settings(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What ``--set`` asked for, by part: ``width=4`` goes to the part that has it, ``verifier.width=4`` to the verifier.

    Raises:
        UsageError: not KEY=VALUE, or a key that no part has, or that several have.
    """
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for setting in given["set"]:
        key, equals, value = setting.partition("=")
        part, dot, name = key.strip().rpartition(".")
        if not equals or not name or (dot and part not in parts):
            raise UsageError(
                "setting",
                f"--set {setting}: it is neither KEY=VALUE nor PART.KEY=VALUE.",
                f"PART is one of {', '.join(PARTS)}.",
                setting=setting,
            )
        part = part or _owner(name, given, setting)
        if part != "sampling":
            parts[part][name] = value.strip()  # the registry reads it by the field's type
            continue
        if name not in SAMPLING:
            raise unknown_setting("there is", name, [f"sampling.{known}" for known in SAMPLING])
        read, wanted = SAMPLING[name]
        try:
            parts[part][name] = read(value.strip().lower())
        except (ValueError, KeyError) as error:
            text = f"--set {setting}: '{value}' is not {wanted}."
            raise UsageError("setting-type", text) from error
    return parts


def _owner(name: str, given: Mapping[str, Any], setting: str) -> str:
    """The one part that has a setting of this name."""
    owners = {known: ["sampling"] for known in SAMPLING}
    for kind in KINDS:
        component = registry.resolve(kind, components.split_spec(given[kind])[0])
        if dataclasses.is_dataclass(component):
            for setting_name in components.settings_of(component):
                owners.setdefault(setting_name, []).append(kind)
    if name not in owners:
        known = sorted(f"{owner}.{key}" for key, those in owners.items() for owner in those)
        raise unknown_setting("there is", name, known)
    if len(owners[name]) > 1:
        choices = " or ".join(f"--set {owner}.{setting}" for owner in owners[name])
        raise UsageError("setting-ambiguous", f"--set {setting}: whose '{name}'?", f"{choices}.")
    return owners[name][0]
