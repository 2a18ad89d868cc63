"""Which model goes to make room, and when to wait instead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.models.loaded_models import CallHandle, LoadedModel, LoadedModels, choose_eviction
from cortex.models.spec import Version

HERE, ELSEWHERE = "here", "elsewhere"


def holder(place: object = ELSEWHERE, waiting: int = 0) -> CallHandle:
    made = CallHandle()
    made.context, made.waiting = place, waiting
    return made


def entry(name: str, *holders: CallHandle) -> LoadedModel[object]:
    return LoadedModel(name, Version("1", name, 1, 0.0), name, handles=set(holders))


def test_the_least_recently_used_without_holders_goes_first() -> None:
    entries = [entry("a", holder()), entry("b"), entry("c")]
    assert choose_eviction(entries, None, HERE) == (entries[1], False)


def test_what_only_the_asking_call_holds_goes_next() -> None:
    me = holder(HERE, waiting=1)
    entries = [entry("a", holder()), entry("b", me, holder()), entry("c", me)]
    assert choose_eviction(entries, me, HERE) == (entries[2], False)


def test_what_a_running_call_holds_is_waited_for() -> None:
    assert choose_eviction([entry("a", holder()), entry("b", holder(waiting=1))], None, HERE) == (None, True)


def test_where_all_wait_for_each_other_one_goes() -> None:
    entries = [entry("a", holder(waiting=1)), entry("b", holder(HERE))]
    assert choose_eviction(entries, None, HERE) == (entries[0], False)


def test_what_is_spared_goes_last() -> None:
    spared, other = entry("a"), entry("b")
    assert choose_eviction([spared, other], None, HERE, spared) == (other, False)
    assert choose_eviction([spared], None, HERE, spared) == (spared, False)
    assert choose_eviction([spared, entry("c", holder())], None, HERE, spared) == (None, True)


def test_with_nothing_loaded_there_is_nothing_to_wait_for() -> None:
    assert choose_eviction([], None, HERE) == (None, False)


@given(st.lists(st.lists(st.tuples(st.sampled_from([HERE, ELSEWHERE]), st.integers(0, 1)), max_size=3), max_size=6))
def test_what_running_calls_hold_never_goes(held: list[list[tuple[str, int]]]) -> None:
    entries = [entry(str(number), *(holder(*each) for each in holders)) for number, holders in enumerate(held)]
    victim, may_wait = choose_eviction(entries, None, HERE)
    if victim is not None:
        assert all(each.waiting or each.context == HERE for each in victim.handles)
        assert not may_wait
    else:
        assert may_wait == bool(entries)


def test_a_holder_that_ended_before_it_was_entered_holds_nothing() -> None:
    shelf: LoadedModels[object] = LoadedModels()
    loaded, ended = entry("a"), holder()
    ended.has_ended = True
    with shelf.changed:
        shelf.put(loaded)
        shelf.find(loaded.key, ended)
    assert not loaded.handles


def test_a_replaced_entry_leaves_and_stays_kept_until_released() -> None:
    shelf: LoadedModels[object] = LoadedModels()
    old, new, user = entry("a"), entry("a"), holder()
    with shelf.changed:
        shelf.put(old)
        shelf.find(old.key, user)
        shelf.put(new)
        assert shelf.find(new.key, None) is new
    assert shelf.retired == [old]
    assert old.handles == {user}
    shelf.release(user)
    assert not old.handles


def test_an_abandoned_holder_is_let_go_of_by_a_sweep() -> None:
    shelf: LoadedModels[object] = LoadedModels()
    loaded, user = entry("a"), holder()
    with shelf.changed:
        shelf.put(loaded)
        shelf.find(loaded.key, user)
        shelf.release_later(user)
        assert loaded.handles
        shelf.release_abandoned()
    assert not loaded.handles
