"""Train a random forest on the iris data; write it as version 1 of an ONNX model.

Run as `make_model.py [DESTINATION]`: a folder, or an s3:// or gs:// URL; by default `models` beside this file.
"""

import sys
from pathlib import Path

import obstore
from obstore.store import LocalStore, from_url
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier


def main():
    iris = load_iris()
    model = RandomForestClassifier(n_estimators=20, max_depth=4, random_state=0).fit(iris.data, iris.target)
    exported = to_onnx(
        model,
        initial_types=[("flower", FloatTensorType([None, 4]))],
        options={id(model): {"zipmap": False}},
        target_opset={"": 17, "ai.onnx.ml": 3},
    )
    destination = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("models"))
    obstore.put(open_store(destination), "1/model.onnx", exported.SerializeToString())
    print(f"wrote {destination}/1/model.onnx")


def open_store(destination):
    """Open a folder or a bucket; credentials and endpoint come from variables such as AWS_ACCESS_KEY_ID."""
    if "://" in destination:
        return from_url(destination, client_options={"allow_http": True})
    return LocalStore(destination, mkdir=True)


if __name__ == "__main__":
    main()
