import pytest

from cortex.predictor.interface import FOREIGN_CLASSES, GENERATIONS, UNAVAILABLE_ARGUMENTS

ROWS = pytest.mark.parametrize("generation", GENERATIONS.values(), ids=lambda row: f"{row.key}-{row.type}-{row.client}")


def test_generations_are_named_as_replica_specs_name_them():
    assert {interface for interface, _, _ in GENERATIONS} == {"functions", "predictor", "handler"}
    for (interface, type_, _), generation in GENERATIONS.items():
        assert (interface, type_) == (generation.key, generation.type)


def test_every_class_is_served_with_and_without_models():
    for interface in ("predictor", "handler"):
        for type_ in ("python", "tensorflow", "onnx"):
            for has_models in (False, True):
                assert GENERATIONS[interface, type_, has_models].class_name


@ROWS
def test_a_row_agrees_with_itself(generation):
    for signature in (generation.constructor_signature, generation.method_signature, *generation.hooks.values()):
        assert len(set(signature.allowed)) == len(signature.allowed)
        assert not (signature.positional and signature.optional)
        assert not set(signature.refused) & set(signature.allowed)
    assert generation.after_hook is None or generation.after_hook in generation.hooks
    assert generation.class_name not in FOREIGN_CLASSES
    assert generation.required_hooks <= set(generation.hooks)
    assert generation.client is None or generation.client in generation.constructor_signature.required
    assert all(verb.isupper() for verb in generation.methods.values())


def test_what_is_required_is_available():
    for generation in GENERATIONS.values():
        required = generation.constructor_signature.required + generation.method_signature.required
        assert not set(required) & set(UNAVAILABLE_ARGUMENTS)


def test_handlers_answer_the_five_verbs():
    assert GENERATIONS["handler", "python", False].methods == {
        "handle_post": "POST",
        "handle_get": "GET",
        "handle_put": "PUT",
        "handle_patch": "PATCH",
        "handle_delete": "DELETE",
    }
