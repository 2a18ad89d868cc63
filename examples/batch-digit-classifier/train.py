"""Train a small neural network on the digits of scikit-learn; write model.npz and images of unseen digits."""

from pathlib import Path

import numpy
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

FOLDER = Path(__file__).parent
PICTURES = 20


def main():
    digits = load_digits()
    x_train, x_test, y_train, y_test = train_test_split(digits.data, digits.target, random_state=0)
    model = MLPClassifier(hidden_layer_sizes=(32,), alpha=0.1, max_iter=1000, random_state=0).fit(x_train, y_train)
    numpy.savez(
        FOLDER / "model.npz",
        hidden_weights=model.coefs_[0].astype(numpy.float32),
        hidden_bias=model.intercepts_[0].astype(numpy.float32),
        output_weights=model.coefs_[1].astype(numpy.float32),
        output_bias=model.intercepts_[1].astype(numpy.float32),
    )
    (FOLDER / "digits").mkdir(exist_ok=True)
    for number in range(PICTURES):
        draw(x_test[number], FOLDER / "digits" / f"{number:02}.png")
    print(f"accuracy on unseen digits: {model.score(x_test, y_test):.3f}")
    print(f"in the pictures: {y_test[:PICTURES].tolist()}")


def draw(pixels, path):
    """Write an image with dark ink on light paper, enlarged so that people can recognize it."""
    ink = (255 - pixels.reshape(8, 8) * 255 / 16).astype(numpy.uint8)
    Image.fromarray(ink).resize((128, 128), Image.Resampling.NEAREST).save(path)


if __name__ == "__main__":
    main()
