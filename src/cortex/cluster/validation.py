"""What nodes tell of their replicas, as far as it is to be believed: plans and routes of all are made of it. Pure."""

from __future__ import annotations

from dataclasses import replace

from cortex.gateway.addresses import host_of, is_address, numeric
from cortex.replica.spec import ReplicaStatus

#: No number that a replica tells is so large.
_TOO_MANY = 2**20


def is_sound(status: ReplicaStatus) -> bool:
    """Tell whether plans and routes, which are those of all nodes, can be made of it."""
    numbers, texts = [status.slots], [status.lack]
    for process in status.processes:
        numbers += [process.index, process.lent, process.restarts, process.failed_starts]
        texts += [process.socket, process.near]
        texts += [each.message for each in (process.death, process.failure) if each is not None]
    return (
        all(type(number) is int and 0 <= number < _TOO_MANY for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and isinstance(status.started_at, float | int)
        and [process.index for process in status.processes] == list(range(len(status.processes)))
    )


def on_node(status: ReplicaStatus, host: str) -> ReplicaStatus:
    """Return the status of a replica of a node, without what is no address there: gateways would connect to it."""
    own = numeric(host)

    def is_own(address: str) -> bool:
        return is_address(address) and own in (host_of(address), None)

    processes = (each if is_own(each.socket) else replace(each, socket="", near="") for each in status.processes)
    return replace(status, processes=tuple(processes), node=host)
