"""Classify an iris flower with a random forest in the ONNX format."""

import numpy
import onnxruntime

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


class PythonPredictor:
    def __init__(self, config):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(config["model"], options, providers=["CPUExecutionProvider"])
        self.labels = config["labels"]

    def predict(self, payload):
        flower = numpy.array([[payload[name] for name in FEATURES]], dtype=numpy.float32)
        classes, probabilities = self.session.run(None, {"flower": flower})
        return {"label": self.labels[classes[0]], "probability": round(float(probabilities[0].max()), 4)}
