"""Parts that several tests share: servers, installations, clusters, and waiting for conditions."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
HARNESS = TESTS / "harness"
