"""What runs inside sandboxes, on the standard library alone: `program` the model's code, `harness` the tests.

The two never share a process. They speak over a pair of pipes: plain data (`wire`), and calls of objects that stay
where they are (`remote`). `fork_server` makes sandboxes, `light_json` and `like_pytest` are small parts of what their
names say.
"""
