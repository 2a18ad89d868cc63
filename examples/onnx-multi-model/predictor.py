"""Classify with the model and version in the query."""


class ONNXPredictor:
    def __init__(self, onnx_client, config):
        self.client = onnx_client

    def predict(self, payload, query_params):
        name, version = query_params.get("model", "iris"), query_params.get("version", "latest")
        classes, probabilities = self.client.predict([payload], name, version)
        return {"class": classes[0], "probability": round(float(probabilities[0].max()), 4)}
