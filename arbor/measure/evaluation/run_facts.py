"""What a run was made with: model, search, settings, seed, version and date, for its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arbor.components import setting_text
from arbor.errors import ArborError
from arbor.measure.evaluation.folder import CONFIG, SAMPLES
from arbor.measure.evaluation.list_page import escaped
from arbor.run.config import read_config

_COMPONENTS = {
    "controller": "search",
    "verifier": "verifier",
    "policy": "policy",
    "aggregate": "aggregate",
}
_PLAIN = ("budget", "mode", "seed")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run was made with.

    Attributes:
        facts: name -> text, in the order of a page.
        settings: the text of its ``run.toml``.
        ended: when its last search ended.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""
    ended: str = ""

    @classmethod
    def read(cls, folder: Path) -> RunFacts:
        """Those of a run's folder; none of a folder without readable settings."""
        try:
            config = read_config(folder / CONFIG)
            text = (folder / CONFIG).read_text(encoding="utf-8")
            written = (folder / SAMPLES).stat().st_mtime
        except (OSError, ArborError):
            return cls()
        ended = f"{datetime.fromtimestamp(written, UTC):%Y-%m-%d %H:%M} UTC"
        return cls(dict(_facts(config)), text, ended)


def shared_facts(runs: Sequence[RunFacts]) -> dict[str, str]:
    """The facts that all runs have; none without a run."""
    if not runs:
        return {}
    first, *others = runs
    return {
        name: text
        for name, text in first.facts.items()
        if all(other.facts.get(name) == text for other in others)
    }


def facts_html(runs: Sequence[RunFacts]) -> str:
    """What all runs were made with, and every setting of the first, folded away; empty for none."""
    facts = shared_facts(runs)
    if not facts:
        return ""
    facts["last search"] = max(run.ended for run in runs)
    rows = "".join(f"<dt>{escaped(n)}</dt><dd>{escaped(text)}</dd>" for n, text in facts.items())
    what = "every setting" if len(runs) == 1 else "every setting of the first run"
    lines = "\n".join(map(escaped, runs[0].settings.splitlines()))
    return (
        f'<dl class="facts">{rows}</dl>'
        f"<details><summary>{what}</summary><pre>{lines}</pre></details>\n"
    )


def _facts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", str(config.get("model") or "builtin:sapling")
    for key, name in _COMPONENTS.items():
        if spec := config.get(key):
            yield name, _spec(spec)
    if isinstance(task := config.get("task"), Mapping):
        yield "task", str(task.get("name"))
    if isinstance(sampling := config.get("sampling"), Mapping):
        yield "sampling", ", ".join(_settings(sampling))
    for name in _PLAIN:
        if name in config:
            yield name, str(config[name])
    yield "arbor", str(config.get("arbor", ""))


def _spec(spec: Any) -> str:
    """A component with its own settings: ``tot, beam=2, width=3``; anything else as it is."""
    if not isinstance(spec, Mapping):
        return str(spec)
    return ", ".join((str(spec.get("name")), *_settings(spec)))


def _settings(spec: Mapping[str, Any]) -> Iterator[str]:
    for name, value in spec.items():
        if name != "name" and not isinstance(value, Mapping):
            yield f"{name}={setting_text(value)}"
