"""Make SavedModels and the results that TensorFlow itself computes with them: `python tensorflow_models.py FOLDER`.

This is a separate process, as TensorFlow takes seconds to import and half a gigabyte of memory. `make` runs it once per
test session, in whichever process of the session calls it first.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import TESTS


@dataclass(frozen=True)
class Case:
    """One call and the arrays that TensorFlow returned."""

    model: str
    signature_key: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]


def make(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one folder per model; below it, `cases` holds what `read_cases` returns."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / "tensorflow-models"
    with (root / "tensorflow-models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = Path(tempfile.mkdtemp(dir=root)) / folder.name
            environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(TESTS)}
            done = subprocess.run([sys.executable, __file__, made], capture_output=True, text=True, env=environment)
            assert not done.returncode, done.stderr[-5000:]
            made.rename(folder)
    return folder


def read_cases(folder: Path) -> list[Case]:
    """Return all recorded calls."""
    cases: list[Case] = pickle.loads((folder / "cases").read_bytes())  # noqa: S301 - just written by us
    return cases


def _main(folder: Path) -> None:
    import numpy as np
    import tensorflow as tf

    tf.random.set_seed(1)
    spec = tf.TensorSpec

    class Iris(tf.Module):
        def __init__(self) -> None:
            self.weights = tf.Variable(tf.random.normal([4, 3]))
            self.labels = tf.constant(["setosa", "versicolor", "virginica\0"])

        @tf.function(input_signature=[spec([None, 4], tf.float32, name="x")])
        def __call__(self, x):
            scores = tf.nn.softmax(tf.sin(x @ self.weights))
            found = tf.argmax(scores, axis=-1)
            return {"scores": scores, "class_ids": found, "classes": tf.gather(self.labels, found)}

    class Same(tf.Module):
        """Returns a computed copy of its input, and the input itself."""

        def __init__(self, dtype, shape):
            def call(x):
                if dtype == tf.bool:
                    y = tf.logical_not(x)
                elif dtype == tf.string:
                    y = tf.strings.join([x, x])
                else:
                    y = tf.cast(x + tf.cast(1, dtype), dtype)
                return {"same": tf.identity(x), "changed": y}

            self.call = tf.function(call, input_signature=[spec(shape, dtype, name="x")])

    class Several(tf.Module):
        @tf.function(input_signature=[spec([], tf.float32, name="a"), spec([None], tf.int32, name="b")])
        def both(self, a, b):
            return {"sum": a + tf.cast(b, tf.float32), "count": tf.size(b), "text": tf.strings.as_string(tf.size(b))}

        @tf.function(input_signature=[spec([None], tf.float32, name="x")])
        def checked(self, x):
            tf.debugging.assert_positive(x, "every x must be positive")
            return {"root": tf.sqrt(x)}

        @tf.function(input_signature=[spec(None, tf.float32, name="x")])
        def any_rank(self, x):
            return {"size": tf.size(x, tf.int64), "rank": tf.rank(x)}

    class Hostile(tf.Module):
        @tf.function(input_signature=[spec([None], tf.float32, name="x")])
        def __call__(self, x):
            tf.io.write_file(str(folder / "written"), "x")
            return {"content": tf.io.read_file("/etc/passwd")}

    def save(name, module, signatures):
        tf.saved_model.save(module, str(folder / name), signatures=signatures)

    iris, several = Iris(), Several()
    save("iris", iris, iris.__call__)
    save("several", several, {"predict": several.both, "checked": several.checked, "any_rank": several.any_rank})
    hostile = Hostile()
    save("hostile", hostile, hostile.__call__)
    save("ambiguous", several, {"first": several.checked, "second": several.any_rank})
    types = (
        tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.int16, tf.int32, tf.int64,
        tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.bool, tf.string, tf.complex64, tf.complex128,
    )  # fmt: skip
    for dtype in types:
        module = Same(dtype, [None, 2])
        save(f"same-{dtype.name}", module, module.call)
    _save_version_1(tf, folder / "version-1")

    text = [["a\0", ""], ["ä€", "x"]]
    numbers = [[0, 1], [1, 0], [1, 1]]
    calls = [
        ("iris", "serving_default", {"x": [[5.1, 3.5, 1.4, 0.2], [6.7, 3.1, 5.6, 2.4]]}),
        ("iris", "serving_default", {"x": np.zeros((0, 4), np.float32)}),
        ("several", "predict", {"a": 1.5, "b": [1, 2, 3]}),
        ("several", "predict", {"a": 1.5, "b": np.zeros(0, np.int32)}),
        ("several", "any_rank", {"x": [[[1.0], [2.0]]]}),
        ("version-1", "serving_default", {"word": ["red", "blue", "none"], "x": [0.1, 0.2, 0.3]}),
        *((f"same-{t.name}", "serving_default", {"x": text if t == tf.string else numbers}) for t in types),
        ("same-float32", "serving_default", {"x": [[0.1, float("nan")], [float("inf"), -0.0]]}),
        ("same-bfloat16", "serving_default", {"x": [[0.1, 3.14159], [1e38, -1e-30]]}),
        ("same-int64", "serving_default", {"x": [[2**63 - 2, -(2**63)], [2**53 + 1, 0]]}),
        ("same-uint64", "serving_default", {"x": [[2**64 - 2, 2**63], [2**53 + 1, 0]]}),
    ]
    cases = []
    for name, key, inputs in calls:
        signature = tf.saved_model.load(str(folder / name)).signatures[key]
        specs = signature.structured_input_signature[1]
        tensors = {name: tf.cast(v, specs[name].dtype) if specs[name].dtype == tf.bool else
                   tf.constant(v, specs[name].dtype) for name, v in inputs.items()}  # fmt: skip
        outputs = {name: _plain(value.numpy()) for name, value in signature(**tensors).items()}
        plain = {name: v.tolist() if isinstance(v, np.ndarray) and v.size else v for name, v in inputs.items()}
        cases.append(Case(name, key, plain, outputs))
    (folder / "cases").write_bytes(pickle.dumps(cases))


def _plain(value):
    """Return an array that is readable without TensorFlow."""
    import numpy as np

    array = np.asarray(value, object if isinstance(value, bytes) else None)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _save_version_1(tf, folder: Path) -> None:
    """Export as TensorFlow 1 did: a graph and a session, a vocabulary, an output that is an input."""
    v1 = tf.compat.v1
    vocabulary = folder.parent / "vocabulary.txt"
    vocabulary.write_text("red\ngreen\nblue\n")
    with tf.Graph().as_default(), v1.Session() as session:
        word = v1.placeholder(tf.string, [None], name="word")
        x = v1.placeholder(tf.float32, [None], name="x")
        scale = v1.get_variable("scale", initializer=3.0, use_resource=False)
        table = v1.lookup.StaticVocabularyTable(
            v1.lookup.TextFileInitializer(
                str(vocabulary), tf.string, v1.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64, v1.lookup.TextFileIndex.LINE_NUMBER,
            ),
            1,
        )  # fmt: skip
        outputs = {"id": table.lookup(word), "scaled": x * scale, "word": word}
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        v1.saved_model.simple_save(
            session, str(folder), {"word": word, "x": x}, outputs, legacy_init_op=v1.tables_initializer()
        )


if __name__ == "__main__":
    # Pickled under this module name, so that tests can load it.
    from harness.models.tensorflow_models import _main as main

    main(Path(sys.argv[1]))
