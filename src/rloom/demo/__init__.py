"""A demo that runs anywhere: a tiny model, a task whose answers can be checked, nothing to download."""
