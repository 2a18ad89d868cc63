"""Recognize handwritten digits: the items are paths of images, and each batch writes a file of digits."""

import io
import json

import numpy
import obstore
from obstore.store import LocalStore, from_url
from PIL import Image

SIDE = 8  # the model was trained on images of 8 x 8 pixels
INK = 16  # in the training data, full ink is 16 and paper is 0


class Handler:
    def __init__(self, config, job_spec):
        with numpy.load(config["model"]) as arrays:
            self.hidden = arrays["hidden_weights"], arrays["hidden_bias"]
            self.output = arrays["output_weights"], arrays["output_bias"]
        self.results = open_store(f"{config['results']}/{job_spec['job_id']}")

    def handle_batch(self, payload, batch_id):
        pixels = numpy.stack([read_picture(path) for path in payload])
        hidden = numpy.maximum(pixels @ self.hidden[0] + self.hidden[1], 0)
        digits = (hidden @ self.output[0] + self.output[1]).argmax(axis=1)
        lines = [{"file": path, "digit": int(digit)} for path, digit in zip(payload, digits, strict=True)]
        # A batch may run again after a crash: the file named after it is then replaced.
        obstore.put(self.results, f"{batch_id}.json", json.dumps(lines).encode())
        return lines


def read_picture(path):
    """Scale an image to the size of the training data; invert dark ink on light paper."""
    folder, _, name = path.rpartition("/")
    data = bytes(obstore.get(open_store(folder), name).bytes())
    picture = Image.open(io.BytesIO(data)).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = numpy.asarray(picture, dtype=numpy.float64).ravel() / 255
    return (1 - pixels if pixels.mean() > 0.5 else pixels) * INK


def open_store(url):
    """Open a bucket or a folder; credentials and endpoint come from variables such as AWS_ACCESS_KEY_ID."""
    if "://" in url:
        return from_url(url, client_options={"allow_http": True})
    return LocalStore(url, mkdir=True)
