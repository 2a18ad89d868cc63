"""Train classifiers on three data sets; write them as ONNX models, the one for irises in two versions.

Run as `make_model.py [DESTINATION]`: a folder, or an s3:// or gs:// URL; by default `models` beside this file.
"""

import sys
from pathlib import Path

import obstore
from obstore.store import LocalStore, from_url
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from sklearn.ensemble import RandomForestClassifier

#: Model, version, data, trees.
MODELS = [("iris", 1, load_iris, 2), ("iris", 2, load_iris, 20), ("wine", 1, load_wine, 20)]
MODELS += [("cancer", 1, load_breast_cancer, 20)]


def main():
    destination = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("models"))
    store = open_store(destination)
    for name, version, load, trees in MODELS:
        key = f"{name}/{version}/model.onnx"
        obstore.put(store, key, train(load(), trees))
        print(f"wrote {destination}/{key}")


def train(data, trees):
    model = RandomForestClassifier(n_estimators=trees, max_depth=4, random_state=0).fit(data.data, data.target)
    exported = to_onnx(
        model,
        initial_types=[("features", FloatTensorType([None, data.data.shape[1]]))],
        options={id(model): {"zipmap": False}},
        target_opset={"": 17, "ai.onnx.ml": 3},
    )
    return exported.SerializeToString()


def open_store(destination):
    """Open a folder or a bucket; credentials and endpoint come from variables such as AWS_ACCESS_KEY_ID."""
    if "://" in destination:
        return from_url(destination, client_options={"allow_http": True})
    return LocalStore(destination, mkdir=True)


if __name__ == "__main__":
    main()
