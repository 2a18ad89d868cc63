"""Classify an iris flower by the lengths and widths of its sepals and petals."""

import numpy

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


class Handler:
    def __init__(self, config):
        model = numpy.load(config["model"])
        self.weights, self.bias = model["weights"], model["bias"]
        self.labels = config["labels"]

    def handle_post(self, payload):
        flower = [payload[name] for name in FEATURES]
        scores = self.weights @ flower + self.bias
        probabilities = numpy.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        best = probabilities.argmax()
        return {"label": self.labels[best], "probability": probabilities[best].round(4)}
