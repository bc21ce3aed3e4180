"""A Hugging Face decoder: loading it, describing it, running it over slots."""
