"""Features: what folders of papers and integrations add, and what a setting says without one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from arbor import Solver, feature
from arbor.errors import UsageError
from arbor.feature import features


def paths() -> Iterator[str]:
    """Every dotted path that a feature names."""
    for each in features():
        for named in each.names.values():
            yield from named.values()
        yield from each.adapters.values()
        yield from each.hooks.values()
        for path, purpose in (*each.commands.values(), *each.calibrations.values()):
            assert purpose.endswith("."), path
            yield path


def test_every_path_of_a_feature_is_there() -> None:
    for path in paths():
        module, _, names = path.partition(":")
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"branch_stop": "all"}, "branch-stop"),
        ({"kv_probe": "measure"}, "kv-probe"),
        ({"share": "similar", "mode": "lossy", "budget": "400tok"}, "share"),
    ],
)
def test_a_setting_of_a_folder_that_was_taken_out_is_refused_by_name(
    settings: dict[str, str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature, "features", tuple)

    with pytest.raises(UsageError, match=r"lacks the folder of arbor/papers") as caught:
        Solver(**settings)  # type: ignore[arg-type]
    assert caught.value.code == code


def test_what_is_measured_when_asked_only_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "features", tuple)

    with Solver(kv_probe="kept") as solver:
        assert not solver.engine.levels.least_rows
