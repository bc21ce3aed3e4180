"""The progress of searches below a cell of a notebook."""

from arbor.feature import Feature

FEATURE = Feature()
