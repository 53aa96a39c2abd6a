"""Data sets, prompts, the plan of updates, and micro-batches."""
