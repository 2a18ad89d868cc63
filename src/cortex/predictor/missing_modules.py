"""Which requirement provides a module that a user's code could not import. Standard library only."""

from __future__ import annotations

#: Modules whose package has another name.
_PACKAGES = {
    "Bio": "biopython",
    "Crypto": "pycryptodome",
    "MySQLdb": "mysqlclient",
    "OpenSSL": "pyOpenSSL",
    "PIL": "Pillow",
    "absl": "absl-py",
    "attr": "attrs",
    "botocore": "boto3",
    "bs4": "beautifulsoup4",
    "cairo": "pycairo",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "PyMuPDF",
    "git": "GitPython",
    "github": "PyGithub",
    "google.cloud.bigquery": "google-cloud-bigquery",
    "google.cloud.storage": "google-cloud-storage",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "igraph": "python-igraph",
    "imblearn": "imbalanced-learn",
    "jose": "python-jose",
    "jwt": "PyJWT",
    "magic": "python-magic",
    "OpenGL": "PyOpenGL",
    "paho": "paho-mqtt",
    "pkg_resources": "setuptools",
    "psycopg2": "psycopg2-binary",
    "pythoncom": "pywin32",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skopt": "scikit-optimize",
    "slugify": "python-slugify",
    "snowflake": "snowflake-connector-python",
    "socks": "PySocks",
    "umap": "umap-learn",
    "usb": "pyusb",
    "whisper": "openai-whisper",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}

#: Modules that an extra of our own package brings, in versions that go together.
_EXTRAS = {
    "torch": "torch",
    "torchvision": "torch",
    "tensorflow": "tensorflow",
    "tensorflow_hub": "tensorflow",
    "keras": "tensorflow",
    "xgboost": "xgboost",
    "onnxruntime": "onnx",
    **dict.fromkeys(
        (
            "PIL",
            "boto3",
            "botocore",
            "cloudpickle",
            "cv2",
            "dill",
            "joblib",
            "msgpack",
            "nltk",
            "numpy",
            "pandas",
            "requests",
            "scipy",
            "six",
            "skimage",
            "sklearn",
            "statsmodels",
            "sympy",
        ),
        "predictors",
    ),
}
_RENAMED = {"tensorflow": "tensorflow-cpu"}


def suggest(module: str) -> str:
    """Return what to write into requirements.txt, as one line. `module` may be dotted."""
    top = module.partition(".")[0]
    package = _PACKAGES.get(module) or _longest_known(module) or _RENAMED.get(top) or top.replace("_", "-")
    hint = f"add {package} to requirements.txt"
    if extra := _EXTRAS.get(top):
        hint += f", or install cortex-serving[{extra}] for all APIs"
    return hint


def _longest_known(module: str) -> str | None:
    while module:
        if module in _PACKAGES:
            return _PACKAGES[module]
        module = module.rpartition(".")[0]
    return None
