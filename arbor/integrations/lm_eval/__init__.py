"""lm-eval's command with the model ``arbor``: ``python -m arbor.integrations.lm_eval``."""

from arbor.feature import Feature

FEATURE = Feature(extras={"lm-eval": ("lm-eval's model arbor", ("lm_eval",))})
