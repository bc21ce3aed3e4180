"""check_all_read: a file with a tensor that its model does not take is refused, as by llama.cpp."""

from __future__ import annotations

from collections.abc import Container

from arbor.errors import ModelError
from arbor.model.gguf.header import GGUFHeader
from arbor.model.gguf.rope import FACTORS, LONG, SHORT

HEAD = "output.weight"
ELSEWHERE = (FACTORS, SHORT, LONG, HEAD)  # a head that is not taken is tied to the embedding


def check_all_read(header: GGUFHeader, taken: Container[str]) -> None:
    """Refuse a file of which the model would leave tensors out: it would be another model.

    Args:
        header: of the file.
        taken: names of the tensors that become parameters.

    Raises:
        ModelError: names the first tensor that is left.
    """
    names = (each.name for each in header.tensors)
    left = [each for each in names if each not in taken and each not in ELSEWHERE]
    if left:
        kind = header.get("general.architecture")
        others = f" and {len(left) - 1} others" if len(left) > 1 else ""
        raise ModelError(
            "model-gguf",
            f"{header.path}: a '{kind:.20}' of transformers has no place for '{left[0]:.60}'{others}.",
            "Take the model's safetensors.",
            model=str(header.path),
        )
