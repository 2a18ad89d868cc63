"""Examples of AsyncAPIs: what their README says, and what they return."""

from __future__ import annotations

import importlib.util
import json

import pytest
import yaml

from harness.installations.example_cases import ASYNC_EXAMPLES, AsyncExample


@pytest.mark.parametrize("example", ASYNC_EXAMPLES, ids=lambda example: example.name)
def test_async_example_returns_what_its_readme_says(example: AsyncExample) -> None:
    api = yaml.safe_load((example.folder / "cortex.yaml").read_text())[0]
    spec = importlib.util.spec_from_file_location("async_example", example.folder / api["handler"]["path"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    handler = module.Handler(api["handler"]["config"])
    assert handler.handle_async((example.folder / example.sample).read_text()) == example.result
    readme = (example.folder / "README.md").read_text()
    for shown in (
        f"cortex deploy examples/{example.name}\n",
        f"localhost:8888/{example.name} -H 'content-type: {example.content_type}'",
        f"@examples/{example.name}/{example.sample}\n",
        json.dumps(example.result),
    ):
        assert shown in readme
