"""Files of a new project for each kind of API and framework. Pure."""

from __future__ import annotations

import base64
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cortex.lifecycle import ApiKind

#: Kinds of APIs that have code.
KINDS = (ApiKind.REALTIME, ApiKind.ASYNC, ApiKind.BATCH, ApiKind.TASK)
PYTHON = "python"


@dataclass(frozen=True)
class Framework:
    """Code that loads a small model with a framework and applies it to a list of values."""

    module: str  #: its installation is looked up; empty if nothing has to be installed
    packages: tuple[str, ...]  #: lines of requirements.txt
    imports: str
    load: str  #: body of `__init__`
    predict: str  #: body of `predict`
    values: tuple[object, ...]  #: sample
    files: tuple[tuple[str, bytes], ...] = ()  #: names and contents of further files


_FLOWERS = ((5.1, 3.5, 1.4, 0.2), (6.7, 3.0, 5.2, 2.3))
#: An ONNX model with one input, `values`, which it multiplies by 2.
_ONNX_MODEL = base64.b64decode(
    "CAgSADqPAQoiCgZ2YWx1ZXMKBmZhY3RvchILcHJlZGljdGlvbnMiA011bBIGZG91YmxlKhIIARABIgQAAABAQgZmYWN0b3JaIwoGdmFsdWVzEhkK"
    "FwgBEhMKBhIEcm93cwoJEgdjb2x1bW5zYigKC3ByZWRpY3Rpb25zEhkKFwgBEhMKBhIEcm93cwoJEgdjb2x1bW5zQgQKABAN"
)

FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {
        PYTHON: Framework(
            "",
            (),
            "",
            """\
            # Load your model here: this runs once in each process.
            self.factor = 2
            """,
            "return [value * self.factor for value in values]",
            (1, 2, 3),
        ),
        "sklearn": Framework(
            "sklearn",
            ("scikit-learn",),
            """\
            from sklearn.datasets import load_iris
            from sklearn.linear_model import LogisticRegression
            """,
            """\
            # Load your own model in place of this one, for example with joblib.load("model.joblib").
            flowers = load_iris()
            self.names = [str(name) for name in flowers.target_names]
            self.model = LogisticRegression(max_iter=1000).fit(flowers.data, flowers.target)
            """,
            "return [self.names[index] for index in self.model.predict(values)]",
            _FLOWERS,
        ),
        "pytorch": Framework(
            "torch",
            ("torch",),
            "import torch",
            """\
            # Load your own model in place of this one, for example with torch.jit.load("model.pt").
            self.model = torch.nn.Linear(4, 3)
            self.model.eval()
            """,
            """\
            with torch.inference_mode():
                return self.model(torch.tensor(values)).tolist()
            """,
            _FLOWERS,
        ),
        "tensorflow": Framework(
            "tensorflow",
            ("tensorflow",),
            "import tensorflow as tf",
            """\
            # Load your own model in place of this one, for example with tf.keras.models.load_model("model.keras").
            self.model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(3)])
            """,
            "return self.model(tf.constant(values)).numpy().tolist()",
            _FLOWERS,
        ),
        "onnx": Framework(
            "onnxruntime",
            ("onnxruntime",),
            """\
            import numpy as np
            import onnxruntime
            """,
            """\
            # model.onnx multiplies its input by 2. Put your own model in its place.
            self.session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
            self.input = self.session.get_inputs()[0].name
            """,
            """\
            (predictions,) = self.session.run(None, {self.input: np.array(values, np.float32)})
            return predictions.tolist()
            """,
            _FLOWERS,
            (("model.onnx", _ONNX_MODEL),),
        ),
        "xgboost": Framework(
            "xgboost",
            ("xgboost",),
            """\
            import numpy as np
            import xgboost
            """,
            """\
            # Load your own model in place of this one, for example with xgboost.Booster(model_file="model.json").
            samples = xgboost.DMatrix(np.array([[5.0, 3.4, 1.5, 0.2], [6.5, 3.0, 5.5, 2.0]]), [0, 1])
            self.model = xgboost.train({"objective": "binary:logistic"}, samples, 5)
            """,
            "return self.model.predict(xgboost.DMatrix(np.array(values))).tolist()",
            _FLOWERS,
        ),
        "transformers": Framework(
            "transformers",
            ("transformers", "torch"),
            "from transformers import pipeline",
            """\
            # The model is downloaded when the first process starts. Put the name of your own model here.
            self.classify = pipeline("text-classification", "distilbert-base-uncased-finetuned-sst-2-english")
            """,
            "return self.classify(values)",
            ("a clear and short book", "a long and boring film"),
        ),
    }
)


def project_files(name: str, kind: ApiKind, framework: str, is_installed: bool) -> dict[str, bytes]:
    """Return the files of a project by name. The framework is a requirement unless it is installed."""
    code = FRAMEWORKS[framework]
    files = {"cortex.yaml": _config(name, kind, code), _code_name(kind): _code(kind, code)}
    if kind in (ApiKind.REALTIME, ApiKind.ASYNC):
        files["sample.json"] = json.dumps({"values": code.values}) + "\n"
    elif kind is ApiKind.BATCH:
        items = {"items": code.values, "batch_size": 2}
        files["job.json"] = json.dumps({"workers": 1, "item_list": items}, indent=2) + "\n"
    if code.packages and not is_installed:
        files["requirements.txt"] = "\n".join(code.packages) + "\n"
    return {**{file: text.encode() for file, text in files.items()}, **dict(code.files)}


def _code_name(kind: ApiKind) -> str:
    return "task.py" if kind is ApiKind.TASK else "handler.py"


def _config(name: str, kind: ApiKind, code: Framework) -> str:
    if kind is ApiKind.TASK:
        values = json.dumps(code.values)
        section = f"  definition:\n    path: task.py\n    config:\n      values: {values}\n"
    else:
        section = "  handler:\n    type: python\n    path: handler.py\n"
    return f"- name: {name}\n  kind: {kind}\n{section}"


def _code(kind: ApiKind, code: Framework) -> str:
    imports = textwrap.dedent(code.imports).strip()
    load, predict = (textwrap.indent(textwrap.dedent(body).strip(), " " * 8) for body in (code.load, code.predict))
    name, arguments = ("Task", "self") if kind is ApiKind.TASK else ("Handler", "self, config")
    parts = [
        f"{imports}\n\n" if imports else "",
        f"class {name}:\n    def __init__({arguments}):\n{load}\n",
        textwrap.indent(_METHODS[kind], " " * 4),
        f"    def predict(self, values):\n{predict}\n",
    ]
    return "\n".join(part for part in parts if part)


_METHODS = {
    ApiKind.REALTIME: """\
def handle_post(self, payload):
    return {"predictions": self.predict(payload["values"])}
""",
    ApiKind.ASYNC: """\
def handle_async(self, payload):
    return {"predictions": self.predict(payload["values"])}
""",
    ApiKind.BATCH: """\
def handle_batch(self, payload):
    return self.predict(payload)
""",
    ApiKind.TASK: """\
def __call__(self, config):
    return {"predictions": self.predict(config["values"])}
""",
}
