"""Model-written programs as a reward: finding them, testing them in sandboxes, comparing what they return."""
