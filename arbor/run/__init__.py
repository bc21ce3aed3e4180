"""One run: settings, session, limits, listeners and its solution."""
