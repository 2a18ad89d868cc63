from itertools import product

import pytest

from cortex.predictor.interface import ASYNC, BATCH, GENERATIONS, PROTO_MODULES, for_grpc

ROWS = pytest.mark.parametrize(
    "generation", GENERATIONS.values(), ids=lambda row: f"{row.kind}-{row.key}-{row.type}-{row.client}"
)


def test_generations_are_named_as_replica_specs_name_them():
    assert {interface for _, interface, _, _ in GENERATIONS} == {
        "functions",
        "older_request_handler",
        "request_handler",
        "predictor",
        "handler",
    }
    for (kind, interface, type_, _), generation in GENERATIONS.items():
        assert (kind, interface, type_) == (generation.kind, generation.key, generation.type)


def test_every_class_is_served_with_and_without_models():
    forms = product(
        ("RealtimeAPI", "BatchAPI", "AsyncAPI"),
        ("predictor", "handler"),
        ("python", "tensorflow", "onnx"),
        (False, True),
    )
    for form in forms:
        assert GENERATIONS[form].class_name


@ROWS
def test_a_row_agrees_with_itself(generation):
    assert not generation.methods.keys() & generation.hooks.keys()
    for signature in (generation.constructor_signature, generation.method_signature, *generation.hooks.values()):
        assert len(set(signature.allowed)) == len(signature.allowed)
        assert not (signature.positional and signature.optional)
        assert not set(signature.refused) & set(signature.allowed)
    assert generation.after_hook is None or generation.after_hook in generation.hooks
    assert generation.fallback not in generation.methods
    assert generation.required_hooks <= set(generation.hooks)
    assert generation.client is None or generation.client in generation.constructor_signature.required
    assert all(verb.isupper() for verb in generation.methods.values())


def test_a_handler_of_requests_serves_other_kinds_with_handle_post():
    for kind, own, given in (("AsyncAPI", "handle_async", ASYNC), ("BatchAPI", "handle_batch", BATCH)):
        row = GENERATIONS[kind, "handler", "python", False]
        assert row.select_serving({"handle_post", own}.__contains__) == {own: given}
        assert row.select_serving({"handle_post", "handle_get"}.__contains__) == {"handle_post": given}
        assert row.select_serving({"handle_get"}.__contains__) == {}


def test_what_is_required_is_available():
    for generation in GENERATIONS.values():
        required = generation.constructor_signature.required + generation.method_signature.required
        assert not set(required) & set(PROTO_MODULES)


def test_handlers_answer_the_five_verbs():
    assert GENERATIONS["RealtimeAPI", "handler", "python", False].methods == {
        "handle_post": "POST",
        "handle_get": "GET",
        "handle_put": "PUT",
        "handle_patch": "PATCH",
        "handle_delete": "DELETE",
    }


def test_a_grpc_api_has_a_method_for_each_rpc_and_gets_the_generated_module():
    row = for_grpc(GENERATIONS["RealtimeAPI", "handler", "python", False], ["Predict", "Info"])
    assert row.methods == {"Predict": "Predict", "Info": "Info"}
    assert set(PROTO_MODULES) <= set(row.constructor_signature.optional)
    assert not set(PROTO_MODULES) & set(row.constructor_signature.refused)
    assert row.method_signature.allowed == ("payload", "context")
    older = for_grpc(GENERATIONS["RealtimeAPI", "predictor", "onnx", True], ["Predict"])
    assert older.methods == {"predict": "Predict"}
    assert older.constructor_signature.required == ("onnx_client", "config")
