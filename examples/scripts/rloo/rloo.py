"""`rloom train` under the path that older documents name: python examples/scripts/rloo/rloo.py --dataset_name …

The metrics that those documents list are logged too; `--log_older_metrics false` leaves them out.
"""

import sys

from rloom.cli.main import main

if __name__ == "__main__":
    # A flag of the user's comes later, and wins.
    sys.exit(main(["train", "--log_older_metrics=true", *sys.argv[1:]]))
