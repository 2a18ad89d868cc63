"""Train a random forest on the iris data of scikit-learn; write it to model.onnx."""

from pathlib import Path

from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

MODEL = Path(__file__).with_name("model.onnx")


def main():
    iris = load_iris()
    x_train, x_test, y_train, y_test = train_test_split(iris.data, iris.target, random_state=0, stratify=iris.target)
    model = RandomForestClassifier(n_estimators=20, max_depth=4, random_state=0).fit(x_train, y_train)
    exported = to_onnx(
        model,
        initial_types=[("flower", FloatTensorType([None, 4]))],
        options={id(model): {"zipmap": False}},
        target_opset={"": 17, "ai.onnx.ml": 3},
    )
    MODEL.write_bytes(exported.SerializeToString())
    print(f"accuracy on unseen flowers: {model.score(x_test, y_test):.3f}")


if __name__ == "__main__":
    main()
