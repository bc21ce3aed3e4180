"""Many engines, each in a process of its own, on one machine or many."""
