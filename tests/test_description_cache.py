"""Descriptions kept as files: used while nothing they were made from has changed, else ignored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_cli import environment, in_process, spawn

from arbor.model import chat_rendering, description_cache
from arbor.model.checkpoint import Checkpoint, ModelSettings
from arbor.model.description_cache import (
    SHIPPED,
    PlainTokenizer,
    files_digest,
    keep_description,
    kept_description,
    light_tokenizer,
    shipped_text,
)
from arbor.model.files import Files
from arbor.model.loading import BUILTIN, ModelLocation, load_config, load_tokenizer, locate_model
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


def test_the_shipped_description_is_used(sapling: Files) -> None:
    found = kept_description(locate_model("builtin:sapling"), "auto")

    assert found is not None
    assert (found.info, found.sampling) == (sapling.info, sapling.sampling)
    assert not isinstance(found, Files)


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


def test_plans_without_torch_are_those_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, torch_imported = plan_of("builtin:sapling", tmp_path)
    with_torch = in_process(capsys)("solve", PUZZLE, "--dry-run", "--json").document

    assert not torch_imported
    assert plan == {name: with_torch[name] for name in plan}


# Directories


@pytest.mark.slow
def test_a_process_keeps_the_description_for_the_next(folder: Path) -> None:
    cache = folder.parent / "cache"
    plan, torch_imported = plan_of(folder, cache)
    assert torch_imported
    record(folder).write_text("damaged")

    assert plan_of(folder, cache) == (plan, True)
    assert plan_of(folder, cache) == (plan, False)


def test_a_kept_description_is_that_of_the_files(folder: Path, sapling: Files) -> None:
    source = keep(folder, sapling)

    found = kept_description(source, "auto")

    assert found is not None
    assert found.info.id == str(folder)
    assert {**found.info.to_dict(), "id": ""} == {**sapling.info.to_dict(), "id": ""}
    assert found.sampling == sapling.sampling
    assert found.tokenizer.chat_template is None


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


def test_a_missing_file_makes_it_stale(folder: Path, sapling: Files) -> None:
    source = keep(folder, sapling)
    (folder / "generation_config.json").unlink()

    assert kept_description(source, "auto") is None


def test_weights_and_block_values_do_not_make_it_stale(folder: Path, sapling: Files) -> None:
    source = keep(folder, sapling)
    (folder / "model.safetensors").write_bytes(b"other weights")
    (folder / "msve.json").write_text("{}")

    assert kept_description(source, "auto") is not None


def test_large_files_are_known_by_size_and_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(description_cache, "LARGE_BYTES", 3)
    large = folder / "vocabulary"
    large.write_text("large")
    before = files_digest(folder)
    large.write_text("longer")

    assert files_digest(folder) != before


def test_another_dtype_has_a_description_of_its_own(folder: Path, sapling: Files) -> None:
    source = keep(folder, sapling)

    assert kept_description(source, "bfloat16") is None


def test_another_directory_has_a_description_of_its_own(folder: Path, sapling: Files) -> None:
    keep(folder, sapling)
    other = folder.with_name("other")
    shutil.copytree(folder, other)

    assert kept_description(locate_model(other), "auto") is None


@pytest.mark.parametrize("package", description_cache.PACKAGES)
def test_another_version_of_a_package_makes_it_stale(
    folder: Path, sapling: Files, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    source = keep(folder, sapling)
    version = description_cache.metadata.version
    monkeypatch.setattr(
        description_cache.metadata,
        "version",
        lambda name: "0.0" if name == package else version(name),
    )

    assert kept_description(source, "auto") is None


@pytest.mark.parametrize("name", ["__version__", "_code"])
def test_another_version_of_arbor_makes_it_stale(
    folder: Path, sapling: Files, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = keep(folder, sapling)
    monkeypatch.setattr(
        description_cache, name, "0.0" if name == "__version__" else lambda: "other"
    )

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


def test_an_unwritable_cache_folder_is_no_error(folder: Path, sapling: Files) -> None:
    (folder.parent / "cache").write_text("a file where the folder should be")

    source = keep(folder, sapling)

    assert kept_description(source, "auto") is None


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


def test_another_version_that_renders_elsewhere_is_imported_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_rendering, "PACKAGE", "json")  # has no such file
    assert chat_rendering._alone() is None
    monkeypatch.undo()
    monkeypatch.setattr(chat_rendering, "_alone", lambda: None)
    from transformers.utils import chat_template_utils

    found = chat_rendering.chat_renderer.__wrapped__()

    assert found is chat_template_utils.render_jinja_template


def test_the_renderer_alone_gives_what_that_of_the_package_gives() -> None:
    template = (
        "{%- for m in messages %}{{ m | tojson }}{% if loop.last %}{% break %}{% endif %}"
        "{%- endfor %}{{ bos_token }}{% if add_generation_prompt %}>{% endif %}"
    )
    given: dict[str, Any] = {
        "conversations": [[{"role": "user", "content": 'é <b> "4"'}]],
        "chat_template": template,
        "add_generation_prompt": True,
        "bos_token": "<s>",
    }
    alone = chat_rendering._alone()
    from transformers.utils import chat_template_utils

    assert alone is not None and alone is not chat_template_utils
    assert alone.render_jinja_template(**given) == chat_template_utils.render_jinja_template(
        **given
    )


def test_settings_that_change_a_tokenizer_are_in_the_kept_one(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = {"640": {"content": "<new>", "special": True, "normalized": False}}
    settings["added_tokens_decoder"] = added
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    source = locate_model(folder)
    read_files(source, None, None, "auto", keep=True)
    plain = PlainTokenizer.of_file(folder / "tokenizer.json")

    found = kept_description(source, "auto")

    assert found is not None
    assert found.tokenizer.encode("<new>") == load_tokenizer(source).encode("<new>")
    assert found.tokenizer.encode("<new>") != plain.encode("<new>")


def test_a_damaged_tokenizer_is_ignored_and_replaced(folder: Path, sapling: Files) -> None:
    source = keep(folder, sapling)
    (tokenizer,) = (folder.parent / "cache" / "tokenizers").iterdir()
    whole = tokenizer.read_text()
    tokenizer.write_text(whole.replace("<eos>", "<end>"))

    assert kept_description(source, "auto") is None
    keep(folder, sapling)
    assert tokenizer.read_text() == whole


def test_a_prompt_alone_keeps_the_tokenizer(folder: Path) -> None:
    source = locate_model(folder)

    read, kept = light_tokenizer(source), light_tokenizer(source)

    assert not isinstance(read, PlainTokenizer)
    assert isinstance(kept, PlainTokenizer)
    assert kept.encode(PUZZLE) == read.encode(PUZZLE)


# What is never kept


def kept_files(folder: Path) -> list[Path]:
    """The descriptions in the cache folder."""
    files = (folder.parent / "cache" / "models").glob("*.json")
    return [each for each in files if '"info"' in each.read_text() or not is_record(each)]


def is_record(path: Path) -> bool:
    """Whether a file is a whole record of a tokenizer."""
    return '"chat_template"' in path.read_text()


def test_a_tokenizer_whose_class_changes_its_ids_is_not_kept(folder: Path, sapling: Files) -> None:
    class Shouting(type(sapling.tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, **settings: Any) -> Any:
            return super().encode(text.upper(), **settings)

    files = replace(sapling, tokenizer=Shouting.from_pretrained(folder))
    keep(folder, files)

    assert kept_files(folder) == []


def test_an_unsupported_model_is_not_kept(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "nonsense"}))
    files = read_files(locate_model(folder), None, None, "auto", keep=True)

    assert not files.info.supported
    assert kept_files(folder) == []


def test_an_unreadable_generation_config_is_reported_every_time(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "generation_config.json").write_text("{")
    read_files(locate_model(folder), None, None, "auto", keep=True)

    assert "is left out" in caplog.text
    assert kept_files(folder) == []


def test_trusted_code_is_read_every_time(folder: Path, sapling: Files) -> None:
    source = keep(folder, sapling)
    trusted = locate_model(folder, None, True)
    keep_description(trusted, "float32", load_config(source), sapling)

    assert kept_description(trusted, "auto") is None
    assert len(kept_files(folder)) == 1


def test_a_config_of_another_package_is_not_kept(folder: Path, sapling: Files) -> None:
    keep_description(locate_model(folder), "auto", object(), sapling)

    assert kept_files(folder) == []


def test_where_torch_is_imported_the_files_are_read(sapling: Files) -> None:
    checkpoint = Checkpoint(ModelSettings(device="cpu"))

    assert checkpoint.read() is checkpoint.read_files()
    assert isinstance(checkpoint.read(), Files)
