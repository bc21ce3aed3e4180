"""The text that tokens add to the path before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arbor.tree import Node

Decode = Callable[[list[int]], str]
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoders write for invalid bytes
LOOK_BACK = 16  # tokens of the path among which one is looked for that stands for itself
MOST_HELD = 3  # bytes of a character that misses one


def before(node: Node) -> list[int]:
    """The last tokens of the path before a block, `LOOK_BACK` of them or all there are."""
    tokens: list[int] = []
    parent = node.parent
    while parent is not None and len(tokens) < LOOK_BACK:
        tokens = parent.tokens[len(tokens) - LOOK_BACK :] + tokens
        parent = parent.parent
    return tokens


def sampled_text(decode: Decode, node: Node) -> str:
    """The text that a block's sampled tokens add to the given ones before them."""
    known = [*before(node), *node.tokens[: node.given]]
    return added(decode, known[-LOOK_BACK:], node.tokens[node.given :])


def added(decode: Decode, before: Sequence[int], tokens: Sequence[int]) -> str:
    """What `tokens` add to the text of a path, so that the texts of its blocks joined are the text
    of the path.

    Tokens by themselves do not say it: decoders of SentencePiece strip the space of a first word,
    and a character may consist of several tokens. So a little of the path is decoded with and
    without them. A character that is not whole at the end belongs to the tokens that complete it.

    Args:
        before: the end of the path before the tokens, see `before`.
    """
    start = len(before)
    while start:  # from a token on that stands for itself: text, and no part of a character
        start -= 1
        text = decode([before[start]])
        if text and BROKEN not in text:
            break
    known = _whole(decode, before[start:])
    return _whole(decode, [*before[start:], *tokens])[len(known) :]


def _whole(decode: Decode, tokens: Sequence[int]) -> str:
    """The text that no further token changes: a prefix of the text of these tokens and any more.

    The first bytes of a character at the end are left out. A replacement character may stand for
    them or be the model's own, so those at the end are left out unless the text has them without
    the last `MOST_HELD` tokens too.
    """
    texts = [decode(list(tokens))]
    if not texts[0].endswith(BROKEN):
        return texts[0]
    for held in range(1, min(MOST_HELD, len(tokens)) + 1):
        texts.append(decode(list(tokens[: len(tokens) - held])))
        if not texts[-1].endswith(BROKEN):
            clean = texts[0].rstrip(BROKEN)  # with the whole characters of the tokens held
            return clean if clean.startswith(texts[-1]) else texts[-1]
    least, most = min(texts), max(texts)  # their common prefix is that of all
    same = (i for i in range(len(least), 0, -1) if most.startswith(least[:i]))
    return least[: next(same, 0)]
