"""inspect_ai: the model provider ``arbor`` and the solver ``search``, by an entry point."""

from arbor.feature import Feature

FEATURE = Feature(extras={"inspect": ("inspect_ai's provider arbor", ("inspect_ai",))})
