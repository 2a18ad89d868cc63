import pytest

from cortex.predictor.interface import FOREIGN_CLASSES, GENERATIONS, UNAVAILABLE_ARGUMENTS


def test_generations_are_named_as_replica_specs_name_them():
    assert set(GENERATIONS) == {"functions", "predictor", "handler"}
    assert all(key == generation.key for key, generation in GENERATIONS.items())


@pytest.mark.parametrize("generation", GENERATIONS.values(), ids=GENERATIONS.keys())
def test_a_row_agrees_with_itself(generation):
    for signature in (generation.constructor_signature, generation.method_signature, *generation.hooks.values()):
        assert len(set(signature.allowed)) == len(signature.allowed)
        assert not (signature.positional and signature.optional)
    assert generation.after_hook is None or generation.after_hook in generation.hooks
    assert generation.class_name not in FOREIGN_CLASSES
    assert all(verb.isupper() for verb in generation.methods.values())


def test_what_is_required_is_available():
    for generation in GENERATIONS.values():
        required = generation.constructor_signature.required + generation.method_signature.required
        assert not set(required) & set(UNAVAILABLE_ARGUMENTS)


def test_handlers_answer_the_five_verbs():
    assert GENERATIONS["handler"].methods == {
        "handle_post": "POST",
        "handle_get": "GET",
        "handle_put": "PUT",
        "handle_patch": "PATCH",
        "handle_delete": "DELETE",
    }
