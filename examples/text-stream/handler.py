"""Continue a text, and send each word as soon as it is generated."""

import asyncio
import json
import random
from pathlib import Path


class Handler:
    def __init__(self, config):
        self.followers = json.loads(Path(config["model"]).read_text())
        self.pause_s = config["pause_s"]

    async def handle_post(self, payload):
        """Yield up to `words` words after `prompt`; the same `seed` gives the same words."""
        chance = random.Random(payload.get("seed"))
        text = payload["prompt"].split()
        for _ in range(payload.get("words", 30)):
            choices = self.followers.get(" ".join(text[-2:]).lower()) or self.followers.get(text[-1].lower())
            if not choices:
                return
            text.append(chance.choice(choices))
            yield f"{text[-1]} "
            await asyncio.sleep(self.pause_s)  # simulates the time that a large model needs per word
