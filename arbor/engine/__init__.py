"""Forward passes over the tree: any Hugging Face decoder over our own slots."""
