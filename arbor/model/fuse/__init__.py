"""Parts of a loaded model as few kernels, where they compute what the model does."""
