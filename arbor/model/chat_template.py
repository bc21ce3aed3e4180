"""Chat templates: the named ones of a GGUF file, and the refusal of those that cannot be used."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from arbor.errors import UsageError
from arbor.model.gguf.header import GGUFHeader
from arbor.model.gguf.tokenizer import TEMPLATE
from arbor.model.plain_tokenizer import chat_renderer

USED = "default"  # of several named templates
UNPARSED = "TemplateSyntaxError"  # of Jinja's errors


def named_templates(header: GGUFHeader) -> dict[str, str] | None:
    """The templates of a GGUF file that has named ones alone, which transformers leaves out."""
    if TEMPLATE in header:
        return None
    named = [key for key in header if key.startswith(f"{TEMPLATE}.")]
    return {key.removeprefix(f"{TEMPLATE}."): header.get(key) for key in named} or None


def refuse_broken_template(tokenizer: Any) -> None:
    """Refuse a chat template that does not parse, or several of which none is the default.

    Args:
        tokenizer: of the model.

    Raises:
        UsageError: names the model, the fault and what works.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        names = ", ".join(sorted(map(str, template)))
        fault = "" if USED in template else f"its templates are {names}, and none is '{USED}'"
        template = template.get(USED)
    else:
        fault = ""
    if isinstance(template, str):
        fault = _syntax_error(template)
    if fault:
        place = getattr(tokenizer, "name_or_path", "") or "the model"
        raise UsageError(
            "chat-template",
            f"{place}: its chat template cannot be used: {fault}.",
            "Use --set chat=off, or correct the template in a copy of the model.",
        )


@functools.lru_cache(maxsize=8)
def _syntax_error(template: str) -> str:
    """Why a template does not parse; empty if it does."""
    try:
        chat_renderer()(conversations=[[]], chat_template=template)
    except Exception as error:  # others are of a template that wants messages
        if any(each.__name__ == UNPARSED for each in type(error).__mro__):
            return f"line {getattr(error, 'lineno', 0)}: {error}"
    return ""
