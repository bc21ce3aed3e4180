"""Presses of kvpress as scorers and policies, ``kvpress:NAME``."""

from arbor.feature import Feature

FEATURE = Feature(adapters={"kvpress": "arbor.integrations.kvpress.press:adapted"})
