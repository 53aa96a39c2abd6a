"""`rloom train` under the path that older documents name: python examples/scripts/rloo/rloo.py --dataset_name …"""

import sys

from rloom.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
