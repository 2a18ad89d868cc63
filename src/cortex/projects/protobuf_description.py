"""Compile a `.proto` file with protoc, and print its services as JSON; a script for an interpreter with grpcio-tools.

`protobuf_file.py` runs it in a process of its own, so that no process of cortex imports grpcio or protobuf. It imports
nothing of cortex: the interpreter may be one that has only grpcio-tools.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

#: Field numbers that lead from a file to one of its services, and from there to one of its methods.
_SERVICE, _METHOD = 6, 2


def compile_file(name: str) -> Any:
    """Return the descriptors of a file in the working directory and its imports; None if protoc printed errors."""
    well_known = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptors"
        options = ["--proto_path=.", f"--proto_path={well_known}", f"--descriptor_set_out={output}"]
        if protoc.main(["protoc", *options, "--include_imports", "--include_source_info", name]):
            return None
        return descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())


def describe(file: Any) -> dict[str, Any]:
    """Return the package and the services of a file, with the positions of services and methods from 1."""
    places = {tuple(location.path): location.span for location in file.source_code_info.location}

    def position(*path: int) -> dict[str, int]:
        span = places.get(path, (0, 0))
        return {"line": span[0] + 1, "column": span[1] + 1}

    return {
        "package": file.package,
        "services": [
            {
                "name": service.name,
                **position(_SERVICE, number),
                "rpcs": [
                    {
                        "name": rpc.name,
                        **position(_SERVICE, number, _METHOD, index),
                        "request_streams": rpc.client_streaming,
                        "response_streams": rpc.server_streaming,
                    }
                    for index, rpc in enumerate(service.method)
                ],
            }
            for number, service in enumerate(file.service)
        ],
    }


if __name__ == "__main__":
    compiled = compile_file(sys.argv[1])
    if compiled is None:
        raise SystemExit(1)
    print(json.dumps(describe(next(file for file in compiled.file if file.name == sys.argv[1]))))  # noqa: T201
