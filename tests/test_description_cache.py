"""Descriptions kept as files: used while nothing they were made from has changed, else ignored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_cli import environment, spawn

from arbor.model.description_cache import (
    SHIPPED,
    PlainTokenizer,
    keep_description,
    kept_description,
    shipped_text,
)
from arbor.model.loading import BUILTIN, ModelLocation, load_config, load_tokenizer, locate_model
from arbor.model.model_info import Files
from arbor.model.weights import read_files
from arbor.run.conversation import conversation_tokens

SAPLING = BUILTIN["sapling"]
PUZZLE = "4 5 6 10"
PLAN = (
    "import json, sys; from arbor import Solver\n"
    "with Solver(sys.argv[1]) as solver:\n"
    f"    plan = solver.plan('{PUZZLE}').to_dict()\n"
    "print(json.dumps([plan, 'torch' in sys.modules]))"
)


@pytest.fixture(scope="module")
def sapling() -> Files:
    return read_files(locate_model("builtin:sapling"), None, None, "auto", keep=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory; its description goes to a cache folder of its own."""
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "cache"))
    made = tmp_path / "model"
    shutil.copytree(SAPLING, made, ignore=shutil.ignore_patterns("*.safetensors", SHIPPED))
    (made / "model.safetensors").touch()
    return made


def keep(folder: Path, files: Files, dtype: str = "auto") -> ModelLocation:
    """Keep the description of a directory, and say where the model is."""
    source = locate_model(folder)
    keep_description(source, dtype, load_config(source), files)
    return source


def record(folder: Path) -> Path:
    """The only description in the cache folder."""
    (found,) = kept_files(folder)
    return found


def plan_of(model: str | Path, cache: Path) -> tuple[dict[str, Any], bool]:
    """A plan made by a process of its own, and whether that imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(model)],
        env=environment(ARBOR_CACHE=str(cache)),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    plan, torch_imported = json.loads(done.stdout)
    return plan, torch_imported


# The built-in model


def test_the_shipped_description_is_what_the_files_give(sapling: Files) -> None:
    made = shipped_text(SAPLING, sapling)

    assert (SAPLING / SHIPPED).read_text(encoding="utf-8") == made, (
        "run python scripts/describe_sapling.py"
    )


@given(text=st.text(), special=st.booleans())
def test_the_plain_tokenizer_gives_the_ids_of_transformers(
    sapling: Files, text: str, special: bool
) -> None:
    plain = PlainTokenizer.of_file(SAPLING / "tokenizer.json")
    marked = f"<bos>{text}\n <eos>{text}<pad>"

    for each in (text, marked):
        ids = plain.encode(each, add_special_tokens=special)
        assert ids == sapling.tokenizer.encode(each, add_special_tokens=special)
        decoded = plain.decode(ids, skip_special_tokens=special)
        assert decoded == sapling.tokenizer.decode(ids, skip_special_tokens=special)
    assert len(plain) == len(sapling.tokenizer)


# Directories


@pytest.mark.slow
def test_a_process_keeps_the_description_for_the_next(folder: Path) -> None:
    cache = folder.parent / "cache"
    plan, torch_imported = plan_of(folder, cache)
    assert torch_imported
    record(folder).write_text("damaged")

    assert plan_of(folder, cache) == (plan, True)
    assert plan_of(folder, cache) == (plan, False)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "vocabulary",
    ],
)
def test_a_changed_or_new_file_makes_it_stale(folder: Path, sapling: Files, name: str) -> None:
    source = keep(folder, sapling)
    assert kept_description(source, "auto") is not None
    changed = folder / name
    changed.parent.mkdir(exist_ok=True)
    before = changed.read_text() if changed.is_file() else ""
    changed.write_text(f"{before} ")

    assert kept_description(source, "auto") is None


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"digest": 1}', "\x00", "cut", "number"]
)
def test_a_damaged_file_is_ignored_and_replaced(folder: Path, sapling: Files, damage: str) -> None:
    source = keep(folder, sapling)
    file = record(folder)
    whole = file.read_text()
    texts = {"cut": whole[: len(whole) // 2], "number": whole.replace('"layers": 6', '"layers": 7')}
    file.write_text(texts.get(damage, damage))
    assert file.read_text() != whole

    assert kept_description(source, "auto") is None
    keep(folder, sapling)
    assert file.read_text() == whole


def test_a_chat_template_is_rendered_as_transformers_does(folder: Path) -> None:
    template = (
        "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] | trim }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    source = locate_model(folder)
    read_files(source, None, None, "auto", keep=True)
    messages = [{"role": "user", "content": " 4 5 6 10 "}]

    found = kept_description(source, "auto")

    assert found is not None
    ids = conversation_tokens(found.tokenizer, messages)
    own = load_tokenizer(source).apply_chat_template(messages, add_generation_prompt=True)
    assert ids == own["input_ids"]


def test_a_kept_chat_model_is_planned_without_transformers(folder: Path) -> None:
    template = "{% for m in messages %}<bos>{{ m.role }} {{ m.content }}<eos>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    read_files(locate_model(folder), None, None, "auto", keep=True)
    code = (
        "import sys; from arbor.cli import main; ended = main(sys.argv[1:])\n"
        "sys.exit(99 if 'transformers' in sys.modules else ended)"
    )

    own = environment(ARBOR_CACHE=os.environ["ARBOR_CACHE"])
    with spawn("info", str(folder), "--json", code=code, env=own) as process:
        out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, b"")
    assert json.loads(out)["plan"]["prompt_tokens"] > 0


# What is never kept


def kept_files(folder: Path) -> list[Path]:
    """The descriptions in the cache folder."""
    files = (folder.parent / "cache" / "models").glob("*.json")
    return [each for each in files if '"info"' in each.read_text() or not is_record(each)]


def is_record(path: Path) -> bool:
    """Whether a file is a whole record of a tokenizer."""
    return '"chat_template"' in path.read_text()
