"""Grammar: which tokens may come next in thoughts that have a format; xgrammar's masks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from arbor.engine.json_schema import applied
from arbor.engine.regex import whole_text
from arbor.errors import UsageError
from arbor.model.plain_tokenizer import PlainTokenizer
from arbor.tasks.step_format import EXAMPLE, StepFormat
from arbor.tree import Node


class Grammar:
    """The tokens that may come next in each thought, by xgrammar.

    A thought matches the format, and then one of the texts that end thoughts, or the end of the
    text. Probabilities are those of the tokens that may come, so `Node.logprob` and `Node.top1` are
    conditional on the format. A thought of the greatest length is cut wherever it is.

    Args:
        form: what a thought has to match.
        stops: texts that end a thought.
        tokenizer: a Hugging Face tokenizer.
        ends: token ids that end a text.

    Raises:
        UsageError: xgrammar is not installed, or cannot read the format.
    """

    def __init__(
        self, form: StepFormat, stops: Sequence[str], tokenizer: Any, ends: Sequence[int]
    ) -> None:
        check_format(form)
        self._form = form
        self._stops = tuple(stops)
        self._tokenizer = tokenizer
        self._ends = tuple(ends)
        # of blocks that decode: the matcher, and how many of the block's tokens it has read
        self._matchers: dict[Node, tuple[Any, int]] = {}

    def mask(self, nodes: Sequence[Node], logits: Tensor) -> Tensor:
        """Set the logits to -inf where a token may not come next, in place; returns them.

        Args:
            nodes: blocks that decode by this grammar.
            logits: [n, V] float32.

        Raises:
            UsageError: no token of the model may come next.
        """
        import xgrammar

        vocabulary = logits.shape[1]
        bits = xgrammar.allocate_token_bitmask(len(nodes), vocabulary)
        for place, node in enumerate(nodes):
            matcher = self._read(node, vocabulary)
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(bits, place)
            if not bits[place].any():
                raise UsageError(
                    "step-format",
                    f"after {self._tokenizer.decode(node.tokens)!r:.60} no token of the model "
                    "matches the step format.",
                    "Use a format that the model's tokens can spell.",
                )
        xgrammar.apply_token_bitmask_inplace(logits, bits.to(logits.device))
        return logits

    def forget(self, node: Node) -> None:
        """Drop what is known of a block that has ended."""
        self._matchers.pop(node, None)

    def _read(self, node: Node, vocabulary: int) -> Any:
        """The block's matcher, after all of its tokens."""
        import xgrammar

        known = self._matchers.get(node)
        if known is None:
            compiled = _compiled(self._form, self._stops, self._tokenizer, vocabulary, self._ends)
            known = xgrammar.GrammarMatcher(compiled), 0
        matcher, count = known
        if count > len(node.tokens):  # the last ones were taken back
            matcher.rollback(count - len(node.tokens))
        for token in node.tokens[count:]:
            if not matcher.accept_token(token):
                raise UsageError(
                    "step-format", f"the token {token} does not match the step format.", EXAMPLE
                )
        self._matchers[node] = matcher, len(node.tokens)
        return matcher


def check_format(form: StepFormat) -> None:
    """Refuses a format that xgrammar cannot read.

    Raises:
        UsageError: names the reason; or xgrammar is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise UsageError(
            "extra-missing",
            "a step format needs xgrammar, which is not installed.",
            "pip install 'arbor-search[structured]', or leave step_format out.",
        ) from error
    try:
        _grammar_of(form, xgrammar)
    except RuntimeError as error:
        line = next(iter(str(error).strip().splitlines()), "a number in it is too large")
        reason = line.split(": ", 1)[-1]
        raise UsageError(
            "step-format", f"the {form.kind} of the step format is invalid: {reason}", EXAMPLE
        ) from error


def _grammar_of(form: StepFormat, xgrammar: Any, stops: Sequence[str] = ()) -> Any:
    if form.kind == "regex":
        ends = "".join(stop for stop in stops if len(stop) == 1)
        return xgrammar.Grammar.from_regex(whole_text(form.text, ends))
    schema = json.dumps(applied(json.loads(form.text)))
    # on one line: a line break ends most thoughts
    return xgrammar.Grammar.from_json_schema(schema, any_whitespace=False)


@lru_cache(maxsize=8)
def _compiled(
    form: StepFormat, stops: tuple[str, ...], tokenizer: Any, vocabulary: int, ends: tuple[int, ...]
) -> Any:
    import xgrammar

    literals = " | ".join(json.dumps(stop, ensure_ascii=False) for stop in (*stops, ""))
    tail = xgrammar.Grammar.from_ebnf(f"root ::= {literals}")
    whole = xgrammar.Grammar.concat(_grammar_of(form, xgrammar, stops), tail)
    return _compiler(tokenizer, vocabulary, ends).compile_grammar(whole)


@lru_cache(maxsize=4)
def _compiler(tokenizer: Any, vocabulary: int, ends: tuple[int, ...]) -> Any:
    import xgrammar

    if isinstance(tokenizer, PlainTokenizer):
        tokenizer = tokenizer.of_transformers()
    stops = list(ends) or None
    known = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocabulary, stop_token_ids=stops
    )
    special = (id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
    silent = {*ends, *special}  # no thought's text has them
    texts = [b"" if id in silent else text for id, text in enumerate(known.decoded_vocab)]
    spoken = xgrammar.TokenizerInfo(
        texts,
        vocab_size=vocabulary,
        stop_token_ids=stops or known.stop_token_ids,
        add_prefix_space=known.add_prefix_space,
    )
    return xgrammar.GrammarCompiler(spoken)
