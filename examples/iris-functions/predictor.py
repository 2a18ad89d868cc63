"""Classify an iris flower: a Gaussian naive Bayes model behind two module functions."""

import numpy

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")

model = {}


def init(model_path, metadata):
    with numpy.load(model_path) as arrays:
        model.update(arrays)


def predict(sample, metadata):
    flower = numpy.array([sample[name] for name in FEATURES])
    distance = (flower - model["mean"]) ** 2 / model["variance"] + numpy.log(model["variance"])
    return metadata["labels"][distance.sum(axis=1).argmin()]
