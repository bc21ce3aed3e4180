"""Allocators: how many tokens each block keeps."""
