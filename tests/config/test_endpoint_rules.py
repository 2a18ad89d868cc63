from __future__ import annotations

import pytest

from cortex.config.rules.endpoint_rules import describe_foreign_path
from cortex.config.schema import Api


def grpc(name: str) -> Api:
    handler = {"interface": "handler", "type": "python", "path": "handler.py", "protobuf_path": "greeter.proto"}
    networking = {"endpoint": "/greet.Greeter"}
    return Api.model_validate({"name": name, "kind": "RealtimeAPI", "handler": handler, "networking": networking})


def splitter(name: str, *targets: str) -> Api:
    apis = [{"name": target, "weight": 100 // len(targets)} for target in targets]
    data = {"name": name, "kind": "TrafficSplitter", "apis": apis, "networking": {"endpoint": "/greet.Greeter"}}
    return Api.model_validate(data)


@pytest.mark.parametrize(
    ("api", "deployed", "expected"),
    [
        (grpc("open"), [grpc("vault")], "/greet.Greeter is the endpoint of vault"),
        (grpc("open"), [grpc("vault"), splitter("both", "vault", "open")], ""),  # the splitter's owner allows it
        (splitter("open", "vault"), [grpc("vault")], "/greet.Greeter is the endpoint of vault"),
        (splitter("open", "vault"), [grpc("vault"), splitter("open", "vault")], ""),  # other shares
    ],
)
def test_a_grpc_service_belongs_to_its_api_and_to_the_apis_of_its_splitter(
    api: Api, deployed: list[Api], expected: str
) -> None:
    assert describe_foreign_path(api, deployed) == expected
