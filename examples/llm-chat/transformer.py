"""A tiny transformer with random weights: it shows how a language model is served, and talks nonsense.

Everything that a server has to care about is as in large models: tokens, positions, a cache of keys and values per
sequence, and a step that computes the next token of many sequences at once.
"""

import numpy as np

#: One token per character. Characters of a prompt that are not in the alphabet are read as "?".
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
END = len(ALPHABET)  #: the token that ends an answer
VOCABULARY = len(ALPHABET) + 1


def encode(text):
    """Return the tokens of a text."""
    return [ALPHABET.index(character if character in ALPHABET else "?") for character in text]


def decode(token):
    """Return the text of a token; the end has none."""
    return ALPHABET[token] if token < END else ""


class Transformer:
    """The weights, and the caches of all sequences that are being generated: one slot for each of them."""

    def __init__(self, slots, max_tokens, layers=2, heads=4, width=64, seed=0):
        random = np.random.default_rng(seed)

        def weights(*shape):
            return (random.standard_normal(shape) / np.sqrt(shape[-2])).astype("float32")

        self.slots = slots
        self.max_tokens = max_tokens  #: of a prompt and its answer together
        self.heads = heads
        self.embedding = weights(VOCABULARY, width)
        self.positions = weights(max_tokens, width)
        self.queries, self.keys, self.values, self.outputs = (weights(layers, width, width) for _ in range(4))
        self.widen, self.narrow = weights(layers, width, 4 * width), weights(layers, 4 * width, width)
        self.unembedding = 4 * weights(width, VOCABULARY)
        cache = (layers, slots, heads, max_tokens, width // heads)
        self.key_cache, self.value_cache = np.zeros(cache, "float32"), np.zeros(cache, "float32")

    def step(self, slots, tokens, positions):
        """Append one token to each of several sequences, and return the scores of the tokens that may follow.

        The three arguments are lists of the same length. The weights are read once for all sequences: in a large
        model, a step for sixteen takes little longer than a step for one.
        """
        x = self.embedding[tokens] + self.positions[positions]
        for layer in range(len(self.queries)):
            normal = _normalize(x)
            query, key, value = (
                (normal @ each[layer]).reshape(len(x), self.heads, -1)
                for each in (self.queries, self.keys, self.values)
            )
            attended = np.empty_like(query)
            for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
                self.key_cache[layer, slot, :, position] = key[row]
                self.value_cache[layer, slot, :, position] = value[row]
                attended[row] = self._attend(layer, slot, position, query[row])
            x = x + attended.reshape(x.shape) @ self.outputs[layer]
            x = x + np.maximum(_normalize(x) @ self.widen[layer], 0) @ self.narrow[layer]
        return _normalize(x) @ self.unembedding

    def _attend(self, layer, slot, position, query):
        """Return what a token takes from those before it in its sequence, which no other sequence sees."""
        keys = self.key_cache[layer, slot, :, : position + 1]  # head, position, dimension
        values = self.value_cache[layer, slot, :, : position + 1]
        scores = (keys @ query[..., None])[..., 0] / np.sqrt(query.shape[-1])
        return (_softmax(scores)[:, None, :] @ values)[:, 0]

    def choose(self, scores, temperature, random):
        """Return the next token: the most likely one at temperature 0, otherwise a random one by its probability."""
        if temperature < 1e-5:  # the division would overflow
            return int(scores.argmax())
        return int(random.choice(VOCABULARY, p=_softmax(scores.astype("float64") / temperature)))


def _normalize(x):
    return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)


def _softmax(x):
    exponents = np.exp(x - x.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)
