"""The networks: loading them, their log-probabilities, and the frozen reference."""
