"""What a run shows: metrics, tables of completions, progress."""
