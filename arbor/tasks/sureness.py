"""The question how sure it is that something is correct, for models for conversations."""

from __future__ import annotations

from arbor.tasks.base import Question


def sureness(subject: str) -> Question:
    """How sure it is that a subject is correct, as a model for conversations is asked.

    The words are those of Tree of Thoughts' value prompt; for what they are worth next to yes and
    no see docs/experiments/controllers.md.
    """
    verdicts = {
        spelling: value
        for word, value in (("sure", 1.0), ("likely", 0.5), ("impossible", 0.0))
        for spelling in (word, word.capitalize())
    }
    return Question(
        f"Evaluate if the {subject} above is correct (sure/likely/impossible). "
        "Answer with one word.",
        verdicts,
    )
