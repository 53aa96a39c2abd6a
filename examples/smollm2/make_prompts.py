"""Writes the prompts of the tutorial: two words each, which one sentence shall contain.

    python examples/smollm2/make_prompts.py --output runs/words

Words of the held-out prompts occur in no prompt that is trained on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

TEXT = """
apple arm army artist baby badge ball bank barn basket bath beach bean bear bed bee bell belt bench bicycle bird blanket
boat body bone book boot bottle bowl box boy branch bread bridge brother brush bucket building bus butter button cake
camera camp candle captain car card carpet castle cat cave chain chair cheese cherry chest chicken child church circle
city clock cloth cloud coat coffee coin collar corner cotton cow crown cup curtain dance desk doctor dog door dress
driver drum duck dust ear earth egg elephant engine eye face factory family farm farmer father feather field finger fire
fish flag floor flower fly foot forest fork fox friend frog fruit garden gate ghost gift girl glass glove goat gold
grandmother grass guitar hair hammer hand harbor hat heart hill honey horse hospital hotel house ice iron island jacket
jar judge juice key king kitchen kite knife ladder lake lamp leaf leather letter library light lion lock lunch machine
map market medicine milk mirror money monkey moon morning mother mountain mouse mouth museum music nail neck needle nest
net newspaper night nose nurse ocean office oil onion orange oven owl paint paper park path peach pen pencil phone piano
picture pig pilot pipe plane plant plate pocket poem pond potato prince queen rabbit radio rain ring river road robot
rock roof room rope rose sail salt sand school sea seed sheep shelf ship shirt shoe shop silver sister sky snake snow
soap sock soldier song soup spider spoon spring stamp star station stone storm story street student sugar summer sun
table tailor tea teacher tent thread thumb ticket tiger toe tomato tower town toy train tree truck umbrella uncle valley
violin voice wagon wall watch water wheel whistle wind window wing winter wolf woman wood wool writer yard
"""
NOUNS = TEXT.split()
HELD_OUT = 60


def rows_of(words: list[str], count: int, draw: random.Random) -> list[dict[str, object]]:
    """Prompts of pairs of these words, no pair twice."""
    pairs = draw.sample(list(itertools.permutations(words, 2)), count)
    text = "Write one sentence that contains the words '{}' and '{}'."
    return [{"prompt": [{"role": "user", "content": text.format(*pair)}], "words": list(pair)} for pair in pairs]


def main(arguments: list[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/words")
    folder = Path(parser.parse_args(arguments).output)
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = draw.sample(NOUNS, len(NOUNS))
    for name, rows in (
        ("train", rows_of(words[HELD_OUT:], 4096, draw)),
        ("held_out", rows_of(words[:HELD_OUT], 256, draw)),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
