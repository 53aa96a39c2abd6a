"""How good a model is: scores, pass@k, length, KL from a reference, win rate, each with an interval."""
