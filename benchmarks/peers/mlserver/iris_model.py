"""MLServer: the ONNX model of the iris classifier, on one thread."""

from __future__ import annotations

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Iris(MLModel):
    """A runtime of the user's own, because MLServer has none for ONNX."""

    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession("iris.onnx", options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        array = NumpyCodec.decode_input(payload.inputs[0])
        label, probabilities = self._session.run(None, {"X": array})
        outputs = [
            NumpyCodec.encode_output("label", label),
            NumpyCodec.encode_output("probabilities", probabilities),
        ]
        return InferenceResponse(model_name=self.name, outputs=outputs)
