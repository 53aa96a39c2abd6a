"""`python -m rloom …` is `rloom …`: the form that torchrun launches, `torchrun --nproc_per_node 2 -m rloom train …`."""

import sys

from rloom.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
