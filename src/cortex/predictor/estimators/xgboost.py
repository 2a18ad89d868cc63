"""Boosters of XGBoost. The only module that imports it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import xgboost

from cortex.predictor.estimators.estimator import (
    LABEL,
    PREDICTION,
    PROBABILITIES,
    Estimator,
    Functions,
    Matrix,
    binary_probabilities,
    classify_by_most_probable,
)
from cortex.predictor.estimators.loader import LoadContext


def load(context: LoadContext) -> Estimator:
    """Load a model that `save_model` wrote. Raises: anything for damaged files."""
    booster = xgboost.Booster(model_file=context.detection.path)
    booster.set_param({"nthread": context.threads})
    learner = json.loads(booster.save_config())["learner"]
    functions, classes = _functions(booster, learner)
    table = Matrix(booster.feature_names or (), booster.num_features(), "FP32", lambda array: array)
    return Estimator(context.request.model, "xgboost", context.detection.reason, table, functions, classes)


def _functions(booster: Any, learner: dict[str, Any]) -> tuple[Functions, list[int]]:
    """Return what computes the outputs, and the classes of a classifier."""
    predict = _predict(booster, learner)
    objective = learner["objective"]["name"]
    if objective == "binary:logistic":

        def classify(argument: Any) -> dict[str, Any]:
            positive = predict(argument)
            return {LABEL: (positive > 0.5).astype(np.int64), PROBABILITIES: binary_probabilities(positive)}

        return {"": classify}, [0, 1]
    if objective == "multi:softprob":
        return {"": partial(classify_by_most_probable, predict)}, list(
            range(int(learner["learner_model_param"]["num_class"]))
        )
    if objective == "multi:softmax":
        return {LABEL: lambda argument: predict(argument).astype(np.int64)}, []
    return {PREDICTION: predict}, []


def _predict(booster: Any, learner: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the function of XGBoost's own classes: with all trees, or up to the best one after early stopping."""
    end = 0
    if booster.attr("scikit_learn") is not None and (best := booster.attr("best_iteration")) is not None:
        end = int(best) + 1
    span = (0, end)
    names = booster.feature_names
    if learner["gradient_booster"]["name"] == "gblinear":
        return lambda array: booster.predict(xgboost.DMatrix(array, feature_names=names), iteration_range=span)
    return lambda array: booster.inplace_predict(array, iteration_range=span, validate_features=False)
