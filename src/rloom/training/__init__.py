"""The trainer and its parts: collecting rollouts, learning from them, keeping checkpoints."""
