"""Boundary settings: where a thought and a path end, instead of where the task ends them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from arbor.support.setting import checked_values, setting
from arbor.tasks.base import BlockLimits
from arbor.tasks.step_format import StepFormat


@dataclass(frozen=True, kw_only=True)
class BoundarySettings:
    """Limits instead of the task's; None keeps the task's.

    Attributes:
        max_depth: thoughts per path.
        path_tokens: tokens per path, the prompt not counted.
        step_tokens: tokens per thought.
        step_format: what every thought has to match: ``regex:PATTERN``, ``json:SCHEMA``,
            ``json:FILE`` or a JSON schema as a mapping; needs ``arbor-search[structured]``.
    """

    max_depth: int | None = setting(
        None, "Most thoughts on one path; default: the task's.", least=1, recorded="always"
    )
    path_tokens: int | None = setting(
        None, "Most tokens of one path; default: the task's.", shown="short", least=1
    )
    step_tokens: int | None = setting(
        None, "Most tokens in one thought; default: the task's.", least=1, recorded="always"
    )
    step_format: StepFormat | None = setting(
        None,
        "Format of every thought: regex:PATTERN, json:SCHEMA or json:FILE.",
        shown="set",
        metavar="KIND:TEXT",
        read=StepFormat.parse,
    )

    def boundary_in(self, usual: BlockLimits) -> BlockLimits:
        """A task's boundary with these limits.

        Raises:
            UsageError: a format that cannot be used.
        """
        form = usual.form if self.step_format is None else self.step_format
        if form is not None and form is not usual.form:
            from arbor.engine.grammar import check_format

            check_format(form)
        return dataclasses.replace(
            usual,
            max_depth=self.max_depth or usual.max_depth,
            max_tokens=self.step_tokens or usual.max_tokens,
            path_tokens=self.path_tokens or usual.path_tokens,
            form=form,
        )


def limited(
    usual: BlockLimits,
    max_depth: int | None = None,
    step_tokens: int | None = None,
    path_tokens: int | None = None,
) -> BlockLimits:
    """A boundary with other limits; None keeps one.

    Raises:
        UsageError: a limit that is not a whole number of at least 1.
    """
    given = {"max_depth": max_depth, "step_tokens": step_tokens, "path_tokens": path_tokens}
    return BoundarySettings(**dict(checked_values(BoundarySettings, "a path", given))).boundary_in(
        usual
    )
