"""What is done about replicas that wait for a place, and about those whose place is reserved no more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from cortex.cluster.node_client import SILENCE_S
from cortex.cluster.placement import NodeAddress, Placement, Placer
from cortex.cluster.remote import Remote
from cortex.cluster.unschedulable import lack, seems_free

#: A replica may run so long without its reservation, which is asked for again on its node.
UNRESERVED_S = 30.0
#: So long it may take to place what fits, and what seems not to: there are others who begin and end.
STARTING_S = 60.0
LACKING_AFTER_S = 3.0
#: A replica is placed anew if its node has not answered the operator for so long since it was placed there.
UNREACHABLE_S = 30.0


def lack_of(remote: Remote, placement: Placement, placer: Placer) -> str:
    """Say what a replica that is not placed waits for; empty while that is as usual."""
    there = placer.resources()
    if there is None:
        return placer.reason
    patience_s = STARTING_S if seems_free(remote.wanted, there) else LACKING_AFTER_S
    return lack(remote.wanted, there) if time.monotonic() - placement.since > patience_s else ""


def newest_addresses(placements: Iterable[Placement]) -> list[NodeAddress]:
    """Return the nodes on which something is placed; of each that was told last: agents may change ports."""
    placed = [placement for placement in placements if placement.state == "placed"]
    return list({p.node.host: p.node for p in sorted(placed, key=lambda p: p.since) if p.node is not None}.values())


def unreached(remote: Remote, placement: Placement | None) -> tuple[str, float]:
    """Say what is wrong with a replica whose node was never reached, empty at first; and since when."""
    assert remote.link is not None
    is_placed = placement is not None and placement.state == "placed"
    since_s = time.monotonic() - placement.since if placement is not None and is_placed else math.inf
    words = f"node {remote.link.address.host} can't be reached from the operator's machine: {remote.link.problem}"
    return words if since_s > SILENCE_S else "", since_s


async def reserve_again(remote: Remote, placer: Placer, clock: Callable[[], float]) -> bool:
    """Ask for a lost reservation again, on the replica's own node; False once that has gone on for too long."""
    assert remote.link is not None
    assert remote.unreserved_since is not None
    name, host, there = remote.spec.id, remote.link.address.host, placer.resources()
    if there is None:
        remote.unreserved_since = clock()  # while nobody can reserve anything, nobody else takes its place
        return True
    placement = placer.placements().get(name)
    if placement is None or placement.state == "lost":
        node_id = next((node_id for node_id, node in there.nodes.items() if node.host == host), "")
        if node_id:
            await placer.place(name, remote.wanted, node_id)
    return clock() - remote.unreserved_since <= UNRESERVED_S
