"""Trees for training: a rollout function and a trainer for TRL's GRPO."""

from arbor.feature import Feature

FEATURE = Feature(extras={"trl": ("trees for TRL's GRPO", ("trl",))})
