"""MLflow folders that mlflow writes, loaded by cortex and by mlflow itself."""

from __future__ import annotations

import json
import os
import pickle
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortex.cli.model_request import model_request
from cortex.errors import ModelFormatError, ModelInputError
from cortex.models.formats.detection import check_signature, detect
from cortex.models.loader import LoadRequest
from cortex.payloads.inference_protocol import model_document
from cortex.payloads.request_forms import read_request
from cortex.payloads.signature import TensorSignature
from cortex.predictor.estimators.loader import DetectedLoader, RunnableModel

pytestmark = pytest.mark.heavy  # mlflow takes seconds to import

ROWS = np.random.default_rng(0).normal(size=(60, 2))
TARGET = (ROWS[:, 0] > 0).astype(int)


def frame() -> Any:
    import pandas as pd

    return pd.DataFrame(ROWS, columns=["a", "b"])


def load(folder: Path, *, trusts_pickle: bool = False, model: str = "m", version: str = "1") -> RunnableModel:
    return DetectedLoader(trusts_pickle).load(LoadRequest(model, version, str(folder), "", 0, None))


def save(flavor: str, model: Any, folder: Path, inputs: Any, outputs: Any, **options: Any) -> None:
    import importlib

    from mlflow.models import infer_signature

    signature = infer_signature(inputs, outputs) if inputs is not None else None
    made = importlib.import_module(f"mlflow.{flavor}")
    made.save_model(model, folder, signature=signature, pip_requirements=["mlflow", "numpy"], **options)


def by_mlflow(folder: Path, inputs: Any) -> Any:
    import mlflow.pyfunc

    return mlflow.pyfunc.load_model(str(folder)).predict(inputs)


def columns() -> dict[str, Any]:
    return {"a": ROWS[:, :1], "b": ROWS[:, 1:]}


@pytest.mark.long
def test_a_scikit_learn_model_in_skops_needs_no_trust(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    trained = LogisticRegression().fit(frame(), TARGET)
    folder = tmp_path / "model"
    save("sklearn", trained, folder, frame(), trained.predict(frame()), serialization_format="skops")
    model = load(folder)
    assert model.signature.inputs == (TensorSignature("a", "FP64", (-1, 1)), TensorSignature("b", "FP64", (-1, 1)))
    assert model.signature.outputs == (TensorSignature("prediction", "INT64", (-1,)),)
    assert np.array_equal(model.infer(columns())["prediction"], by_mlflow(folder, frame()))
    request = read_request({"dataframe_records": [{"b": 1, "a": 2}]}, model.signature)
    assert request.answer(model.infer(request.inputs)) == {"predictions": trained.predict([[2.0, 1.0]]).tolist()}
    assert [each.line for each in detect(folder).requirements] == ["mlflow", "numpy"]


def test_a_pickled_model_needs_trust(tmp_path: Path) -> None:
    from sklearn.linear_model import LinearRegression

    trained = LinearRegression().fit(ROWS, ROWS)
    folder = tmp_path / "model"
    save("sklearn", trained, folder, ROWS, ROWS, serialization_format="cloudpickle")
    with pytest.raises(ModelFormatError, match="serialization_format: cloudpickle; write `trust: pickle`"):
        load(folder)
    model = load(folder, trusts_pickle=True)
    assert model.signature.inputs == (TensorSignature("input", "FP64", (-1, 2)),)
    assert np.array_equal(model.infer({"input": ROWS})["prediction"], trained.predict(ROWS))


def test_an_xgboost_and_a_lightgbm_model_need_no_trust(tmp_path: Path) -> None:
    import lightgbm
    import xgboost

    trained = xgboost.XGBClassifier(n_estimators=3, n_jobs=1).fit(frame(), TARGET)
    save("xgboost", trained, tmp_path / "x", frame(), trained.predict(frame()))
    assert np.array_equal(load(tmp_path / "x").infer(columns())["prediction"], by_mlflow(tmp_path / "x", frame()))
    booster = lightgbm.train({"verbose": -1, "num_threads": 1}, lightgbm.Dataset(frame(), TARGET), 3)
    save("lightgbm", booster, tmp_path / "l", frame(), booster.predict(frame()))
    assert np.array_equal(load(tmp_path / "l").infer(columns())["prediction"], by_mlflow(tmp_path / "l", frame()))


def test_a_folder_with_code_needs_trust_and_has_columns_of_all_types(tmp_path: Path) -> None:
    import mlflow.pyfunc
    import pandas as pd
    from mlflow.models import infer_signature

    class Model(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            return pd.DataFrame(
                {"text": model_input["s"] + "!", "year": model_input["d"].dt.year, "n": model_input["n"]}
            )

    inputs = pd.DataFrame(
        {"s": ["x"], "d": pd.to_datetime(["2020-02-03"]), "n": np.array([1], np.int64), "f": np.array([1], np.float32)}
    )
    signature = infer_signature(inputs, None)
    mlflow.pyfunc.save_model(
        str(tmp_path / "m"), python_model=Model(), signature=signature, pip_requirements=["mlflow"]
    )
    with pytest.raises(ModelFormatError, match="mlflow imports mlflow.pyfunc.model to load it, which may run code"):
        load(tmp_path / "m")
    model = load(tmp_path / "m", trusts_pickle=True)
    assert [(each.name, each.datatype) for each in model.signature.inputs] == [
        ("s", "BYTES"),
        ("d", "BYTES"),
        ("n", "INT64"),
        ("f", "FP32"),
    ]
    record = {"s": "a", "d": "2021-01-01", "n": 7, "f": 1.5}
    request = read_request({"dataframe_records": [record]}, model.signature)
    assert request.answer(model.infer(request.inputs)) == {"predictions": [{"text": "a!", "year": 2021, "n": 7}]}
    request = read_request({"dataframe_records": [{**record, "d": "?"}]}, model.signature)
    with pytest.raises(ValueError, match=r"row 1, column 'd' is '\?'; it must be a date of ISO 8601"):
        model.infer(request.inputs)
    described = model_document("m", model.signature, ())
    command = model_request(described, "http://localhost")
    sample = json.loads(shlex.split(command)[-1])
    assert sample["instances"][0]["d"] == "2000-01-01T00:00:00"
    request = read_request(sample, model.signature)
    assert request.answer(model.infer(request.inputs)) == {"predictions": [{"text": "text!", "year": 2000, "n": 0}]}


def dated(folder: Path) -> RunnableModel:
    """Save and load a model that answers with the dates that it gets."""
    import mlflow.pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    class Model(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            return model_input["d"].dt.strftime("%Y-%m-%dT%H:%M:%S.%f")

    signature = ModelSignature(Schema([ColSpec("datetime", "d")]), Schema([ColSpec("string")]))
    mlflow.pyfunc.save_model(str(folder), python_model=Model(), signature=signature, pip_requirements=["mlflow"])
    return load(folder, trusts_pickle=True)


def test_a_date_means_the_same_alone_and_with_others_in_every_form(dates: RunnableModel) -> None:
    moments = {
        "2021-02-01": "2021-02-01T00:00:00.000000",
        "2021-01-05T10:00": "2021-01-05T10:00:00.000000",
        "2021-01-05 10:00:00.25": "2021-01-05T10:00:00.250000",
        "2021-01-05T10:00:00Z": "2021-01-05T10:00:00.000000",
        "2021-01-05T10:00:00+02:00": "2021-01-05T08:00:00.000000",
        "20210105": "2021-01-05T00:00:00.000000",
    }
    bodies: list[tuple[Any, str]] = [
        ({"dataframe_records": [{"d": each} for each in moments]}, ""),
        ({"dataframe_split": {"columns": ["d"], "data": [[each] for each in moments]}}, ""),
        ({"inputs": {"d": list(moments)}}, ""),
        ({"instances": [[each] for each in moments]}, ""),
        ("d\n" + "\n".join(moments), "text/csv"),
        *(([{"d": each}], "") for each in moments),
    ]
    for body, content_type in bodies:
        request = read_request(body, dates.signature, content_type)
        answered = dates.infer(request.inputs)["prediction"].tolist()
        given = [each.decode() if isinstance(each, bytes) else each for each in request.inputs["d"].reshape(-1)]
        assert answered == [moments[each] for each in given]


@pytest.fixture(scope="module")
def dates(tmp_path_factory: pytest.TempPathFactory) -> RunnableModel:
    return dated(tmp_path_factory.mktemp("dates") / "m")


@pytest.mark.parametrize(
    "text",
    [
        "13/02/2021",
        "01/02/2021",
        "now",
        "",
        "2021",
        "NaT",
        "2021-13-01",
        "2021-01-05T25:00",
        "٢٠٢١-٠١-٠١",
        "9999-01-01",
        " 2021-01-01",
    ],
)
def test_another_form_of_a_date_is_an_error_with_its_place(dates: RunnableModel, text: str) -> None:
    request = read_request({"inputs": {"d": ["2021-01-01", text]}}, dates.signature)
    with pytest.raises(ValueError, match=rf"^row 2, column 'd' is '{text}'; (it must be a date of ISO|dates are of)"):
        dates.infer(request.inputs)


def test_an_optional_column_may_be_left_out(tmp_path: Path) -> None:
    import mlflow.pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    class Model(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            return model_input["a"] + model_input.get("b", 100)

    columns = Schema([ColSpec("double", "a"), ColSpec("double", "b", required=False)])
    signature = ModelSignature(columns, Schema([ColSpec("double")]))
    mlflow.pyfunc.save_model(
        str(tmp_path / "m"), python_model=Model(), signature=signature, pip_requirements=["mlflow"]
    )
    model = load(tmp_path / "m", trusts_pickle=True)
    assert [each.optional for each in model.signature.inputs] == [False, True]
    for record, answer in ({"a": 1.0}, 101.0), ({"a": 1.0, "b": 2.0}, 3.0):
        request = read_request([record], model.signature)
        assert request.answer(model.infer(request.inputs)) == [answer]


@pytest.fixture(scope="module")
def optionals(tmp_path_factory: pytest.TempPathFactory) -> RunnableModel:
    """Return a model whose optional columns have all types, and which answers how it received them."""
    import mlflow.pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    class Model(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            return model_input.apply(lambda row: " ".join(f"{name}={row[name]}" for name in row.index), axis=1)

    kinds = ("string", "datetime", "binary", "long", "boolean", "double")
    columns = Schema([ColSpec("double", "x"), *(ColSpec(kind, kind, required=False) for kind in kinds)])
    folder = tmp_path_factory.mktemp("optionals") / "m"
    signature = ModelSignature(columns, Schema([ColSpec("string")]))
    mlflow.pyfunc.save_model(str(folder), python_model=Model(), signature=signature, pip_requirements=["mlflow"])
    return load(folder, trusts_pickle=True)


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("string", "a", "None"),
        ("datetime", "2021-01-05", "NaT"),
        ("binary", {"b64": "eA=="}, "None"),
        ("double", 1.5, "nan"),
    ],
)
def test_null_is_a_missing_value_in_an_optional_column(
    optionals: RunnableModel, kind: str, value: Any, shown: str
) -> None:
    import pandas as pd

    if kind == "string":
        shown = str(pd.Series(["a", None])[1])  # None or NaN, by the version of pandas
    for values in ([None], [value, None]):
        rows = [{"x": 1.0, kind: each} for each in values]
        for body in (rows, {"inputs": {"x": [1.0] * len(rows), kind: values}}):
            request = read_request(body, optionals.signature)
            answer = request.answer(optionals.infer(request.inputs))
            assert f"x=1.0 {kind}={shown}" in str(answer)
    if kind != "binary":
        request = read_request(f"x,{kind}\n1,\n", optionals.signature, "text/csv")
        assert f"{kind}={shown}" in str(request.answer(optionals.infer(request.inputs)))


@pytest.mark.parametrize(("kind", "datatype"), [("long", "INT64"), ("boolean", "BOOL")])
def test_null_is_an_error_in_a_column_that_can_not_hold_it(optionals: RunnableModel, kind: str, datatype: str) -> None:
    with pytest.raises(
        ModelInputError, match=rf"^row 1, column '{kind}' is null, which columns of the type {datatype}"
    ):
        read_request([{"x": 1.0, kind: None}], optionals.signature)


def test_a_model_without_a_signature_is_an_error(tmp_path: Path) -> None:
    from sklearn.linear_model import LinearRegression

    save("sklearn", LinearRegression().fit(ROWS, ROWS), tmp_path / "m", None, None, serialization_format="skops")
    for refuse in (lambda: load(tmp_path / "m"), lambda: check_signature(detect(tmp_path / "m"))):
        with pytest.raises(ModelFormatError, match="m has no signature; save it with `signature=infer_signature"):
            refuse()
    file = tmp_path / "m" / "MLmodel"
    file.write_text(f"""{file.read_text()}\nsignature: {{inputs: '[{{"type": "array", "name": "a"}}]'}}\n""")
    with pytest.raises(ModelFormatError, match="m has a column of type array in its signature; write a class"):
        check_signature(detect(tmp_path / "m"))


def test_types_that_a_folder_itself_trusts_are_not_loaded(tmp_path: Path) -> None:
    import skops.io
    from sklearn.linear_model import LinearRegression
    from sklearn.preprocessing import FunctionTransformer

    save("sklearn", LinearRegression().fit(ROWS, ROWS), tmp_path / "m", ROWS, ROWS, serialization_format="skops")
    skops.io.dump(FunctionTransformer(os.system), tmp_path / "m" / "model.skops")
    file = tmp_path / "m" / "MLmodel"
    file.write_text(file.read_text().replace("skops_trusted_types: null", "skops_trusted_types: [posix.system]"))
    assert "[posix.system]" in file.read_text()
    with pytest.raises(ModelFormatError, match=r"types that are not scikit-learn's own: posix.system"):
        load(tmp_path / "m")


def test_no_hostile_folder_runs_anything(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, (f"touch '{tmp_path / 'marker'}'",)

    pyfunc = "flavors:\n  python_function: {{loader_module: {}, model_path: model.bin, code: {}}}\n{}"
    for module, code, more in (
        ("mlflow.sklearn", "null", "  sklearn: {pickled_model: model.bin, serialization_format: skops}"),
        ("mlflow.sklearn", "null", "  sklearn: {pickled_model: model.bin, serialization_format: pickle}"),
        ("hostile", ".", ""),
    ):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "MLmodel").write_text(pyfunc.format(module, code, more))
        (folder / "model.bin").write_bytes(pickle.dumps(Hostile()))
        (folder / "hostile.py").write_text(f"import os; os.system(\"touch '{tmp_path / 'marker'}'\")")
        with pytest.raises(ModelFormatError, match="write `trust: pickle` if you trust it"):
            load(folder)
    assert not (tmp_path / "marker").exists()


def save_with_code(folder: Path, module: str, factor: int, *, fails: bool = False) -> None:
    """Save a model whose code imports a module of its own, in the middle of a request."""
    import mlflow.pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    source = folder.with_suffix(".source")
    source.mkdir()
    (source / f"{module}.py").write_text(f"FACTOR = {factor}\n")
    code = f"""
import mlflow.pyfunc, mlflow.models
class Model(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input, params=None):
        import {module}
        return model_input["x"] * {module}.FACTOR
mlflow.models.set_model(Model())
"""
    (source / "model.py").write_text(code)
    mlflow.pyfunc.save_model(
        str(folder),
        python_model=str(source / "model.py"),
        code_paths=[str(source / f"{module}.py")],
        signature=ModelSignature(Schema([ColSpec("double", "x")]), Schema([ColSpec("double")])),
        pip_requirements=["mlflow"],
    )
    if fails:
        (folder / "model.py").write_text(f"import {module}\nraise RuntimeError('fails')\n")


def answer(model: RunnableModel) -> list[float]:
    return list(model.infer({"x": np.ones((1, 1))})["prediction"].tolist())


def test_models_with_different_modules_of_one_name_are_not_loaded_into_one_process(tmp_path: Path) -> None:
    save_with_code(tmp_path / "alpha", "prep_features", 10)
    save_with_code(tmp_path / "beta", "prep_features", 1000)
    save_with_code(tmp_path / "same", "prep_features", 10)
    save_with_code(tmp_path / "other", "prep_others", 1000)
    alpha = load(tmp_path / "alpha", trusts_pickle=True, model="alpha")
    with pytest.raises(ModelFormatError) as caught:
        load(tmp_path / "beta", trusts_pickle=True, model="beta")
    assert str(caught.value) == (
        "model 'beta' of version 1 and model 'alpha' of version 1 have different modules named prep_features, and a "
        "Python process can have only one; rename it in one of them, or deploy them as two APIs"
    )
    with pytest.raises(ModelFormatError, match="version 2 and model 'alpha' of version 1 .*`cortex refresh` loads"):
        load(tmp_path / "beta", trusts_pickle=True, model="alpha", version="2")
    same = load(tmp_path / "same", trusts_pickle=True, model="same")
    other = load(tmp_path / "other", trusts_pickle=True, model="other")
    assert [answer(each) for each in (alpha, other, same, alpha)] == [[10.0], [1000.0], [10.0], [10.0]]


def test_a_model_whose_module_another_package_has_imported_is_not_loaded(tmp_path: Path) -> None:
    save_with_code(tmp_path / "m", "colorsys", 10)
    import colorsys

    with pytest.raises(ModelFormatError, match="imported another colorsys already, from .*colorsys.py; rename"):
        load(tmp_path / "m", trusts_pickle=True)
    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_a_repaired_version_can_be_loaded_after_one_that_failed(tmp_path: Path) -> None:
    save_with_code(tmp_path / "1", "prep_repaired", 1, fails=True)
    save_with_code(tmp_path / "2", "prep_repaired", 2)
    with pytest.raises(ModelFormatError, match="fails"):
        load(tmp_path / "1", trusts_pickle=True)
    assert answer(load(tmp_path / "2", trusts_pickle=True, version="2")) == [2.0]
