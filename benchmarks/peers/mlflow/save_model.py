"""MLflow: save the ONNX model of the iris classifier as a folder that `mlflow models serve` accepts."""

from __future__ import annotations

import sys

import mlflow.onnx
import onnx

mlflow.onnx.save_model(onnx.load(sys.argv[1]), sys.argv[2], onnx_session_options={"intra_op_num_threads": 1})
