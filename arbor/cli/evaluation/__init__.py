"""``arbor eval`` and ``arbor compare``: many problems, one search or several."""
