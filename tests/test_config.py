"""Configurations: what is written as TOML is read back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.errors import UsageError
from arbor.run.config import config_text, read_config
from arbor.tasks.prompt_template import read_template
from arbor.tasks.step_format import StepFormat

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
PLAIN = st.one_of(
    TEXT, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.none()
)
LISTS = st.lists(PLAIN.filter(lambda value: value is not None), max_size=3)
TABLES = st.recursive(
    st.dictionaries(TEXT, st.one_of(PLAIN, LISTS), max_size=4),
    lambda inner: st.dictionaries(TEXT, st.one_of(PLAIN, inner), max_size=3),
    max_leaves=6,
)


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return value


@given(TABLES)
def test_what_is_written_is_read_back(config: dict[str, Any]) -> None:
    assert tomllib.loads(config_text(config)) == without_none(config)


def test_files_may_begin_with_the_mark_of_utf8(tmp_path: Path) -> None:
    config, template, schema = (tmp_path / name for name in ("run.toml", "t.toml", "s.json"))
    config.write_text("seed = 3\n", encoding="utf-8-sig")
    own = 'schema = "arbor.template/1"\nprompt = "Q: {problem}\\n"\n'
    template.write_text(own, encoding="utf-8-sig")
    schema.write_text('{"type": "integer"}', encoding="utf-8-sig")

    assert read_config(config) == {"seed": 3}
    assert read_template(str(template)).text("1 + 1", 0) == "Q: 1 + 1\n"
    assert StepFormat.parse(f"json:{schema}").kind == "json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a = " + "[" * 20 + "]" * 20, "nested too deeply at 'a'"),
        ("seed = " + "9" * 5000, "not valid TOML"),
        ("seed = 9223372036854775808", "more than 64 bits as 'seed'"),
        ("budget = 1979-05-27", "date or time as 'budget'"),
        ("[task]\nname = 07:32:00", "date or time as 'task.name'"),
        ("policy = [1979-05-27T07:32:00Z]", "date or time as 'policy'"),
    ],
    ids=["depth", "lists", "digits", "64 bits", "date", "time", "datetime"],
)
def test_a_value_that_no_setting_has_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=words) as caught:
        read_config(tmp_path / "run.toml")
    assert caught.value.code == "config-invalid"
    assert len(str(caught.value).splitlines()) == 1
