"""Measures a model: scores, pass@k, length, KL and win rate, each with an interval."""
