"""Scorers: which tokens a block keeps."""
