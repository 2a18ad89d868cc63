"""States of the preparation of revisions: stage, last failure, backoff. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cortex.worker.spec import StartFailure


class Stage(StrEnum):
    """Progress of preparing a revision: building its environment and fetching its model."""

    NEEDED = "needed"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True)
class Preparation:
    """Preparation of a revision, which must be done before its replicas can start."""

    stage: Stage = Stage.NEEDED
    failure: StartFailure | None = None  #: of the last attempt; kept while the next one runs
    hold_until: float = 0.0  #: UNIX time before which nothing is prepared or started
    failures: int = 0  #: in a row
    shortage: str = ""  #: devices that the next replica lacks


#: A revision: name of the API, id of the revision.
RevisionKey = tuple[str, str]
PreparationStates = Mapping[RevisionKey, Preparation]
