"""Many problems in one folder: where they come from, what is finished, and what it adds up to."""
