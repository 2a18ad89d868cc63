"""Count the words of a text asynchronously."""

import re
from collections import Counter


class Handler:
    def __init__(self, config):
        self.most = config["most"]

    def handle_async(self, payload):
        if not isinstance(payload, str):
            raise ValueError("send the text with the content type text/plain")
        words = re.findall(r"\w+", payload.lower())
        return {"words": len(words), "most": [list(pair) for pair in Counter(words).most_common(self.most)]}
