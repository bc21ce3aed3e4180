"""Tags of a GGUF file's vocabulary, as in ``<|im_end|>``, that transformers does not read as such.

transformers reads a control token of a byte-level vocabulary as text where its name has characters
that spell no bytes, as in DeepSeek's: a chat template then writes no turn that the model
knows. And a token that ends texts by its name is a control token, whatever the file calls it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from arbor.model.gguf.ends import CONTROL, TAGS, TOKENS, TYPES
from arbor.model.gguf.header import GGUFHeader
from arbor.model.gguf.pretokenizers import BYTE_LEVEL, MODEL


def restore_tags(tokenizer: Any, header: GGUFHeader, ends: Iterable[int]) -> None:
    """Lets a tokenizer read the tags of its file, and leave those that end texts out of texts.

    Args:
        tokenizer: that transformers made of the file.
        header: of the file.
        ends: ids of the tokens that end a text.
    """
    from tokenizers import AddedToken

    tokens, types = header.get(TOKENS) or [], header.get(TYPES) or []
    special = {number for number, kind in enumerate(types) if kind == CONTROL} | set(ends)
    tags = special | {number for number, kind in enumerate(types) if kind in TAGS}
    backend = tokenizer.backend_tokenizer
    known = backend.get_added_tokens_decoder()
    missing = sorted(
        number
        for number in tags
        if tokens[number]
        and (number not in known or (number in special and not known[number].special))
    )
    if header.get(MODEL) == BYTE_LEVEL:
        spelled = {backend.id_to_token(number): number for number in missing}
        renamed = {
            own: tokens[each] for own, each in spelled.items() if own and own != tokens[each]
        }
        if renamed:
            backend = tokenizer._tokenizer = _renamed(backend, renamed)
    for number in missing:
        if backend.token_to_id(tokens[number]) == number:  # else its name would be a new token
            added = AddedToken(tokens[number], normalized=False, special=number in special)
            (backend.add_special_tokens if added.special else backend.add_tokens)([added])


def _renamed(backend: Any, renamed: Mapping[str, str]) -> Any:
    """A tokenizer with other names for tokens of its vocabulary, which no merge makes."""
    from tokenizers import Tokenizer

    serialized = json.loads(backend.to_str())
    vocabulary = serialized["model"]["vocab"]
    for spelled, name in renamed.items():
        vocabulary[name] = vocabulary.pop(spelled)
    return Tokenizer.from_str(json.dumps(serialized))
