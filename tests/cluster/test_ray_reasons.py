"""Short reasons for users from Ray's long messages about dead actors."""

from __future__ import annotations

import pytest

from cortex import __version__
from cortex.cluster.ray_bridge import _reason

pytestmark = pytest.mark.ray

NOT_INSTALLED = """The actor died because of an error raised in its creation task, \
\033[36mray::Reservation.__init__()\033[39m (pid=662, ip=10.77.6.6, actor_id=fa90f0a7, \
repr=<cortex.cluster.ray_bridge.TemporaryActor object at 0x7f4e5adb7390>)
RuntimeError: The actor with name Reservation failed to import on the worker. This may be because needed library \
dependencies are not installed in the worker environment:

ModuleNotFoundError: No module named 'cortex.cluster'
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            NOT_INSTALLED,
            "node 10.77.6.6: cortex is not installed in the Python of Ray there; "
            f"install {__version__}, as the operator's",
        ),
        (
            "The actor died unexpectedly before finishing this task.\nThe actor is dead because its node has died. "
            "Node Id: 1f. It may have been evicted.",
            "The actor is dead because its node has died",
        ),
        (
            "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.11.7",
            "RuntimeError: Version mismatch: The cluster was started with: Ray: 2.59.0 Python: 3.11.7",
        ),
        ("It can't be.\nFor that there are reasons.", "RuntimeError: It can't be."),
    ],
)
def test_a_reason_is_one_line_with_cause_and_node(text: str, reason: str) -> None:
    assert _reason(RuntimeError(text)) == reason
