"""Recognize a handwritten digit: image bytes in, JSON out."""

import io

import numpy
from PIL import Image, UnidentifiedImageError
from starlette.responses import JSONResponse

SIDE = 8  # the model was trained on images of 8 x 8 pixels
INK = 16  # in the training data, full ink is 16 and paper is 0


class Handler:
    def __init__(self, config):
        with numpy.load(config["model"]) as arrays:
            self.hidden = arrays["hidden_weights"], arrays["hidden_bias"]
            self.output = arrays["output_weights"], arrays["output_bias"]

    def handle_post(self, payload):
        try:
            pixels = read_picture(payload)
        except (UnidentifiedImageError, TypeError):
            return JSONResponse({"error": "send an image, for example: curl --data-binary @digit.png"}, status_code=400)
        hidden = numpy.maximum(pixels @ self.hidden[0] + self.hidden[1], 0)
        scores = hidden @ self.output[0] + self.output[1]
        probabilities = numpy.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        return {"digit": probabilities.argmax(), "probability": probabilities.max().round(4)}


def read_picture(data):
    """Scale an image to the size of the training data; invert dark ink on light paper."""
    picture = Image.open(io.BytesIO(data)).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = numpy.asarray(picture, dtype=numpy.float64).ravel() / 255
    return (1 - pixels if pixels.mean() > 0.5 else pixels) * INK
