"""A process that competes for the leadership: `python leading.py URL NAME [VALID_S]`. Prints events as JSON lines.

While it leads, it writes one key per line of stdin to the database.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from dataclasses import replace

from cortex.errors import CortexError
from cortex.operator.leader_election import ElectionTiming, Leadership
from cortex.state.database import open_state
from cortex.state.queries.key_values import KeyValueStore
from cortex.state.queries.leader_election import LeaderRecord
from cortex.telemetry import Logger, configure

#: Short, but not so short that a loaded machine loses the leadership.
FAST = ElectionTiming(retry_s=0.1, check_s=0.2, answer_s=2.5, valid_s=4.0, session_s=5.0)


def tell(what: str, **more: object) -> None:
    os.write(1, (json.dumps({"what": what} | more) + "\n").encode())


def write_when_asked(url: str, name: str, epoch: int) -> None:
    store = KeyValueStore(open_state(url, epoch))
    tell("ready")
    for line in sys.stdin:
        try:
            store.put_if_absent(line.strip(), name)
            tell("written")
        except CortexError as error:
            tell("refused", error=str(error))


async def main() -> None:
    configure(None)
    url, name, *valid_s = sys.argv[1:]
    timing = replace(FAST, valid_s=float(valid_s[0]), session_s=float(valid_s[0]) + 1) if valid_s else FAST
    me = LeaderRecord("host", os.getpid(), f"http://{name}", "http://gateway", time.time())
    leadership = Leadership(url, me, Logger("test"), timing)
    epoch = await leadership.acquire(is_patient=True)
    tell("leads", epoch=epoch)
    threading.Thread(target=write_when_asked, args=(url, name, epoch), daemon=True).start()
    await leadership.wait_until_lost()
    tell("lost")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
