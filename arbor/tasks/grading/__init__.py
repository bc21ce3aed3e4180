"""Graders: extraction and comparison of answers, versioned; none evaluates text of a model."""
