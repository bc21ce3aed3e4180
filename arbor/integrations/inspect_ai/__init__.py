"""The model provider ``arbor`` and the solver ``search`` of inspect_ai, by an entry point."""

from arbor.feature import Feature

FEATURE = Feature(extras={"inspect": ("inspect_ai's provider arbor", ("inspect_ai",))})
