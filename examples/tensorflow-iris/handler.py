"""Classify an iris flower with a TensorFlow SavedModel that cortex loads."""

FEATURES = ("sepal_length", "sepal_width", "petal_length", "petal_width")


class Handler:
    def __init__(self, tensorflow_client, config):
        self.client = tensorflow_client
        self.labels = config["labels"]

    def handle_post(self, payload):
        flower = [[payload[name] for name in FEATURES]]
        probabilities = self.client.predict({"flower": flower})["probabilities"]
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        return {"label": self.labels[best], "probability": round(probabilities[best], 4)}
