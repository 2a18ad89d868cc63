"""Predict the progression of diabetes with the newest version of the model."""

from pathlib import Path

import joblib


class PythonPredictor:
    def __init__(self, config, python_client):
        self.client = python_client

    def load_model(self, model_path):
        return joblib.load(Path(model_path) / "model.joblib")

    def predict(self, payload):
        model = self.client.get_model()
        [progression] = model["regression"].predict([payload])
        return {"progression": round(progression, 1), "patients": model["patients"]}
