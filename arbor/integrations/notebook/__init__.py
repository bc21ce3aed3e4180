"""Notebooks: the progress of searches below a cell."""

from arbor.feature import Feature

FEATURE = Feature()
