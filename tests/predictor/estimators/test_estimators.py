"""Files that the current versions of the libraries write, loaded by cortex and by the libraries themselves."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortex.cli.model_request import model_request
from cortex.errors import ModelFormatError
from cortex.models.formats.detection import detect
from cortex.models.loader import LoadRequest
from cortex.payloads.inference_protocol import model_document
from cortex.payloads.request_forms import read_request
from cortex.payloads.signature import TensorSignature
from cortex.predictor.estimators.estimator import library_message, tensor_of
from cortex.predictor.estimators.loader import DetectedLoader, RunnableModel

pytestmark = pytest.mark.heavy  # the libraries take seconds to import

ROWS = np.random.default_rng(0).normal(size=(150, 4))
TARGET = (ROWS[:, 0] + ROWS[:, 1] > 0).astype(int) + (ROWS[:, 2] > 1)
NAMES = ["sepal length", "sepal width", "petal length", "petal width"]


def load(path: Path, *, trusts_pickle: bool = False) -> RunnableModel:
    request = LoadRequest("iris", "1", str(path), "", 0, None)
    return DetectedLoader(trusts_pickle, threads=1).load(request)


def infer(model: RunnableModel, rows: Any) -> dict[str, Any]:
    return dict(model.infer({"input": np.asarray(rows, np.float64)}))


def same(one: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=np.asarray(other).dtype.kind == "f")


# scikit-learn.


def classifier(kind: str) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    made = {
        "logistic": LogisticRegression,
        "pipeline": lambda: make_pipeline(StandardScaler(), LogisticRegression()),
        "forest": lambda: RandomForestClassifier(5, random_state=0),
        "boosting": lambda: HistGradientBoostingClassifier(max_iter=3),
        "neighbors": KNeighborsClassifier,
    }
    return made[kind]().fit(ROWS, np.array(["setosa", "versicolor", "virginica"])[TARGET])


@pytest.mark.parametrize("kind", ["logistic", "pipeline", "forest", "boosting", "neighbors"])
def test_a_classifier_in_skops_needs_no_trust_and_answers_with_labels_and_probabilities(
    tmp_path: Path, kind: str
) -> None:
    import skops.io

    trained = classifier(kind)
    skops.io.dump(trained, tmp_path / "model.bin")
    model = load(tmp_path)
    outputs = infer(model, ROWS)
    assert same(outputs["label"], trained.predict(ROWS)) and outputs["label"].dtype == object
    assert same(outputs["probabilities"], trained.predict_proba(ROWS))
    assert model.signature.inputs == (TensorSignature("input", "FP64", (-1, 4)),)
    assert model.signature.outputs == (
        TensorSignature("label", "BYTES", (-1,)),
        TensorSignature("probabilities", "FP64", (-1, 3), labels=("setosa", "versicolor", "virginica")),
    )
    assert (model.signature.name, model.signature.platform) == ("iris", "sklearn")
    assert "is a skops file" in model.signature.description


def test_a_vectorizer_in_skops_that_opens_the_files_that_callers_name_is_not_loaded(tmp_path: Path) -> None:
    import skops.io
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.pipeline import FeatureUnion, make_pipeline

    reading = FeatureUnion([("a", HashingVectorizer(n_features=8)), ("b", HashingVectorizer(input="filename"))])
    skops.io.dump(make_pipeline(reading), tmp_path / "m")
    with pytest.raises(ModelFormatError, match="it opens the files that callers name"):
        load(tmp_path)


@pytest.mark.parametrize("compress", [0, 3, ("gzip", 3), ("bz2", 3), ("xz", 3), ("lzma", 3)])
def test_joblib_and_pickle_are_loaded_only_where_they_are_trusted(tmp_path: Path, compress: Any) -> None:
    import joblib

    trained = classifier("pipeline")
    joblib.dump(trained, tmp_path / "model.skops", compress=compress)
    with pytest.raises(ModelFormatError, match="loading a pickle runs any code.*write `trust: pickle`"):
        load(tmp_path)
    assert same(infer(load(tmp_path, trusts_pickle=True), ROWS)["probabilities"], trained.predict_proba(ROWS))
    lines = [each.line for each in detect(tmp_path).requirements]
    assert lines[0].startswith("scikit-learn==")


def test_the_version_of_scikit_learn_is_found_behind_the_arrays_of_a_joblib_file(tmp_path: Path) -> None:
    import joblib
    import sklearn
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(np.arange(200_000, dtype=float).reshape(2, -1))
    scaler.names_ = np.array(["a", None, "b"], object)  # joblib nests a pickle for it
    joblib.dump([np.zeros((300, 7), np.float32), np.zeros(3, [("a", "i4"), ("b", "f8")]), scaler], tmp_path / "m")
    assert detect(tmp_path).requirements[0].line == f"scikit-learn=={sklearn.__version__}"


def test_a_model_of_another_version_of_scikit_learn_is_an_error_before_loading(tmp_path: Path) -> None:
    import joblib

    joblib.dump(classifier("logistic"), tmp_path / "m")
    data = (tmp_path / "m").read_bytes()
    import sklearn

    version = sklearn.__version__.encode()
    other = b"0.0.0".ljust(len(version), b"0")[: len(version)]
    (tmp_path / "m").write_bytes(data.replace(version, other))
    with pytest.raises(ModelFormatError) as caught:
        load(tmp_path, trusts_pickle=True)
    text = str(caught.value)
    assert f"it was saved by scikit-learn {other.decode()}, but scikit-learn {version.decode()} is installed" in text
    assert f"write into requirements.txt: scikit-learn=={other.decode()}" in text


def test_a_regressor_answers_with_predictions(tmp_path: Path) -> None:
    import skops.io
    from sklearn.linear_model import LinearRegression

    trained = LinearRegression().fit(ROWS, ROWS[:, :2])
    skops.io.dump(trained, tmp_path / "m")
    model = load(tmp_path)
    assert same(infer(model, ROWS)["prediction"], trained.predict(ROWS))
    assert model.signature.outputs == (TensorSignature("prediction", "FP64", (-1, 2)),)


def test_a_model_that_was_trained_on_a_data_frame_has_its_columns_as_labels(tmp_path: Path) -> None:
    import pandas as pd
    import skops.io
    from sklearn.svm import LinearSVC

    trained = LinearSVC().fit(pd.DataFrame(ROWS, columns=NAMES), TARGET)
    skops.io.dump(trained, tmp_path / "m")
    model = load(tmp_path)
    assert model.signature.inputs == (TensorSignature("input", "FP64", (-1, 4), labels=tuple(NAMES)),)
    frame = pd.DataFrame(ROWS, columns=NAMES)
    assert same(infer(model, ROWS)["label"], trained.predict(frame))
    assert same(infer(model, ROWS)["scores"], trained.decision_function(frame))


@pytest.mark.parametrize("kind", ["pipeline", "forest", "voting", "columns", "frames", "grid"])
def test_a_model_that_was_trained_on_a_data_frame_answers_the_same_without_warnings(tmp_path: Path, kind: str) -> None:
    import pandas as pd
    import skops.io
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import VotingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    by_name = make_column_transformer((StandardScaler(), [NAMES[2], NAMES[0]]), (MinMaxScaler(), [NAMES[1]]))
    made = {
        "pipeline": lambda: classifier("pipeline"),
        "forest": lambda: classifier("forest"),
        "voting": lambda: VotingClassifier([("a", make_pipeline(by_name, LogisticRegression()))], voting="soft"),
        "columns": lambda: make_pipeline(by_name, LogisticRegression()),
        "frames": lambda: make_pipeline(StandardScaler().set_output(transform="pandas"), by_name, LogisticRegression()),
        "grid": lambda: GridSearchCV(make_pipeline(by_name, LogisticRegression()), {}, cv=2),
    }
    frame = pd.DataFrame(ROWS, columns=NAMES)
    trained = made[kind]().fit(frame, TARGET)
    skops.io.dump(trained, tmp_path / "m")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(tmp_path)
        outputs = infer(model, ROWS)
    assert model.signature.inputs[0].labels == tuple(NAMES)
    assert same(outputs["label"], trained.predict(frame))
    assert same(outputs["probabilities"], trained.predict_proba(frame))


def test_columns_of_texts_are_inputs_of_their_own(tmp_path: Path) -> None:
    import pandas as pd
    import skops.io
    from sklearn.compose import make_column_transformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame = pd.DataFrame({"age": ROWS[:, 0], "city": np.array(["Oslo", "Rome"], object)[(ROWS[:, 1] > 0) * 1]})
    encode = make_column_transformer((OneHotEncoder(), ["city"]), (StandardScaler(), ["age"]))
    trained = make_pipeline(encode, LogisticRegression()).fit(frame, TARGET)
    skops.io.dump(trained, tmp_path / "m")
    model = load(tmp_path)
    assert model.signature.inputs == (
        TensorSignature("age", "FP64", (-1, 1)),
        TensorSignature("city", "BYTES", (-1, 1)),
    )
    cities = np.array([[city.encode()] for city in frame["city"]], object)
    outputs = model.infer({"age": ROWS[:, :1], "city": cities})
    assert same(outputs["probabilities"], trained.predict_proba(frame))
    with pytest.raises(ValueError, match="unknown categor"):
        model.infer({"age": np.zeros((1, 1)), "city": np.array([b"Paris"], object)})


def test_a_model_that_begins_with_a_vectorizer_takes_texts(tmp_path: Path) -> None:
    import skops.io
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    trained = make_pipeline(TfidfVectorizer(), MultinomialNB()).fit(["good film", "bad film"], ["pos", "neg"])
    skops.io.dump(trained, tmp_path / "m")
    model = load(tmp_path)
    assert model.signature.inputs == (TensorSignature("input", "BYTES", (-1,)),)
    assert model.infer({"input": np.array([b"good", "bad"], object)})["label"].tolist() == ["pos", "neg"]


def test_an_input_without_rows_is_an_error_that_names_it(tmp_path: Path) -> None:
    import skops.io

    skops.io.dump(classifier("logistic"), tmp_path / "m")
    with pytest.raises(ValueError, match=r"^input 'input' has no rows$"):
        infer(load(tmp_path), np.zeros((0, 4)))


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (
            "[14:55:01] /workspace/src/c_api/c_api.cc:12: Check failed: rows > 0 \nStack trace:\n [bt] (0) /usr/x.so",
            "Check failed: rows > 0",
        ),
        (
            "Name:'' Status Message: /onnxruntime_src/core/a.h:563 void onnxruntime::B::Init(ptrdiff_t) axis == 1",
            "Name:'' Status Message: axis == 1",
        ),
        ("X has 3 features,\n but 4 are expected", "X has 3 features, but 4 are expected"),
    ],
)
def test_messages_of_libraries_have_no_places_in_sources(raised: str, shown: str) -> None:
    assert library_message(ValueError(raised)) == shown


def test_a_missing_number_among_results_is_nan_and_changes_no_other() -> None:
    assert same(tensor_of([1.5, None, 2]), [1.5, np.nan, 2.0])
    assert tensor_of(["a", None]).tolist() == ["a", "None"]


def test_printed_samples_have_values_that_the_model_accepts(tmp_path: Path) -> None:
    import pandas as pd
    import skops.io
    from sklearn.preprocessing import OneHotEncoder

    numbers = OneHotEncoder(sparse_output=False).fit(np.array([[3.0, 7.0], [4.0, 8.0]]))
    texts = OneHotEncoder().fit(pd.DataFrame({"city": ["Oslo", "Rome"], "size": [2.0, 5.0]}))
    for fitted in numbers, texts:
        skops.io.dump(fitted, tmp_path / "m")
        model = load(tmp_path)
        command = model_request(model_document("m", model.signature, ()), "http://localhost")
        request = read_request(json.loads(shlex.split(command)[-1]), model.signature)
        model.infer(request.inputs)


def test_only_requested_outputs_are_computed(tmp_path: Path) -> None:
    import skops.io

    skops.io.dump(classifier("logistic"), tmp_path / "m")
    assert set(load(tmp_path).infer({"input": ROWS}, ["label"])) == {"label"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [[0, 0, float("nan"), 0]],
            "row 1, column 3 is missing .NaN., which the model does not accept: Input X contains NaN$",
        ),
        ([[0, 0, 0, 0], [0, float("inf"), 0, 0]], "row 2, column 2 is infinite, which the model does not accept"),
        ([[0, 0, 0]], r"has shape \[1, 3\]; the model takes rows of 4 values"),
        ([0, 0, 0, 0], r"has shape \[4\]; the model takes rows of 4 values"),
    ],
)
def test_rows_that_the_model_does_not_accept_are_errors_of_the_caller(tmp_path: Path, rows: Any, words: str) -> None:
    import skops.io

    skops.io.dump(classifier("logistic"), tmp_path / "m")
    with pytest.raises(ValueError, match=words):
        infer(load(tmp_path), rows)


def test_a_skops_file_with_other_types_is_not_loaded(tmp_path: Path) -> None:
    import skops.io
    from sklearn.preprocessing import FunctionTransformer

    skops.io.dump(FunctionTransformer(os.system), tmp_path / "m")
    with pytest.raises(ModelFormatError, match=r"types that are not scikit-learn's own: posix.system; nothing was"):
        load(tmp_path)


@pytest.mark.long
def test_every_estimator_of_scikit_learn_that_skops_writes_can_be_loaded(tmp_path: Path) -> None:
    import skops.io
    from sklearn.base import is_regressor
    from sklearn.utils import all_estimators

    from cortex.predictor.estimators.sklearn import untrusted_types

    unknown = {}
    for name, made in all_estimators():
        try:
            estimator = made()
            estimator.fit(np.abs(ROWS[:30]), ROWS[:30, 0] if is_regressor(estimator) else TARGET[:30] > 0)
            skops.io.dump(estimator, tmp_path / name)
        except Exception:  # it needs other arguments
            continue
        if found := untrusted_types(str(tmp_path / name)):
            unknown[name] = found
    allowed = {"numpy.mean", "scipy._lib.array_api_compat.numpy._aliases.asarray"}  # functions
    assert {name: types for name, types in unknown.items() if set(types) - allowed} == {}


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.marker}'",)


def test_no_hostile_file_runs_anything(tmp_path: Path) -> None:
    import joblib

    marker = tmp_path / "marker"
    for name, write in (
        ("a.skops", lambda path: path.write_bytes(pickle.dumps(Hostile(marker)))),
        ("b.joblib", lambda path: joblib.dump(Hostile(marker), path)),
        ("c.joblib", lambda path: joblib.dump([np.zeros(9), Hostile(marker)], path, compress=3)),
        ("d.onnx", lambda path: path.write_bytes(pickle.dumps(Hostile(marker), 2))),
    ):
        write(tmp_path / name)
        with pytest.raises(ModelFormatError, match="loading a pickle runs any code"):
            load(tmp_path / name)
    assert not marker.exists()


def test_a_pickle_without_a_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ModelFormatError, match=r"it holds an object of type dict, which has neither predict"):
        load(tmp_path, trusts_pickle=True)
    (tmp_path / "m").write_bytes(pickle.dumps(ROWS)[:-50])
    with pytest.raises(ModelFormatError, match="can't be loaded: "):
        load(tmp_path, trusts_pickle=True)


def test_trusted_pickles_of_other_libraries_are_loaded(tmp_path: Path) -> None:
    import joblib
    import lightgbm
    import xgboost

    for name, trained in (
        ("x", xgboost.XGBClassifier(n_estimators=3, n_jobs=1)),
        ("l", lightgbm.LGBMClassifier(n_estimators=3, verbose=-1, num_threads=1)),
    ):
        joblib.dump(trained.fit(ROWS, TARGET), tmp_path / name)
        outputs = infer(load(tmp_path / name, trusts_pickle=True), ROWS)
        assert same(outputs["label"], trained.predict(ROWS))
        assert same(outputs["probabilities"], trained.predict_proba(ROWS))


# Trees.


@pytest.mark.parametrize("suffix", ["json", "ubj"])
@pytest.mark.parametrize("target", [TARGET, TARGET > 0])
def test_an_xgboost_classifier(tmp_path: Path, suffix: str, target: Any) -> None:
    import xgboost

    trained = xgboost.XGBClassifier(n_estimators=5, n_jobs=1).fit(ROWS, target.astype(int))
    trained.save_model(tmp_path / f"m.{suffix}")
    model = load(tmp_path)
    outputs = infer(model, ROWS)
    assert same(outputs["label"], trained.predict(ROWS)) and same(outputs["probabilities"], trained.predict_proba(ROWS))
    assert outputs["probabilities"].dtype == np.float32
    count = outputs["probabilities"].shape[1]
    assert model.signature.inputs == (TensorSignature("input", "FP32", (-1, 4)),)
    assert model.signature.outputs == (
        TensorSignature("label", "INT64", (-1,)),
        TensorSignature("probabilities", "FP32", (-1, count), labels=("0", "1", "2")[:count]),
    )
    assert detect(tmp_path).requirements[0].line == f"xgboost=={xgboost.__version__}"


@pytest.mark.parametrize("booster", ["gbtree", "gblinear", "dart"])
def test_an_xgboost_regressor_with_names_and_missing_values(tmp_path: Path, booster: str) -> None:
    import pandas as pd
    import xgboost

    rows = ROWS.copy()
    rows[::7, 1] = np.nan
    frame = pd.DataFrame(rows if booster != "gblinear" else ROWS, columns=NAMES)
    trained = xgboost.XGBRegressor(n_estimators=5, n_jobs=1, booster=booster).fit(frame, ROWS[:, 0])
    trained.get_booster().save_model(tmp_path / "m.ubj")
    model = load(tmp_path)
    assert model.signature.inputs[0].labels == tuple(NAMES)
    assert same(infer(model, frame)["prediction"], trained.predict(frame))


def test_early_stopping_of_xgboost_is_honoured(tmp_path: Path) -> None:
    import xgboost

    trained = xgboost.XGBClassifier(n_estimators=60, n_jobs=1, early_stopping_rounds=3, learning_rate=1.0)
    noise = np.random.default_rng(1).permutation(TARGET > 0).astype(int)
    trained.fit(ROWS[:100], noise[:100], eval_set=[(ROWS[100:], noise[100:])], verbose=False)
    trained.save_model(tmp_path / "m.json")
    assert same(infer(load(tmp_path), ROWS)["probabilities"], trained.predict_proba(ROWS))


@pytest.mark.parametrize("target", [TARGET, TARGET > 0])
def test_a_lightgbm_classifier(tmp_path: Path, target: Any) -> None:
    import lightgbm

    trained = lightgbm.LGBMClassifier(n_estimators=5, verbose=-1, num_threads=1).fit(ROWS, target.astype(int))
    trained.booster_.save_model(tmp_path / "m.txt")
    model = load(tmp_path)
    outputs = infer(model, ROWS)
    assert same(outputs["label"], trained.predict(ROWS)) and same(outputs["probabilities"], trained.predict_proba(ROWS))
    assert model.signature.inputs == (TensorSignature("input", "FP64", (-1, 4)),)


def test_a_lightgbm_regressor_with_names(tmp_path: Path) -> None:
    import lightgbm
    import pandas as pd

    frame = pd.DataFrame(ROWS, columns=[name.replace(" ", "_") for name in NAMES])
    trained = lightgbm.LGBMRegressor(n_estimators=5, verbose=-1, num_threads=1).fit(frame, ROWS[:, 0])
    trained.booster_.save_model(tmp_path / "m.txt")
    model = load(tmp_path)
    assert model.signature.inputs[0].labels == tuple(frame.columns)
    assert same(infer(model, ROWS)["prediction"], trained.predict(frame))


Damage = Callable[[bytes], bytes]


@pytest.mark.parametrize("damage", [lambda data: data[:-40], lambda data: data[:400] + b"\0" * 50 + data[450:]])
@pytest.mark.parametrize("kind", ["skops", "xgboost", "lightgbm"])
def test_a_damaged_file_is_one_error(tmp_path: Path, kind: str, damage: Damage) -> None:
    import lightgbm
    import skops.io
    import xgboost

    if kind == "skops":
        skops.io.dump(classifier("pipeline"), tmp_path / "m")
    elif kind == "xgboost":
        xgboost.XGBClassifier(n_estimators=2, n_jobs=1).fit(ROWS, TARGET).save_model(tmp_path / "m.ubj")
    else:
        made = lightgbm.LGBMRegressor(n_estimators=2, verbose=-1, num_threads=1).fit(ROWS, TARGET)
        made.booster_.save_model(tmp_path / "m")
    file = next(tmp_path.iterdir())
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelFormatError) as caught:
        load(tmp_path)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
