"""Chat templates that cannot be used: refused with the model's name and what works."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf_files import llama, write_gguf
from support.run_cli import in_process

from arbor import UsageError
from arbor.model.description_cache import light_tokenizer
from arbor.model.loading import locate_model
from arbor.run.conversation import conversation_tokens

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytest.importorskip("accelerate", reason="the extra `gguf` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that convert

HI = [{"role": "user", "content": "4"}]
NAMED = {f"tokenizer.chat_template.{name}": "{{ 1 }}" for name in ("rag", "tool_use")}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("template", "settings", "words"),
    [
        ("a\n{% if %}", {}, "line 2"),
        ("{{ 4 | no_such_filter }}", {}, "no_such_filter"),
        ("{% for m in messages %}", {}, "line 1"),
        ("", NAMED, "its templates are rag, tool_use, and none is 'default'"),
    ],
)
def test_a_template_that_cannot_be_used_names_the_file_and_what_works(
    template: str,
    settings: dict[str, str],
    words: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_gguf(llama(), model, template=template, settings=settings)

    for _ in range(2):  # the second tokenizer is one that was kept
        with pytest.raises(UsageError) as refused:
            conversation_tokens(light_tokenizer(locate_model(model)), HI)
        said = str(refused.value)
        assert refused.value.code == "chat-template"
        assert str(model) in said and words in said and "chat=off" in said
    prompt = ("prompt", "reasoning", "2+2?", "--model", str(model), "--json")
    ran = in_process(capsys)(*prompt)
    assert ran.code == 2 and words in ran.err and "crash" not in ran.err
    assert in_process(capsys)(*prompt, "--set", "chat=off").code == 0


def test_a_template_that_refuses_a_users_message_says_what_works(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(llama(), model, template="{{ raise_exception('no users') }}")

    ran = in_process(capsys)("solve", "2+2?", "--task", "reasoning", "--model", str(model))

    assert ran.code == 2 and "no users" in ran.err and "chat=off" in ran.err
