from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from cortex.state.database import Where, open_state
from cortex.state.queries.key_values import KeyValueStore


def test_a_value_is_set_once_by_the_first_caller(where: Where) -> None:
    engines = [open_state(where) for _ in range(4)]
    stores = [KeyValueStore(engine) for engine in engines]
    assert stores[0].get("secret") is None
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda pair: pair[1].put_if_absent("secret", str(pair[0])), enumerate(stores)))
    assert len(set(told)) == 1
    assert {store.get("secret") for store in stores} == set(told)
    assert stores[0].put_if_absent("other", "x") == "x"
    for engine in engines:
        engine.dispose()
