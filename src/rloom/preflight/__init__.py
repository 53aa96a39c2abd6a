"""What a run will be like, measured on a few groups before it: signal, ends, speed, memory, and what to set."""
