"""kvpress: its presses as scorers and policies, ``kvpress:NAME``."""

from arbor.feature import Feature

FEATURE = Feature(adapters={"kvpress": "arbor.integrations.kvpress.press:adapted"})
