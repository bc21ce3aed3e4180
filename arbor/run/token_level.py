"""Without a search: token-level beam search, and the log probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from arbor.budget import Budget
from arbor.errors import BudgetInfeasible, InputError, ModelError, UsageError
from arbor.model.checkpoint import Checkpoint
from arbor.model.control_tokens import encode_raw
from arbor.model.known_tokens import check_known
from arbor.run.planning import encode_prompt
from arbor.run.plugin_answers import is_finite
from arbor.support.setting import checked_number
from arbor.support.texts import counted, refuse_surrogates
from arbor.tree import ThoughtTree

if TYPE_CHECKING:
    from arbor.engine.beam_search import BeamSettings
    from arbor.engine.engine import Engine
    from arbor.engine.likelihood import TokenScores
    from arbor.run.session import Status
    from arbor.run.tiers import TierSettings

EARLY_STOPPING = ("first", "heuristic", "never")
RANGES = {"length_penalty": (-10, 10), "diversity": (0, 1_000_000)}
SLOTS = 8192  # tokens of KV of texts to score at a time, where one does not need more


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text that a beam search has found.

    Attributes:
        text: without the prompt and without special tokens.
        tokens: its ids, the one that ends the text included.
        score: what continuations are ranked by: log probability / length ** `length_penalty`.
        finished: it ends with the end of the text or at `max_tokens`; False after an interruption.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    finished: bool


class Generation:
    """A beam search in preparation, and then in progress.

    Args:
        checkpoint: the model and its tokenizer.
        prompt: one user message where the tokenizer has a chat template and `chat` is on, else text
            to continue.
        settings: of the search, checked.
        budget: slots; a ratio is a part of what the search holds at most, the prompt and
            `max_tokens` of every beam.
        tiers: a staging buffer takes its part of the budget, though this search reads none of it.
        chat: whether the chat template is used.

    Raises:
        ModelError: the model is not supported.
        InputError: prompt and continuation exceed the model's context, or its weights lack a token.
        BudgetInfeasible: the budget holds no token per beam after the prompt.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prompt: str,
        settings: BeamSettings,
        budget: Budget,
        tiers: TierSettings,
        *,
        chat: bool = True,
    ) -> None:
        files = checkpoint.read()
        info, self._tokenizer = files.info, files.tokenizer
        if not info.supported:
            raise ModelError("arch-unsupported", f"{info.id}: {info.reason}", "See 'arbor info'.")
        if not isinstance(prompt, str):
            what = f"a prompt is a text, not {type(prompt).__name__}: {prompt!r:.60}."
            raise UsageError("problem-type", what, "Give one prompt at a time.")
        refuse_surrogates(prompt, "the prompt")
        encode = encode_prompt if chat else encode_raw
        self._ids = encode(self._tokenizer, prompt)
        if not self._ids:
            raise InputError("problem-empty", "the prompt has no tokens.", "Give it some text.")
        check_known(self._ids, info.vocabulary, "the prompt", self._tokenizer)
        self._settings = settings
        self._stopped = False
        length = len(self._ids)
        if length + settings.max_tokens > info.context:
            raise InputError(
                "problem-too-long",
                f"{length:,} tokens; the model's context is {info.context:,} and max_tokens is "
                f"{settings.max_tokens:,}.",
                "Shorten the prompt, or lower --max-tokens.",
                tokens=length,
                context=info.context,
            )
        buffer = tiers.staging_tokens(info.kv_bytes_per_token)
        most = length + settings.beams * settings.max_tokens + buffer
        least = length + settings.beams + buffer
        self.slots = budget.tokens(most, info.kv_bytes_per_token)
        if self.slots < least:
            raise BudgetInfeasible(
                most,
                self.slots,
                f"a search with {counted(settings.beams, 'beam')} of {settings.max_tokens:,} tokens",
                "Use a larger --budget, fewer --beams or fewer --max-tokens.",
            )

    def stop(self, status: str = "interrupted") -> None:
        """End the search after the current forward; the continuations so far are the result."""
        self._stopped = True

    def run(self, engine: Engine, ends: tuple[int, ...]) -> list[Continuation]:
        """Search; the best `beams` continuations, best first."""
        tree = ThoughtTree(self._ids)
        engine.open(tree, self.slots, interrupted=lambda: self._stopped)
        try:
            found = engine.search_beams(self._settings, ends)
        finally:
            engine.close(tree)
        return [
            Continuation(
                self._tokenizer.decode(each.tokens, skip_special_tokens=True),
                each.tokens,
                each.score,
                each.finished,
            )
            for each in found
        ]


def checked_beams(settings: dict[str, Any]) -> BeamSettings:
    """The settings of a beam search.

    Args:
        settings: fields of `BeamSettings`; `early_stopping` may be transformers' True or False.

    Raises:
        UsageError: an invalid setting; names the values that work.
    """
    from arbor.engine.beam_search import BeamSettings

    names = {True: "first", False: "heuristic"}
    early = settings["early_stopping"]
    early = names[early] if isinstance(early, bool) else early
    if early not in EARLY_STOPPING:
        raise UsageError(
            "beams", f"early_stopping is {early!r}.", f"It is one of {', '.join(EARLY_STOPPING)}."
        )
    for name in ("beams", "max_tokens", "groups"):
        checked_number(name, settings[name], whole=True, least=1)
    for name, (low, high) in RANGES.items():
        given = settings[name]
        if isinstance(given, bool) or not is_finite(given) or not low <= given <= high:
            raise UsageError("beams", f"{name} is {given!r}.", f"It is from {low:,} to {high:,}.")
    if settings["beams"] % settings["groups"]:
        raise UsageError(
            "beams",
            f"{settings['beams']} beams cannot be divided into {settings['groups']} equal groups.",
            "Take a number of beams that groups divides.",
        )
    if settings["diversity"] and settings["groups"] == 1:
        raise UsageError(
            "beams", "diversity is between groups, and there is one.", "Set groups as well."
        )
    return BeamSettings(**{**settings, "early_stopping": early})


class TokenScoring:
    """The scoring of given tokens, checked, and then in progress.

    Args:
        checkpoint: the model.
        pairs: (tokens before, tokens to score), at least one of each.

    Raises:
        InputError: a text without tokens, or longer than the model's context.
        UsageError: ids that the model does not have.
    """

    def __init__(
        self, checkpoint: Checkpoint, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        from arbor.engine.likelihood import GivenTokens

        info = checkpoint.read().info
        try:
            self._given = [
                GivenTokens(tuple(map(index, before)), tuple(map(index, tokens)))
                for before, tokens in pairs
            ]
        except (TypeError, ValueError):
            what = "a pair to score is (token ids before, token ids)."
            hint = "Encode texts with the solver's tokenizer."
            raise UsageError("setting-type", what, hint) from None
        self._stopped = False
        for each in self._given:
            if not each.before or not each.tokens:
                raise InputError(
                    "problem-empty", "a text to score has no tokens, or none before them.", ""
                )
            if len(each.read) > info.context:
                raise InputError(
                    "problem-too-long",
                    f"{len(each.read):,} tokens; the model's context is {info.context:,}.",
                    "Leave out the first ones.",
                    tokens=len(each.read),
                    context=info.context,
                )
            ids = (*each.before, *each.tokens)
            if min(ids) < 0 or max(ids) >= info.vocabulary:
                raise UsageError(
                    "token-answer",
                    f"token ids from {min(ids)} to {max(ids)}; the model has {info.vocabulary:,}.",
                )

    def stop(self, status: Status = "interrupted") -> None:
        """End after the batch in progress.

        Safe from a signal handler or another thread.
        """
        self._stopped = True

    def run(
        self, lend: Callable[[TokenScoring], AbstractContextManager[Engine]]
    ) -> list[TokenScores | None]:
        """The scores, in the order of the texts; None for those that `stop` left out."""
        from arbor.engine.likelihood import score_tokens

        found: dict[int, TokenScores] = {}
        with lend(self) as engine:
            for batch in score_tokens(engine.runner, self._given, SLOTS):
                found.update(batch)
                if self._stopped:
                    break
        return [found.get(place) for place in range(len(self._given))]
