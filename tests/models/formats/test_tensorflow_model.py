"""SavedModels made by hand, and the one of the fixtures; no TensorFlow is imported."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cortex.errors import ModelFormatError
from cortex.models.formats.detection import check_signature, detect
from cortex.models.formats.protobuf import MessageError
from cortex.models.formats.tensorflow_model import SavedModel, read_saved_model
from models.formats.test_detection import message

FIXTURE = Path(__file__).parents[2] / "fixtures" / "saved_model_add"
CALL = "StatefulPartitionedCall"


def node(name: str, op: str, *inputs: str, calls: str = "", default: str = "") -> bytes:
    more: list[tuple[int, int | str | bytes]] = []
    if calls:
        more.append((5, message((1, "f"), (2, message((10, message((1, calls))))))))
    if default:
        more.append((5, message((1, "value"), (2, message((8, message((1, 7), (8, default))))))))
    return message((1, name), (2, op), *((3, each) for each in inputs), *more)


def function(name: str, *nodes: bytes, attribute: str = "") -> bytes:
    more: list[tuple[int, int | str | bytes]] = [(5, message((1, attribute), (2, b"")))] if attribute else []
    return message((1, message((1, name), (2, message((1, "file_prefix"))))), *((3, each) for each in nodes), *more)


def graph(*nodes: bytes) -> bytes:
    return message(*((1, each) for each in nodes))


def library(*functions: bytes) -> bytes:
    return message((2, message(*((1, each) for each in functions))))


def signature(name: str, inputs: str = "", outputs: str = "") -> bytes:
    sides: list[tuple[int, int | str | bytes]] = [
        (number, message((1, "k"), (2, message((1, f"{tensor}:0"), (2, 1)))))
        for number, tensor in ((1, inputs), (2, outputs))
        if tensor
    ]
    return message((1, name), (2, message(*sides)))


SAVER = message((1, "saver_filename:0"), (2, "save:0"), (3, "restore"))
RESTORE = function("__restore", node("r", "RestoreV2", "file_prefix", "names:output:0"), node("names", "Const"))
SAVE = function(
    "__save",
    node("part", "StringJoin", "file_prefix", "suffix:output:0"),
    node("w", "SaveV2", "part:output:0"),
    node("m", "MergeV2Checkpoints", "part:output:0", "file_prefix"),
)
SAVER_NODES = (
    node("saver_filename", "Placeholder"),
    node("save", CALL, "saver_filename", calls="__save"),
    node("restore", CALL, "saver_filename", calls="__restore"),
)


def read(*fields: tuple[int, int | str | bytes]) -> SavedModel:
    """Read a SavedModel whose only graph has these fields, and the tag of serving."""
    data = message((1, 1), (2, message((1, message((4, "serve"), (5, "2.21.0"))), *fields)))
    found = read_saved_model(io.BytesIO(data), len(data))
    assert found is not None
    return found


def test_a_model_that_computes_and_has_a_saver_needs_no_trust() -> None:
    exported = (
        (2, graph(*SAVER_NODES, node("y", "__call"), node("x", "Placeholder")) + library(RESTORE, SAVE)),
        (2, library(function("__call", node("a", "MatMul", "file_prefix")))),
        (3, SAVER),
        (5, signature("serving_default", "x", "y")),
    )
    assert read(*exported) == SavedModel("2.21.0", ("serving_default",), "")
    of_version_1 = graph(
        node("save/filename/input", "Const", default="model"),
        node("save/filename", "PlaceholderWithDefault", "save/filename/input"),
        node("save/Const", "PlaceholderWithDefault", "save/filename"),
        node("save/SaveV2", "SaveV2", "save/ShardedFilename"),
        node("save/RestoreV2", "RestoreV2", "save/Const"),
    )
    assert read((2, of_version_1), (3, message((1, "save/Const:0"), (3, "save/RestoreV2")))).code == ""
    assert detect(FIXTURE).code == ""


OTHER = "operations that may reach files, the network or other code: "


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([(2, graph(node("a", "ReadFile")))], OTHER + "ReadFile"),
        ([(2, graph(node("a", "UnknownOp", calls="f")))], OTHER + "UnknownOp"),
        ([(2, library(function("f", node("a", "WriteFile"))))], OTHER + "WriteFile"),
        ([(2, graph()), (2, graph(node("a", "PyFunc")))], OTHER + "PyFunc"),  # parsers merge both
        ([(2, graph(node("a", "PrintV2"))), (2, b"")], OTHER + "PrintV2"),
        ([(2, graph(node("a", "ReadFile")) + library(function("ReadFile")))], OTHER + "ReadFile"),
        ([(2, graph(node("a", "absent_function")))], OTHER + "absent_function"),
        ([(2, graph(node("t", "InitializeTableFromTextFileV2")))], OTHER + "InitializeTableFromTextFileV2"),
    ],
)
def test_other_operations_need_trust_wherever_they_are(fields: list[tuple[int, bytes]], words: str) -> None:
    assert read(*fields).code == f"its graph has {words}"


PATH = node("path", "Const", default="/etc/model")


@pytest.mark.parametrize(
    "fields",
    [
        [(2, graph(PATH, node("r", "RestoreV2", "path")))],
        [
            (2, graph(PATH, *SAVER_NODES, node("r", CALL, "path", calls="__restore")) + library(RESTORE, SAVE)),
            (3, SAVER),
        ],
        [(2, graph(*SAVER_NODES, node("r", "RestoreV2", "file_prefix")) + library(RESTORE, SAVE)), (3, SAVER)],
        [
            (2, graph(*SAVER_NODES) + library(SAVE, function("__restore", node("r", "RestoreV2", "c:output:0")))),
            (3, SAVER),
        ],
        [
            (2, graph(*SAVER_NODES) + library(RESTORE, SAVE, function("g", node("a", CALL, "c", calls="__restore")))),
            (3, SAVER),
        ],
        [
            (2, graph(*SAVER_NODES) + library(RESTORE, SAVE)),
            (3, SAVER),
            (5, signature("s", "saver_filename", "restore")),
        ],
        [
            (2, graph(*SAVER_NODES) + library(RESTORE, SAVE)),
            (3, SAVER),
            (6, message((1, message((1, "saver_filename:0"))), (2, "../../other"))),
        ],
        [
            (2, graph(PATH, node("d", "PlaceholderWithDefault", "path"), node("r", "RestoreV2", "d"))),
            (3, message((1, "d:0"))),
        ],
        [
            (
                2,
                graph(*SAVER_NODES)
                + library(
                    SAVE, function("__restore", node("r", "RestoreV2", "file_prefix"), attribute="api_implements")
                ),
            ),
            (3, SAVER),
        ],
    ],
)
def test_the_saver_may_read_its_own_checkpoint_only(fields: list[tuple[int, bytes]]) -> None:
    assert read(*fields).code == "its graph reads files that are not its own checkpoint"


@pytest.mark.parametrize(
    "fields",
    [
        [(3, message((1, "saver_filename:0"), (3, "save")))],
        [(3, SAVER), (5, signature("s", outputs="save"))],
        [(3, SAVER), (4, message((1, "saved_model_main_op"), (2, message((1, message((1, "save")))))))],
        [(2, graph(node("y", "Identity", "x", "^save"))), (3, SAVER), (5, signature("s", outputs="y"))],
    ],
)
def test_the_saver_may_not_write_when_a_model_is_loaded_or_called(fields: list[tuple[int, bytes]]) -> None:
    found = read((2, graph(*SAVER_NODES) + library(RESTORE, SAVE)), *fields)
    assert found.code == "its graph writes files when it is loaded or called"


@pytest.mark.parametrize(
    "field",
    [
        (2, graph(message((1, "a"), (2, "ReadFile"), (2, "Identity")))),
        (2, graph(node("a", "Identity"), node("a", "Identity"))),
        (2, library(function("f"), function("f"))),
        (3, SAVER + SAVER[:0] + message((3, "save"))),
        (2, b"\x0b\x0c"),  # a group
    ],
)
def test_a_file_that_parsers_could_read_differently_is_damaged(field: tuple[int, bytes]) -> None:
    with pytest.raises(MessageError):
        read(field)


def test_a_model_in_several_files_needs_trust(tmp_path: Path) -> None:
    data = (FIXTURE / "saved_model.pb").read_bytes()
    (tmp_path / "saved_model.pb").write_bytes(data)
    (tmp_path / "saved_model.cpb").write_bytes(b"")
    assert detect(tmp_path).code == "it has the file saved_model.cpb, which cortex can't check"


def test_an_ambiguous_choice_of_signatures_names_the_type_that_has_one(tmp_path: Path) -> None:
    signatures = ((5, signature("a")), (5, signature("b")))
    data = message((1, 1), (2, message((1, message((4, "serve"))), (2, b""), *signatures)))
    (tmp_path / "saved_model.pb").write_bytes(data)
    with pytest.raises(ModelFormatError, match="has several signatures: 'a', 'b'.*signature_key.*`type: tensorflow`"):
        check_signature(detect(tmp_path))


def test_a_signature_with_types_that_no_request_can_have_is_refused(tmp_path: Path) -> None:
    def tensor(name: str, number: int) -> bytes:
        return message((1, name), (2, message((1, f"{name}:0"), (2, number))))

    def write(inputs: list[bytes], outputs: list[bytes]) -> None:
        sides = message(*((1, each) for each in inputs), *((2, each) for each in outputs))
        chosen = message((1, "serving_default"), (2, sides))
        data = message((1, 1), (2, message((1, message((4, "serve"))), (2, b""), (5, chosen))))
        (tmp_path / "saved_model.pb").write_bytes(data)

    write([tensor("x", 1)], [tensor("c", 8), tensor("y", 14)])
    check_signature(detect(tmp_path))
    for inputs, outputs, words in (
        ([tensor("x", 1), tensor("c", 8)], [tensor("y", 1)], "has the input 'c' of the type DT_COMPLEX64, which APIs"),
        ([tensor("x", 1)], [tensor("v", 21)], "has the output 'v' of the type DT_21,"),
    ):
        write(inputs, outputs)
        with pytest.raises(ModelFormatError, match=words):
            check_signature(detect(tmp_path))
