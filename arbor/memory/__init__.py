"""Where KV lies: the pool's tensors, the account of its slots, and who may write a span."""

from arbor.memory.memory import KVMemory

__all__ = ["KVMemory"]
