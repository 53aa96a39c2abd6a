"""What runs inside sandboxes, on the standard library alone: `program` the model's code, `harness` the tests.

The two never share a process. They speak over a pair of pipes (`wire`), on which only plain data travels.
"""
