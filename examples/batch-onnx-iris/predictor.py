"""Classify batches of iris flowers with an ONNX model that cortex loads; cortex keeps the return values."""

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


class ONNXPredictor:
    def __init__(self, onnx_client, config):
        self.client = onnx_client
        self.labels = config["labels"]

    def predict(self, payload):
        flowers = [[flower[name] for name in FEATURES] for flower in payload]
        classes, _ = self.client.predict(flowers)
        return [self.labels[number] for number in classes]
