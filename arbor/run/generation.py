"""Generation: one token-level beam search of a solver, from a prompt to its continuations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arbor.budget import Budget
from arbor.errors import BudgetInfeasible, InputError, ModelError, UsageError
from arbor.model.control_tokens import encode_raw
from arbor.run.limits import check_count
from arbor.run.planning import encode_prompt
from arbor.support.texts import refuse_surrogates
from arbor.tree import ThoughtTree

if TYPE_CHECKING:
    from arbor.engine.beam_search import BeamSettings
    from arbor.engine.engine import Engine
    from arbor.model.checkpoint import Checkpoint

EARLY_STOPPING = ("first", "heuristic", "never")


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
        chat: whether the chat template is used.

    Raises:
        ModelError: the model is not supported.
        InputError: prompt and continuation exceed the model's context.
        BudgetInfeasible: the budget holds no token per beam after the prompt.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prompt: str,
        settings: BeamSettings,
        budget: Budget,
        *,
        chat: bool = True,
    ) -> None:
        files = checkpoint.read()
        info, self._tokenizer = files.info, files.tokenizer
        if not info.supported:
            raise ModelError("arch-unsupported", f"{info.id}: {info.reason}", "See 'arbor info'.")
        self._ids = _encoded(self._tokenizer, prompt, chat)
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
        most = length + settings.beams * settings.max_tokens
        self.slots = budget.tokens(most, info.kv_bytes_per_token)
        if self.slots < length + settings.beams:
            raise BudgetInfeasible(
                length + settings.beams,
                self.slots,
                f"a search with {settings.beams:,} beams",
                "Use a larger --budget, or fewer --beams.",
            )

    def stop(self, status: str = "interrupted") -> None:
        """End the search after the current forward; the continuations so far are the result."""
        self._stopped = True

    def run(self, engine: Engine, ends: tuple[int, ...]) -> list[Continuation]:
        """Search; the best `beams` continuations, best first.

        Args:
            engine: holds no search in progress.
            ends: token ids that end the text.
        """
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
        check_count(name, 0 if settings[name] is None else settings[name])
    for name in ("length_penalty", "diversity"):
        if not _is_finite(settings[name]):
            raise UsageError("beams", f"{name} is {settings[name]!r}.", "It is a finite number.")
    if settings["diversity"] < 0:
        raise UsageError("beams", f"diversity is {settings['diversity']}.", "It is 0 or more.")
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


def _is_finite(number: Any) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return is_number and math.isfinite(number)


def _encoded(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    refuse_surrogates(prompt, "the prompt")
    ids = encode_prompt(tokenizer, prompt) if chat else encode_raw(tokenizer, prompt)
    if not ids:
        raise InputError("problem-empty", "the prompt has no tokens.", "Give it some text.")
    return ids
