"""The page of a run, `rloom show`: its data, its server, its export and its terminal form."""
