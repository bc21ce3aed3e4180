"""Helpers independent of the search: files, folders, units."""
