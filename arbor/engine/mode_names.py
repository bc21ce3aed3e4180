"""Names of the modes and of the kinds of rehydration, for settings that are read without torch."""

from __future__ import annotations

from typing import Literal

Mode = Literal["lossless", "lossy"]
Rehydrate = Literal["selective", "span", "off"]
