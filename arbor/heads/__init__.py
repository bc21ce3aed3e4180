"""KV heads that keep tokens of their own: what each holds, which it keeps, and how it is read."""
