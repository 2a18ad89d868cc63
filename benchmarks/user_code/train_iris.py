"""Train and export `iris.onnx`, the committed model of the iris workload, from scikit-learn's own data."""

from __future__ import annotations

from pathlib import Path

from skl2onnx import to_onnx
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression


def main() -> None:
    """Write the model next to this file."""
    flowers, species = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=1000).fit(flowers, species)
    exported = to_onnx(model, flowers[:1].astype("float32"), options={"zipmap": False}, target_opset=17)
    target = Path(__file__).with_name("iris.onnx")
    target.write_bytes(exported.SerializeToString())
    print(f"{target.name}: {target.stat().st_size} bytes, accuracy {model.score(flowers, species):.3f}")


if __name__ == "__main__":
    main()
