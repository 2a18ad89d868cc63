"""Classify an iris flower with an ONNX model that cortex loads."""

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


class ONNXPredictor:
    def __init__(self, onnx_client, config):
        self.client = onnx_client
        self.labels = config["labels"]

    def predict(self, payload):
        flower = [[payload[name] for name in FEATURES]]
        classes, probabilities = self.client.predict(flower)
        return {"label": self.labels[classes[0]], "probability": round(float(probabilities[0].max()), 4)}
