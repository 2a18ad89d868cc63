"""Continuous batching: one loop computes the next token of all running sequences in each step.

A sequence joins at the next step after it arrived and leaves when it is complete, so short answers never wait for long
ones. A prompt is read like an answer, one token per step, while the others go on.
"""

import asyncio
import contextlib
import contextvars
from collections import deque

import numpy as np
from transformer import END, decode, encode


class Sequence:
    """One prompt and its answer."""

    def __init__(self, prompt, max_tokens, temperature, seed, stops):
        self.tokens = encode(prompt)
        self.prompt_tokens = len(self.tokens)
        self.max_tokens = max_tokens  #: of the answer
        self.temperature = temperature
        self.stops = stops  #: texts that end the answer, and are not part of it
        self.random = np.random.default_rng(seed)
        self.position = 0  #: the number of tokens that the model has read
        self.finish_reason = None  #: "stop" or "length"
        self.answered = asyncio.Queue()  #: texts of tokens, then None; or an exception

    @property
    def completion_tokens(self):
        """Return the number of tokens that the model has generated."""
        return len(self.tokens) - self.prompt_tokens


class Engine:
    """Runs the model for all requests of this process."""

    def __init__(self, model):
        self.model = model
        self._waiting = deque()
        self._running = {}  #: by slot of the model's cache
        self._task = None
        self.steps = 0
        self.largest_batch = 0

    async def answer(self, sequence):
        """Yield the text of the answer in pieces, up to its first stop text.

        A piece that may be the beginning of a stop text is held back. If this generator is closed, because the client
        has disconnected, the sequence leaves the batch.
        """
        held = ""
        async with contextlib.aclosing(self._generate(sequence)) as texts:
            async for text in texts:
                held += text
                found = [held.index(stop) for stop in sequence.stops if stop in held]
                if found:
                    sequence.finish_reason = "stop"
                    held = held[: min(found)]
                    break
                safe = len(held) - max((_overlap(held, stop) for stop in sequence.stops), default=0)
                if safe:
                    yield held[:safe]
                held = held[safe:]
        if held:
            yield held

    async def _generate(self, sequence):
        """Yield the text of each token."""
        self._waiting.append(sequence)
        if self._task is None or self._task.done():
            # In an empty context: what the model prints belongs to no request.
            self._task = asyncio.create_task(self._run(), context=contextvars.Context())
        try:
            while (answered := await sequence.answered.get()) is not None:
                if isinstance(answered, Exception):
                    raise answered
                yield answered
        finally:
            sequence.finish_reason = sequence.finish_reason or "stop"

    async def _run(self):
        """Step until no sequence is left."""
        try:
            while self._waiting or self._running:
                self._admit()
                if self._running:
                    batch = list(self._running.items())
                    # On a thread, so that requests are received and answers are sent meanwhile.
                    scores = await asyncio.to_thread(self._step, batch)
                    self._distribute(batch, scores)
        except Exception as error:
            for sequence in (*self._running.values(), *self._waiting):
                sequence.answered.put_nowait(error)
            self._running.clear()
            self._waiting.clear()

    def _admit(self):
        """Drop the sequences whose callers have gone, and give free slots to those that wait."""
        self._running = {slot: each for slot, each in self._running.items() if each.finish_reason is None}
        free = [slot for slot in range(self.model.slots) if slot not in self._running]
        while free and self._waiting:
            sequence = self._waiting.popleft()
            if sequence.finish_reason is None:
                self._running[free.pop()] = sequence

    def _step(self, batch):
        self.steps += 1
        self.largest_batch = max(self.largest_batch, len(batch))
        slots = [slot for slot, _ in batch]
        tokens = [sequence.tokens[sequence.position] for _, sequence in batch]
        return self.model.step(slots, tokens, [sequence.position for _, sequence in batch])

    def _distribute(self, batch, scores):
        """Choose the next token of each sequence that has read its prompt."""
        for (_, sequence), row in zip(batch, scores, strict=True):
            sequence.position += 1
            if sequence.position < len(sequence.tokens) or sequence.finish_reason is not None:
                continue
            token = self.model.choose(row, sequence.temperature, sequence.random)
            sequence.tokens.append(token)
            if token != END:
                sequence.answered.put_nowait(decode(token))
            if token == END or sequence.completion_tokens >= sequence.max_tokens:
                sequence.finish_reason = "stop" if token == END else "length"
                sequence.answered.put_nowait(None)


def _overlap(text, stop):
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
