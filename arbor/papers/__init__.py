"""The papers that arbor implements, a folder each: rule, scorer, calibration and settings."""
