"""Train a logistic regression on the iris data; write it as version 1 of a TensorFlow SavedModel.

Run as `make_model.py [DESTINATION]`: a folder, or an s3:// or gs:// URL; by default `models` beside this file.
"""

import sys
import tempfile
from pathlib import Path

import obstore
import tensorflow as tf
from obstore.store import LocalStore, from_url
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression


class Classifier(tf.Module):
    def __init__(self, weights, bias):
        self.weights = tf.Variable(weights, dtype=tf.float32)
        self.bias = tf.Variable(bias, dtype=tf.float32)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="flower")])
    def classify(self, flower):
        return {"probabilities": tf.nn.softmax(flower @ self.weights + self.bias)}


def main():
    iris = load_iris()
    model = LogisticRegression(max_iter=1000).fit(iris.data, iris.target)
    classifier = Classifier(model.coef_.T, model.intercept_)
    destination = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("models"))
    store = open_store(destination)
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(classifier, folder, signatures=classifier.classify)
        for file in Path(folder).rglob("*"):
            if file.is_file():
                obstore.put(store, f"1/{file.relative_to(folder)}", file)
    print(f"wrote {destination}/1")


def open_store(destination):
    """Open a folder or a bucket; credentials and endpoint come from variables such as AWS_ACCESS_KEY_ID."""
    if "://" in destination:
        return from_url(destination, client_options={"allow_http": True})
    return LocalStore(destination, mkdir=True)


if __name__ == "__main__":
    main()
