"""Files made by hand, so that no library is imported; `test_golden_files.py` detects those that the libraries write."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import ModelFormatError
from cortex.models.formats.detection import detect


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Return a protobuf message."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def onnx(location: str = "") -> bytes:
    """Return an ONNX model, whose only tensor is in another file if `location` is its name."""
    tensor = message((2, 1), (13, message((1, "location"), (2, location)))) if location else message((2, 1))
    return message((1, 9), (2, "maker"), (3, "1.0"), (7, message((2, "g"), (5, tensor))), (8, message((2, 17))))


def saved_model(version: str = "2.21.0") -> bytes:
    return message((1, 1), (2, message((1, message((4, "serve"), (5, version))), (2, b""))))


def skops(path: Path, schema: Any = None, **files: bytes) -> None:
    described = {"__class__": "Pipeline", "__module__": "sklearn.pipeline", "_skops_version": "0.16.0"}
    state = {"content": {"_sklearn_version": {"__class__": "str", "content": '"1.9.1"'}}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("schema.json", json.dumps({**described, "content": state} if schema is None else schema))
        for name, content in files.items():
            archive.writestr(name, content)


def archive(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(name, b"x")


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.marker}'",)


XGBOOST_UBJ = (
    b"{L\0\0\0\0\0\0\0\x07learner{}L\0\0\0\0\0\0\0\x07version[#L\0\0\0\0\0\0\0\x03i\x03i\x02i\0}",
    b"{L\0\0\0\0\0\0\0\x07learner{}L\0\0\0\0\0\0\0\x07version[$i#L\0\0\0\0\0\0\0\x03\x03\x02\0}",
)
LIGHTGBM = b"tree\nversion=v4\nnum_class=1\n\nTree=0\n\nend of trees\n\npandas_categorical:null\n"


@pytest.mark.parametrize(
    ("content", "format_", "reason", "lines"),
    [
        (b"\x04\x22\x4d\x18anything", "pickle", "a file compressed with LZ4", ["joblib", "lz4"]),
        (b'{"learner":{},"version":[3,2,0]}', "xgboost", "JSON with the key", ["xgboost==3.2.0"]),
        (b'{ "version": [2, 1, 4],\n "learner": {} }\n', "xgboost", "saved by XGBoost 2.1.4", ["xgboost==2.1.4"]),
        (XGBOOST_UBJ[0], "xgboost", "UBJ with the key", ["xgboost==3.2.0"]),
        (XGBOOST_UBJ[1], "xgboost", "saved by XGBoost 3.2.0", ["xgboost==3.2.0"]),
        (LIGHTGBM, "lightgbm", "the lines `tree` and `version=v4`", ["lightgbm"]),
        (onnx(), "onnx", "opset 17, IR version 9, made by maker 1.0", ["onnxruntime>=1.12"]),
        (pickle.dumps({"a": 1}, 2), "pickle", "a pickle (protocol 2)", []),
        (pickle.dumps(Path("x"), 5), "pickle", "it names pathlib", []),
        (gzip.compress(pickle.dumps([1]), mtime=0), "pickle", "compressed with gzip", []),
        (zlib.compress(pickle.dumps([1]), 3), "pickle", "compressed with zlib", []),
        (bz2.compress(pickle.dumps([1])), "pickle", "compressed with bzip2", []),
        (lzma.compress(pickle.dumps([1])), "pickle", "compressed with xz", []),
        (lzma.compress(pickle.dumps([1]), lzma.FORMAT_ALONE), "pickle", "compressed with LZMA", []),
    ],
)
def test_a_file_is_detected_by_its_content(
    tmp_path: Path, content: bytes, format_: str, reason: str, lines: list[str]
) -> None:
    (tmp_path / "m.anything").write_bytes(content)
    for path in (tmp_path / "m.anything", tmp_path):
        found = detect(path)
        assert (found.format, found.path) == (format_, str(tmp_path / "m.anything"))
        assert found.reason.startswith("m.anything is a") and reason in found.reason
        assert [each.line for each in found.requirements] == lines
        assert found.needs_trust == (format_ == "pickle")


def test_a_skops_file_is_detected_with_the_version_of_scikit_learn(tmp_path: Path) -> None:
    skops(tmp_path / "model.pkl")
    found = detect(tmp_path)
    assert found.format == "skops" and not found.needs_trust
    assert "describes a sklearn.pipeline.Pipeline" in found.reason
    assert [each.line for each in found.requirements] == ["scikit-learn==1.9.1", "skops>=0.13"]


def test_a_saved_model_is_detected_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(saved_model())
    found = detect(tmp_path)
    assert (found.format, found.path) == ("tensorflow", str(tmp_path))
    assert [each.line for each in found.requirements] == ["tensorflow-cpu==2.21.0"]


def test_numbered_folders_are_versions(tmp_path: Path) -> None:
    for version in ("2", "10", "-1", "007"):
        (tmp_path / "iris" / version).mkdir(parents=True)
        (tmp_path / "iris" / version / "model.txt").write_bytes(LIGHTGBM)
    found = detect(tmp_path / "iris")
    assert found.versions == ("-1", "2", "7", "10")
    assert found.path == str(tmp_path / "iris" / "10" / "model.txt")
    assert found.reason.startswith("iris has 4 numbered versions; in the newest, model.txt is a LightGBM model")


def test_other_files_next_to_the_model_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Iris")
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / ".hidden").write_bytes(pickle.dumps(1))
    (tmp_path / "model.onnx").write_bytes(onnx())
    assert detect(tmp_path).path == str(tmp_path / "model.onnx")


def test_several_models_in_a_folder_are_an_error_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(onnx())
    (tmp_path / "b.txt").write_bytes(LIGHTGBM)
    with pytest.raises(ModelFormatError, match=r"has 2 models: a.onnx, b.txt; keep one"):
        detect(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty; accepted: ONNX, a SavedModel folder"),
        (b"<html><body>Not found</body></html>", "knows: it is text; accepted"),
        (b'{"a": 1}', "knows: it is text; accepted"),
        (b"\x00\x01\x02\xff", "knows: it is binary; accepted"),
        (b"cos\nsystem\n(S'true'\ntR.", "knows: it is text; accepted"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a pointer of Git LFS.*git lfs pull"),
        (b"binf\0\0", "old binary format.*save_model"),
        (b"CBM1\0", "a CatBoost model; save it as ONNX"),
        (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as of Keras"),
        (b"GGUF\3", "a GGUF file"),
        (b"\x1c\0\0\0TFL3", "a TensorFlow Lite model"),
        (struct.pack("<Q", 20) + b'{"w":{"dtype":"F32"}}', "a safetensors file: it has weights.*export the model"),
        (pickle.dumps(0x1950A86A20F9469CFC6C, 2), "a PyTorch checkpoint, which is a pickle; export"),
        (b'{"learner":{', "truncated XGBoost model"),
        (XGBOOST_UBJ[0][:-9], "truncated XGBoost model"),
        (LIGHTGBM[:30], "truncated LightGBM model"),
        (onnx()[:-3], "truncated or damaged ONNX file"),
        (b"PK\x03\x04" + b"\0" * 40, "truncated or damaged ZIP archive"),
    ],
)
def test_other_content_is_an_error_that_says_what_was_seen(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ModelFormatError, match=words) as caught:
        detect(tmp_path / "model.onnx")
    assert str(tmp_path / "model.onnx") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("archive/data.pkl", "archive/version"), "a PyTorch checkpoint, which is a pickle; export the model to ONNX"),
        (("m/data.pkl", "m/constants.pkl", "m/code/x.py"), "a TorchScript module; export the model to ONNX"),
        (("config.json", "model.weights.h5"), "a Keras archive; write a SavedModel"),
        (("m/MLmodel",), "an MLflow model in a ZIP archive; unpack it"),
        (("1/saved_model.pb",), "a SavedModel in a ZIP archive; unpack it"),
        (("a.npy",), "a ZIP archive without a model that cortex knows; accepted"),
        ((), "a ZIP archive without a model"),
    ],
)
def test_other_archives_are_errors(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    archive(tmp_path / "m.zip", *names)
    with pytest.raises(ModelFormatError, match=words):
        detect(tmp_path)


@pytest.mark.parametrize(("schema", "words"), [([1], "skops did not write"), ({"a": 1}, "skops did not write")])
def test_a_schema_of_another_program_is_an_error(tmp_path: Path, schema: Any, words: str) -> None:
    skops(tmp_path / "m.skops", schema)
    with pytest.raises(ModelFormatError, match=words):
        detect(tmp_path / "m.skops")


def test_a_zip_bomb_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.skops", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("schema.json", json.dumps({"__class__": "A", "__module__": "b", "_skops_version": "1"}))
        made.writestr("0.npy", bytes(1024))
        made.infolist()[1].file_size = 2 * 1024**3  # as a file of zeros that was compressed
    with pytest.raises(ModelFormatError, match=r"is a ZIP bomb: .* bytes that grow to 2 GiB"):
        detect(tmp_path)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(onnx())
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(onnx())
    (folder / "inner").symlink_to(folder / "model.onnx")
    (folder / "deep" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelFormatError, match="deep/link in .* is a link to a place outside of the folder"):
        detect(folder)


def test_a_version_that_is_a_link_to_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.onnx").write_bytes(onnx())
    (tmp_path / "iris").mkdir()
    (tmp_path / "iris" / "2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelFormatError, match="2 in .*iris is a link to a place outside of the folder"):
        detect(tmp_path / "iris")


def key(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def with_attribute_twice() -> bytes:
    """Return a model whose only node has a tensor in two parts, which parsers merge; the first refers to a file."""
    outside = message((13, message((1, "location"), (2, "/etc/passwd"))))
    node = message((4, "Constant"), (5, message((1, "value"), (5, outside), (5, message((2, 1))))))
    return message((1, 9), (7, message((1, node))), (8, message((2, 17))))


@pytest.mark.parametrize(
    "content",
    [
        onnx("/etc/passwd") + onnx(),
        onnx() + onnx("/etc/passwd"),
        with_attribute_twice(),
        message((1, 9), (7, b""), (20, message((2, message((5, message((13, message((1, "location"), (2, "/x")))))))))),
        message(
            (1, 9),
            (7, b""),
            (25, message((7, message((5, message((5, message((13, message((1, "location"), (2, "/x"))))))))))),
        ),
        onnx("*/_ORT_MEM_ADDR_/*"),
    ],
)
def test_all_parts_of_an_onnx_file_are_checked(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelFormatError, match="refers to data outside of its folder"):
        detect(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "content",
    [
        onnx() + key(30, 3) + key(30, 4),  # a group
        onnx() + key(30, 6) + b"\0",
        onnx() + varint(7 << 3 | 2 | 1 << 32) + varint(2) + b"\0\0",  # a parser with 32 bits reads field 7
        onnx("weights.bin\0/../../x"),
        onnx()[:-1],
    ],
)
def test_an_onnx_file_that_parsers_could_read_differently_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelFormatError, match="truncated or damaged ONNX file"):
        detect(tmp_path / "m.onnx")


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link", "a/../../secret"])
def test_an_onnx_file_may_not_refer_to_data_outside_of_its_folder(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(b"0")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link").symlink_to(tmp_path / "secret")
    file = tmp_path / "model" / "m.onnx"
    file.write_bytes(onnx(location))
    with pytest.raises(ModelFormatError, match="refers to data outside of its folder"):
        detect(file)


def test_external_data_of_an_onnx_file_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(onnx("weights.bin"))
    with pytest.raises(ModelFormatError, match=r"refers to data in weights.bin, which is not there"):
        detect(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"\x80\x04N.")  # weights may look like anything
    assert detect(tmp_path).path == str(tmp_path / "m.onnx")


def test_paths_that_are_no_models_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="there is no model at"):
        detect(tmp_path / "absent")
    with pytest.raises(ModelFormatError, match="has no model; it has no files"):
        detect(tmp_path)
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    with pytest.raises(ModelFormatError, match="has no model; it has a, b; accepted"):
        detect(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ModelFormatError, match="neither a file nor a folder"):
        detect(tmp_path / "fifo")
    (tmp_path / "saved_model.pb").write_bytes(b"\xff\xff")
    with pytest.raises(ModelFormatError, match=r"saved_model.pb is truncated or damaged"):
        detect(tmp_path)
    with pytest.raises(ModelFormatError, match=r"saved_model.pb is a part of a SavedModel; give its folder"):
        detect(tmp_path / "saved_model.pb")


def test_a_hostile_pickle_is_described_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for protocol in (2, 3, 4, 5):
        (tmp_path / "m.skops").write_bytes(pickle.dumps(Hostile(marker), protocol))
        found = detect(tmp_path / "m.skops")
        assert found.needs_trust and "posix.system" in found.reason
    assert not marker.exists()


MLMODEL = "flavors:\n  python_function:\n    loader_module: {}\n    model_path: model.bin\n{}"


def mlflow(folder: Path, module: str, more: str = "", data: bytes = LIGHTGBM) -> None:
    (folder / "MLmodel").write_text(MLMODEL.format(module, more))
    (folder / "model.bin").write_bytes(data)


def test_values_of_an_mlflow_file_that_grow_to_gigabytes_are_refused(tmp_path: Path) -> None:
    mlflow(tmp_path, "mlflow.lightgbm")
    grown = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    text = (tmp_path / "MLmodel").read_text().replace("mlflow.lightgbm", "*a8")
    (tmp_path / "MLmodel").write_text(f"a0: &a0 text\n{grown}{text}")
    with pytest.raises(ModelFormatError, match="has more than 10 YAML aliases; save the model again with mlflow"):
        detect(tmp_path)


def test_an_mlflow_folder_has_the_requirements_of_its_file(tmp_path: Path) -> None:
    mlflow(tmp_path, "mlflow.lightgbm")
    (tmp_path / "requirements.txt").write_text("mlflow==3.17.2\nlightgbm>=4,<5\n# a comment\n-r other\n")
    found = detect(tmp_path)
    assert (found.format, found.code) == ("mlflow", "")
    assert [(each.line, each.accepts) for each in found.requirements] == [
        ("mlflow==3.17.2", "==3.17.*"),
        ("lightgbm>=4,<5", "<5,>=4"),
    ]


@pytest.mark.parametrize(
    ("module", "more", "data", "code"),
    [
        ("mlflow.pyfunc.model", "", b"", "mlflow imports mlflow.pyfunc.model to load it, which may run code"),
        ("my_loader", "", LIGHTGBM, "mlflow imports my_loader to load it"),
        ("mlflow.lightgbm", "    code: code\n", LIGHTGBM, "adds its folder of code to the import path"),
        (
            "mlflow.lightgbm",
            "  lightgbm: {model_class: os.Popen}\n",
            LIGHTGBM,
            "mlflow loads it with model_class: os.Popen",
        ),
        ("mlflow.lightgbm", "", pickle.dumps(1), "loading a pickle runs any code"),
        ("mlflow.sklearn", "", pickle.dumps(1), "mlflow loads it with serialization_format: None"),
        ("mlflow.sklearn", "  sklearn: {serialization_format: skops}\n", pickle.dumps(1), "loading a pickle runs any"),
        ("mlflow.onnx", "  onnx: {onnx_session_options: {a: 1}}\n", b"", "with onnx_session_options: {'a': 1}"),
        ("mlflow.xgboost", "  xgboost: {data: other.bin}\n", b"", "its data is not one file next to MLmodel"),
        ("mlflow.xgboost", "  xgboost: {data: ../model.bin}\n", b"", "its data is not one file next to MLmodel"),
        ("mlflow.xgboost", "", LIGHTGBM, "its data is a LightGBM model"),
        ("mlflow.xgboost", "", b"?", "its data is in an unknown format"),
    ],
)
def test_an_mlflow_folder_that_may_run_code_needs_trust(
    tmp_path: Path, module: str, more: str, data: bytes, code: str
) -> None:
    mlflow(tmp_path, module, more, data)
    assert code in detect(tmp_path).code


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "no flavor python_function"),
        ("flavors: {sklearn: {}}", "no flavor python_function"),
        ("flavors: {python_function: {}}", "names no loader_module"),
        ("flavors: {python_function: {loader_module: mlflow.onnx, data: x}}", "refers to x, which is not there"),
        ("[" * 200_000, "has more than 50 nested values"),
        ("- " * 100_000, "has more than 50 nested values"),
        ("x: " + "y" * 2**20, "is too large"),
    ],
)
def test_a_damaged_mlmodel_file_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "MLmodel").write_text(text)
    with pytest.raises(ModelFormatError, match=words):
        detect(tmp_path)


def samples() -> list[bytes]:
    """Return a small file of each format."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("schema.json", '{"__class__": "A", "__module__": "b", "content": {}, "_skops_version": "1"}')
    wrapped = {"a": [1.5, "x" * 300, (None, True)], "_sklearn_version": "1.0", "big": 2**90, "data": bytes(300)}
    return [
        buffer.getvalue(),
        onnx("weights.bin"),
        saved_model(),
        LIGHTGBM,
        *XGBOOST_UBJ,
        *(pickle.dumps(wrapped, protocol) for protocol in (2, 3, 4, 5)),
        zlib.compress(pickle.dumps(wrapped)),
        gzip.compress(pickle.dumps(wrapped)),
        lzma.compress(pickle.dumps(wrapped)),
    ]


@given(st.data())
def test_any_content_is_detected_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(samples()) | st.binary(max_size=40)))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    file = tmp_path_factory.getbasetemp() / "fuzzed.bin"
    file.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]))
    try:
        found = detect(file)
    except ModelFormatError as exc:
        assert "\n" not in str(exc)
    else:
        assert "\n" not in found.reason


@pytest.mark.heavy
def test_a_pickle_that_claims_to_be_huge_is_read_in_bounded_memory(tmp_path: Path) -> None:
    claims = [
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x",  # BINBYTES8
        b"\x80\x04\x95" + struct.pack("<Q", 2**63),  # FRAME
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1),  # LONG4
        b"\x80\x04" + b"(" * 300_000,
        b"\x80\x04N" + b"\x85" * 100_000 + b".",
    ]
    tracemalloc.start()
    for content in claims:
        (tmp_path / "m").write_bytes(content)
        assert detect(tmp_path / "m").format == "pickle"
    assert tracemalloc.get_traced_memory()[1] < 100 * 1024**2
    tracemalloc.stop()


def test_an_archive_with_a_huge_list_of_files_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m", "w") as made:
        made.writestr("schema.json", "{}")
    content = bytearray((tmp_path / "m").read_bytes())
    end = content.rfind(b"PK\x05\x06")
    content[end + 12 : end + 16] = struct.pack("<I", 2**31)
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(ModelFormatError, match="whose list of files has 2 GiB: no model has so many"):
        detect(tmp_path / "m")
