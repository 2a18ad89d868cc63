"""Count which word follows which one or two words in corpus.txt; write the table to model.json."""

import json
from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).parent


def main():
    words = (FOLDER / "corpus.txt").read_text().split()
    followers = defaultdict(list)
    for first, second, third in zip(words, words[1:], words[2:], strict=False):
        followers[second.lower()].append(third)
        followers[f"{first} {second}".lower()].append(third)
    (FOLDER / "model.json").write_text(json.dumps(followers, indent=0, sort_keys=True) + "\n")
    print(f"{len(words)} words read, {len(followers)} contexts known")


if __name__ == "__main__":
    main()
