"""How the operator and the nodes of one cluster get at each other. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.cluster.transport import derived


@dataclass(frozen=True)
class Access:
    """What one operator is to nodes."""

    secret: str  #: of the cluster
    host: str  #: of the operator, as nodes reach it
    port: int  #: on which it takes what workers on nodes send; 0: any that is free
    epoch: int = 1  #: of several operators, nodes obey the one with the highest

    @property
    def gateway_secret(self) -> str:
        """What gateways show to replicas."""
        return derived(self.secret, "gateway")
