"""Estimators of scikit-learn from skops files and, where they are trusted, pickles. Imports scikit-learn."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cortex.models.formats.requirements import SKOPS, check_installed
from cortex.payloads.signature import TensorSignature
from cortex.predictor.estimators.estimator import (
    LABEL,
    PREDICTION,
    PROBABILITIES,
    SCORES,
    TRANSFORMED,
    Columns,
    Estimator,
    Matrix,
    Table,
    Texts,
)
from cortex.predictor.estimators.loader import LoadContext

#: Types within fitted estimators of scikit-learn that skops does not trust by itself: module → names. They hold arrays
#: and numbers, and their constructors neither import nor call anything by name.
_TRUSTED = {
    "numpy": ("dtype",),
    "scipy.interpolate._bsplines": ("BSpline",),
    "scipy.sparse._csr": ("csr_matrix", "csr_array"),
    "sklearn._loss.link": ("IdentityLink", "LogLink", "LogitLink", "HalfLogitLink", "MultinomialLogit", "Interval"),
    "sklearn._loss.loss": (
        "AbsoluteError", "ExponentialLoss", "HalfBinomialLoss", "HalfGammaLoss", "HalfMultinomialLoss",
        "HalfPoissonLoss", "HalfSquaredError", "HalfTweedieLoss", "HalfTweedieLossIdentity", "HuberLoss", "PinballLoss",
    ),
    "sklearn.calibration": ("_CalibratedClassifier", "_SigmoidCalibration", "_TemperatureScaling"),
    "sklearn.cluster._bisect_k_means": ("_BisectingTree",),
    "sklearn.cluster._kmeans": ("_kmeans_single_elkan", "_kmeans_single_lloyd"),
    "sklearn.ensemble._hist_gradient_boosting.binning": ("_BinMapper",),
    "sklearn.ensemble._hist_gradient_boosting.predictor": ("TreePredictor",),
    "sklearn.feature_selection._univariate_selection": ("chi2", "f_classif", "f_regression", "r_regression"),
    "sklearn.gaussian_process._gpc": ("_BinaryGaussianProcessClassifierLaplace",),
    "sklearn.gaussian_process.kernels": (
        "CompoundKernel", "ConstantKernel", "DotProduct", "ExpSineSquared", "Exponentiation", "Hyperparameter",
        "Matern", "Product", "RBF", "RationalQuadratic", "Sum", "WhiteKernel",
    ),
    "sklearn.metrics._dist_metrics": tuple(
        f"{name}Distance{bits}"
        for name in ("BrayCurtis", "Canberra", "Chebyshev", "Euclidean", "Hamming", "Haversine", "Jaccard",
                     "Mahalanobis", "Manhattan", "Minkowski", "SEuclidean")
        for bits in ("", "32", "64")
    ),
    "sklearn.metrics._scorer": ("_CurveScorer", "_PassthroughScorer", "_Scorer"),
    "sklearn.model_selection._split": (
        "GroupKFold", "KFold", "LeaveOneOut", "RepeatedKFold", "RepeatedStratifiedKFold", "ShuffleSplit",
        "StratifiedGroupKFold", "StratifiedKFold", "StratifiedShuffleSplit", "TimeSeriesSplit",
    ),
    "sklearn.multiclass": ("_ConstantPredictor",),
    "sklearn.neighbors._ball_tree": ("BallTree", "BallTree32", "BallTree64"),
    "sklearn.neighbors._kd_tree": ("KDTree", "KDTree32", "KDTree64"),
    "sklearn.neural_network._stochastic_optimizers": ("AdamOptimizer", "SGDOptimizer"),
    "sklearn.tree._tree": ("Tree",),
    "sklearn.utils._bunch": ("Bunch",),
    "sklearn.utils._metadata_requests": ("MetadataRequest", "MethodMetadataRequest"),
}  # fmt: skip
TRUSTED_TYPES = frozenset(f"{module}.{name}" for module, names in _TRUSTED.items() for name in names)
_SHOWN_TYPES = 5
#: Attributes of estimators that select columns by name, call functions with what they get, or pass on data frames.
_USERS_OF_NAMES = {"transformers", "transformer_list", "steps", "func", "_sklearn_output_config"}


def load(context: LoadContext) -> Estimator:
    """Load a skops file, or a pickle that the caller trusts. Raises: anything for damaged files."""
    path = context.detection.path
    estimator = load_skops(context, path) if context.detection.format == "skops" else _load_pickle(path)
    return wrap(context, estimator)


def untrusted_types(path: str) -> list[str]:
    """Return the types in a skops file that neither skops nor cortex trusts. Nothing is constructed."""
    import skops.io  # noqa: PLC0415 - only for skops

    return sorted(set(skops.io.get_untrusted_types(file=path)) - TRUSTED_TYPES)


def check_types(context: LoadContext, path: str) -> None:
    """Raise ModelFormatError if a skops file contains types that neither skops nor cortex trusts."""
    check_installed([SKOPS], path)
    if unknown := untrusted_types(path):
        shown = ", ".join(unknown[:_SHOWN_TYPES]) + (", …" if len(unknown) > _SHOWN_TYPES else "")
        raise context.error(
            f"it contains types that are not scikit-learn's own: {shown}; nothing was loaded; "
            "write a class that loads it with skops.io.load(path, trusted=[…]) if you trust them"
        )


def load_skops(context: LoadContext, path: str) -> Any:
    """Load a skops file that nobody trusts. Raises: ModelFormatError."""
    import skops.io  # noqa: PLC0415 - only for skops

    check_types(context, path)
    estimator = skops.io.load(path, trusted=sorted(TRUSTED_TYPES))
    if any(getattr(each, "input", None) in ("file", "filename") for each in _parts(estimator)):
        raise context.error("it opens the files that callers name (`input='filename'`); write a class that loads it")
    return estimator


def _parts(estimator: Any) -> Iterator[Any]:
    """Yield an estimator and everything that it consists of, at any depth."""
    seen: set[int] = set()
    waiting = [estimator]
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, str | bytes | np.ndarray):
            continue
        seen.add(id(part))
        yield part
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple | set) else ()
        waiting += [*inner, *getattr(part, "__dict__", {}).values()]


def wrap(context: LoadContext, estimator: Any) -> Estimator:
    """Return the model of an object with the interface of scikit-learn. Raises: ModelFormatError."""
    functions = _functions(estimator)
    if not functions:
        kind = type(estimator).__name__
        raise context.error(f"it holds an object of type {kind}, which has neither predict() nor transform()")
    classes = getattr(estimator, "classes_", ())
    is_list = isinstance(classes, list) and len(classes) > 0 and np.ndim(classes[0]) > 0  # several outputs
    return Estimator(
        context.request.model,
        "sklearn",
        context.detection.reason,
        _table(estimator),
        functions,
        () if is_list else classes,
    )


def _load_pickle(path: str) -> Any:
    try:
        import joblib  # noqa: PLC0415 - comes with scikit-learn, but a pickle of another library does not need it
    except ModuleNotFoundError:
        with open(path, "rb") as file:  # noqa: PTH123
            return pickle.load(file)  # noqa: S301 - the caller trusts it
    return joblib.load(path)


def _functions(estimator: Any) -> dict[str, Callable[[Any], Any]]:
    """Return what to call for each output."""
    if hasattr(estimator, "predict"):
        if not hasattr(estimator, "classes_"):
            return {PREDICTION: estimator.predict}
        classes = estimator.classes_
        if isinstance(classes, list) and classes and np.ndim(classes[0]):  # several outputs
            return {LABEL: estimator.predict}
        if hasattr(estimator, "predict_proba"):
            return {LABEL: estimator.predict, PROBABILITIES: estimator.predict_proba}
        if hasattr(estimator, "decision_function"):
            return {LABEL: estimator.predict, SCORES: estimator.decision_function}
        return {LABEL: estimator.predict}
    return {TRANSFORMED: estimator.transform} if hasattr(estimator, "transform") else {}


def _table(estimator: Any) -> Table:
    if _is_text(estimator):
        return Texts()
    names = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
    count = len(names) or int(getattr(estimator, "n_features_in_", -1))
    samples = _known_values(estimator, names, count)
    if not any(isinstance(value, str) for value in samples.values()):
        if names and not _forget_names(estimator):
            return Matrix(names, count, "FP64", _frames(names), samples)
        return Matrix(names, count, "FP64", lambda array: array, samples)
    shown = names or [f"column_{index + 1}" for index in range(count)]
    columns = [
        TensorSignature(name, "BYTES" if isinstance(samples.get(index), str) else "FP64", (-1, 1))
        for index, name in enumerate(shown)
    ]
    convert = _frame if names else lambda given: np.column_stack([column.astype(object) for column in given.values()])
    return Columns(columns, {shown[index]: value for index, value in samples.items()}, convert)


def _frame(columns: dict[str, Any]) -> Any:
    import pandas as pd  # noqa: PLC0415 - only for models that were trained on data frames

    return pd.DataFrame(columns)


def _frames(names: Sequence[str]) -> Callable[[Any], Any]:
    """Return a function from arrays to what the estimator was trained on: data frames, if pandas is installed."""
    try:
        import pandas as pd  # noqa: PLC0415 - only for models that were trained on data frames
    except ModuleNotFoundError:
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        return lambda array: array
    index = pd.Index(list(names))
    return lambda array: pd.DataFrame(array, columns=index, copy=False)


def _forget_names(estimator: Any) -> bool:
    """Make an estimator that was trained on a data frame take arrays, if it only checks the names of columns.

    Their order is checked before; scikit-learn takes several times as long for a data frame. Return whether it did so.
    """
    parts = [part for _, part in getattr(estimator, "steps", ())] or [estimator]
    if not all(part in (None, "passthrough") or _ignores_names(part) for part in parts):
        return False
    if "_sklearn_output_config" in vars(estimator):
        return False
    for part in parts:
        if not isinstance(part, str | None):
            vars(part).pop("feature_names_in_", None)
    return True


def _ignores_names(estimator: Any) -> bool:
    state = vars(estimator)
    if not type(estimator).__module__.startswith("sklearn.") or state.keys() & _USERS_OF_NAMES:
        return False
    inner: list[Any] = list(state.values())
    for value in state.values():
        inner += value if isinstance(value, list | tuple) else ()
    return not any("feature_names_in_" in getattr(each, "__dict__", ()) or hasattr(each, "steps") for each in inner)


def _is_text(estimator: Any) -> bool:
    """Return whether the first step of an estimator takes texts instead of rows."""
    from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer  # noqa: PLC0415 - slow to import

    return isinstance(_first_step(estimator), CountVectorizer | HashingVectorizer)


def _first_step(estimator: Any) -> Any:
    """Return the transformer or estimator that gets the input."""
    while True:
        inner = getattr(estimator, "best_estimator_", None)
        if inner is None and (steps := getattr(estimator, "steps", None)):
            inner = next((step for _, step in steps if step not in (None, "passthrough")), None)
        if inner is None and (branches := getattr(estimator, "transformer_list", None)):
            inner = branches[0][1]
        if inner is None:
            return estimator
        estimator = inner


def _known_values(estimator: Any, names: Sequence[str], count: int) -> dict[int, Any]:
    """Return a value that is valid in each column of categories or texts, by its index."""
    first = _first_step(estimator)
    values: dict[int, Any] = {}
    if hasattr(first, "transformers_"):
        places = getattr(first, "_transformer_to_input_indices", {})
        for name, transformer, columns in first.transformers_:
            indices = places.get(name) or _indices(columns, names)
            if isinstance(transformer, str):
                continue
            if _is_text(transformer):
                values |= dict.fromkeys(indices, "text")
            inner = _known_values(transformer, [], len(indices))
            values |= {indices[index]: value for index, value in inner.items() if index < len(indices)}
        return values
    for attribute in ("categories_", "statistics_"):
        for index, known in enumerate(getattr(first, attribute, ())):
            value = known[0] if np.ndim(known) and len(known) else known
            if isinstance(value, str | bytes | np.number | int | float) and index < max(count, 0):
                values[index] = value if isinstance(value, str) else float(value)
    return values


def _indices(columns: Any, names: Sequence[str]) -> list[int]:
    given = [columns] if isinstance(columns, str | int) else list(columns) if np.iterable(columns) else []
    return [names.index(each) if isinstance(each, str) else int(each) for each in given]
