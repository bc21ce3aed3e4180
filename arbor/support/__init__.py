"""Small helpers that know no search: files, folders, units."""
