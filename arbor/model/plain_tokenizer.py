"""PlainTokenizer: the ids and texts of a Hugging Face tokenizer, without transformers or torch."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Self

# what a tokenizer's class may change between text and ids
STEPS = (
    *("encode", "_encode_plus", "_convert_encoding", "set_truncation_and_padding"),
    *("decode", "_decode", "__len__", "apply_chat_template", "get_chat_template"),
)


class PlainTokenizer:
    """A ``tokenizer.json`` as it is: the ids and texts of the model's Hugging Face tokenizer.

    Args:
        serialized: content of the file.
        chat_template: of the model; None: it has none.
        special_tokens: what a chat template reads, as in ``bos_token``.
        name_or_path: where the model is, for messages.
    """

    def __init__(
        self,
        serialized: bytes,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        name_or_path: str = "",
    ) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_buffer(serialized)
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.chat_template = chat_template
        self.name_or_path = name_or_path
        self.special_tokens_map = dict(special_tokens or {})

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """The tokenizer of a file, without a chat template."""
        return cls(path.read_bytes())

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text; None if none is named."""
        token = self.special_tokens_map.get("eos_token")
        found = None if token is None else self.backend_tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        (encoded,) = self.backend_tokenizer.encode_batch(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoded.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation, as transformers renders it.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: whether the answer's beginning follows.
            tokenize: False; the text is encoded elsewhere.
            tools: functions that the model may call.
        """
        assert not tokenize, "only the text is rendered here"
        (text,), _ = chat_renderer()(
            conversations=[list(messages)],
            tools=None if tools is None else list(tools),
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens_map,
        )
        return str(text)

    def of_transformers(self) -> Any:
        """The same as a tokenizer of transformers, for what reads its vocabulary."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer, **self.special_tokens_map
        )

    def __len__(self) -> int:
        """Number of token ids, added ones included."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def serialized(self) -> str:
        """Everything that decides the ids, as JSON."""
        return str(self.backend_tokenizer.to_str())


def plain_parts(tokenizer: Any) -> tuple[bytes, str | None, dict[str, str]] | None:
    """The arguments of `PlainTokenizer` that give what a Hugging Face tokenizer gives.

    None where its class changes what it does, or its settings do something besides.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    cls, plain = type(tokenizer), PreTrainedTokenizerFast
    if not issubclass(cls, plain) or any(getattr(cls, s) is not getattr(plain, s) for s in STEPS):
        return None
    changes = ("split_special_tokens", "clean_up_tokenization_spaces")
    template = tokenizer.chat_template
    special = dict(tokenizer.special_tokens_map)
    texts = all(isinstance(each, str) for each in special.values())
    if any(getattr(tokenizer, each, None) for each in changes) or not texts:
        return None
    if template is not None and not isinstance(template, str):
        return None
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None or backend.padding is not None:
        backend = Tokenizer.from_str(backend.to_str())
        backend.no_truncation()  # as `encode` does
        backend.no_padding()
    return backend.to_str().encode(), template, special


PACKAGE = "transformers"
ALONE = "arbor_transformers"  # the name of the files that are imported alone
RENDERER = "utils.chat_template_utils"


@functools.cache
def chat_renderer() -> Callable[..., Any]:
    """``render_jinja_template`` of transformers, without an import of the whole package.

    The package lists all of its models as it is imported, which takes longer than everything else
    that a prompt needs. The renderer's file needs two others, and these three are imported alone.
    """
    module = None if PACKAGE in sys.modules else _alone()
    module = module or importlib.import_module(f"{PACKAGE}.{RENDERER}")
    found: Callable[..., Any] = module.render_jinja_template
    return found


def _alone() -> ModuleType | None:
    """The file of the renderer; None where it needs more of the package."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    for name, path in ((ALONE, folder), (f"{ALONE}.utils", folder / "utils")):
        package = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    try:
        return importlib.import_module(f"{ALONE}.{RENDERER}")
    except Exception:  # whatever another version needs
        return None
