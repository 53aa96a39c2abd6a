"""How often a judge prefers a model's summaries to the reference summaries.

python examples/scripts/evals/judge_tldr.py --model_name_or_path MODEL --judge_model gpt-4o-mini --num_examples 1000

`rloom eval` with the TL;DR set, its reference summaries and a rubric for summaries; every flag of it may be given.
"""

import sys

from rloom.cli.main import main

RUBRIC = (
    "A good summary of a forum post is faithful to the post, holds its main points, leaves the rest out, and is short "
    "and clear. A summary that adds what the post does not say is bad, however well it reads."
)
DEFAULTS = {
    "--dataset_name": ["trl-lib/tldr"],
    "--dataset_test_split": ["validation"],
    "--reference_column": ["completion"],
    "--max_completion_length": ["200"],
    "--temperature": ["0"],
    "--rubric": [RUBRIC],
}

if __name__ == "__main__":
    given = sys.argv[1:]
    added = [part for flag, value in DEFAULTS.items() if flag not in given for part in (flag, *value)]
    sys.exit(main(["eval", *added, *given]))
