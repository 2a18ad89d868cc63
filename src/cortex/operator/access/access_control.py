"""Who may use the operator and the APIs: API keys, operator tokens, and the audit log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cortex.operator.access.audit import AuditLog
from cortex.operator.access.keys import ActiveKeys, Keys
from cortex.operator.access.tokens import Tokens
from cortex.operator.context import OperatorContext
from cortex.state.queries.audit import AuditStore
from cortex.state.queries.tokens import TokenStore


class AccessControl:
    """The access subsystem. It has no loop."""

    def __init__(
        self, context: OperatorContext, active_keys: ActiveKeys, publish: Callable[[], Awaitable[None]]
    ) -> None:
        """Create it; `publish` applies the active keys in the gateway."""
        self.keys = Keys(active_keys, publish)
        self.tokens = Tokens(TokenStore(context.database), context.token)
        self.audit_log = AuditLog(AuditStore(context.database), context.logger)
