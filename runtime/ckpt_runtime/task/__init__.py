"""Subtasks: loop, operator chain, checkpointing around the pure barrier handler, end of data; and their worker."""
