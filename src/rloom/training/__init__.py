"""The trainer: collects rollouts, learns from them, and saves checkpoints."""
