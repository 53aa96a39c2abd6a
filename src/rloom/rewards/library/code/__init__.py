"""Model-written programs as a reward.

`execution` is the reward function. `extraction` finds the program in a completion (by its `fences`), `problems` reads
the tests from a row, `imports` checks that sandboxes have what tests import, `runs` runs a program against its tests in
sandboxes, and `compare` says whether what came back is what was expected.
"""
