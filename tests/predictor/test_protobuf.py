"""The compilation of a `.proto` file for the process that serves it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cortex.errors import UserError
from cortex.payloads.signature import BodySignature
from cortex.predictor.interface import GENERATIONS, for_grpc
from cortex.predictor.protobuf import bind_service, load_definition
from harness.servers.grpc_client import NUMBERS

pytestmark = pytest.mark.processes


def test_messages_of_imported_files_are_imported_first(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "point.proto").write_text('syntax = "proto3"; package geo; message Point { int32 x = 1; }')
    (tmp_path / "area.proto").write_text("""
        syntax = "proto3";
        package geo;
        import "shared/point.proto";
        import "google/protobuf/empty.proto";
        service Area { rpc Add (Point) returns (google.protobuf.Empty); }
    """)
    definition = load_definition(tmp_path, "area.proto")
    assert definition.rpcs == ["Add"]
    (rpc,) = definition.service.methods
    assert (rpc.input_type.full_name, rpc.output_type.full_name) == ("geo.Point", "google.protobuf.Empty")


def test_a_file_that_does_not_compile_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.proto").write_text("service {")
    with pytest.raises(UserError, match=r"broken\.proto: protoc can't compile it; its messages are in the log"):
        load_definition(tmp_path, "broken.proto")
    assert "broken.proto:1:9" in capfd.readouterr().err


def test_the_signature_has_each_rpc_as_a_route_for_calls_in_json(tmp_path: Path) -> None:
    (tmp_path / "stats.proto").write_text("""
        syntax = "proto3";
        package stats;
        import "google/protobuf/struct.proto";
        service Stats {
            rpc Mean (stream Number) returns (google.protobuf.Value);
            rpc Count (Number) returns (stream Number);
        }
        message Number { double value = 1; }
    """)

    class Handler:
        def Mean(self, payload: object) -> object:
            """Return the mean."""

        def Count(self, payload: object) -> object: ...

    definition = load_definition(tmp_path, "stats.proto")
    row = for_grpc(GENERATIONS["RealtimeAPI", "handler", "python", False], definition.rpcs)
    mean, count = bind_service(definition, Handler(), row, in_scope=False).signature.routes
    number = {"type": "object", "description": "stats.Number in JSON"}
    assert (mean.path, mean.method.summary, mean.method.streams) == ("/Mean", "Return the mean.", False)
    assert mean.method.payload == BodySignature({"type": "array", "items": number}, is_typed=True, is_required=False)
    assert mean.method.result == BodySignature({"description": "google.protobuf.Value in JSON"}, is_typed=True)
    assert count.method.payload == BodySignature(number, is_typed=True, is_required=False)
    assert count.method.result == BodySignature(number, "application/x-ndjson", is_typed=True)
    assert count.method.streams


@pytest.mark.long
def test_a_process_that_has_imported_tensorflow_does_not_crash(tmp_path: Path) -> None:
    (tmp_path / "beside.proto").write_text(NUMBERS.replace("PACKAGE", "beside"))
    code = """
        import sys, tensorflow
        from pathlib import Path
        from cortex.payloads.signature import BodySignature
from cortex.predictor.interface import GENERATIONS, for_grpc
from cortex.predictor.protobuf import bind_service, load_definition
        print(load_definition(Path(sys.argv[1]), "beside.proto").rpcs)
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "['Double', 'Sum', 'Count', 'Echo', 'Do']"), done.stderr
