"""Size estimates, and the measured memory of processes (each in its own, as it configures the allocator)."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.models.memory_budget import SizeEstimator

pytestmark = pytest.mark.processes

MIB = 1024 * 1024
SIZES = st.integers(0, 10_000 * MIB)
GROWN = st.integers(-10_000 * MIB, 10_000 * MIB)


def test_the_first_estimate_of_the_peak_is_twice_the_files() -> None:
    expected = SizeEstimator().estimate("a", 100 * MIB)
    assert expected.peak_bytes >= 200 * MIB
    assert 100 * MIB < expected.loaded_bytes < 200 * MIB


def test_measurements_apply_to_the_same_content_and_proportionally_to_others() -> None:
    sizes = SizeEstimator()
    assert sizes.record("a", 100 * MIB, 150 * MIB, 160 * MIB) == 150 * MIB
    assert sizes.estimate("a", 100 * MIB).loaded_bytes == 150 * MIB
    assert 300 * MIB <= sizes.estimate("b", 200 * MIB).loaded_bytes < 305 * MIB
    assert sizes.estimate("b", 200 * MIB).peak_bytes >= 320 * MIB


def test_an_outlier_is_dropped_from_the_history() -> None:
    sizes = SizeEstimator()
    sizes.record("a", 20 * MIB, 150 * MIB, 150 * MIB)
    for number in range(16):
        sizes.record(f"m{number}", 20 * MIB, 20 * MIB, 21 * MIB)
    assert sizes.estimate("b", 20 * MIB).peak_bytes < 25 * MIB


def test_a_small_model_does_not_affect_estimates_of_large_ones() -> None:
    sizes = SizeEstimator()
    sizes.record("a", 1000, 5 * MIB, None)
    assert sizes.estimate("b", 100 * MIB).loaded_bytes < 150 * MIB
    assert sizes.estimate("c", 1000).loaded_bytes >= 5 * MIB


@given(st.lists(st.tuples(SIZES, GROWN, st.none() | GROWN), max_size=30), SIZES)
def test_estimates_are_between_half_and_eight_times_the_files(
    measured: list[tuple[int, int, int | None]], files_bytes: int
) -> None:
    sizes = SizeEstimator()
    for number, (size_bytes, grown_bytes, peak_bytes) in enumerate(measured):
        kept = sizes.record(f"m{number}", size_bytes, grown_bytes, peak_bytes)
        assert kept >= size_bytes / 2
    expected = sizes.estimate("new", files_bytes)
    assert files_bytes / 2 <= expected.loaded_bytes <= expected.peak_bytes <= 8 * files_bytes + 33 * MIB


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=280)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_resident_memory_grows_and_shrinks_with_what_is_allocated() -> None:
    # In a process of its own: the heap of this one may have room for the block, freed by earlier tests.
    out = run("""
        from cortex.models import memory_budget
        before = memory_budget.resident_bytes()
        block = bytearray(b"x") * 50_000_000
        grown = memory_budget.resident_bytes() - before
        del block
        print(grown, memory_budget.resident_bytes() - before, memory_budget.peak_bytes() - before)
    """)
    grown, left, peak = map(int, out.split())
    assert 45_000_000 < grown < 60_000_000
    assert left < 10_000_000
    assert peak >= grown - 1_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_freed_small_blocks_between_live_ones_are_returned() -> None:
    out = run("""
        from cortex.models import memory_budget
        memory_budget.configure_allocator()
        before = memory_budget.resident_bytes()
        blocks = [bytearray(50_000) for _ in range(2000)]
        blocks[:] = blocks[::50]  # those that stay keep the heap from shrinking at its end
        memory_budget.collect_and_trim()
        print(memory_budget.resident_bytes() - before)
    """)
    assert int(out) < 15_000_000


def test_freed_big_blocks_between_live_ones_are_returned_even_from_the_heap() -> None:
    out = run("""
        from cortex.models import memory_budget
        memory_budget.configure_allocator()
        bytearray(30_000_000)  # glibc takes it as a reason to keep blocks of that size on the heap
        before = memory_budget.resident_bytes()
        blocks = [bytearray(b"x") * 20_000_000 for _ in range(5)]
        last = bytearray(10_000)
        del blocks[:4]
        memory_budget.trim_heap()
        print(memory_budget.resident_bytes() - before)
    """)
    assert 18_000_000 < int(out) < 25_000_000


def test_the_type_cache_does_not_keep_memory_of_unpickled_models() -> None:
    out = run("""
        import pickle
        from types import SimpleNamespace
        from cortex.models import memory_budget
        class Point:
            pass
        def pickled():
            words = {f"word {n}": [n, str(n)] for n in range(10_000)}
            return pickle.dumps([words, Point, SimpleNamespace, memory_budget.trim_heap])
        data = pickled()
        memory_budget.collect_and_trim()
        before = memory_budget.resident_bytes()
        models = [pickle.loads(data) for _ in range(40)]
        grown = memory_budget.resident_bytes() - before
        models.clear()
        memory_budget.collect_and_trim()
        print(grown, memory_budget.resident_bytes() - before)
    """)
    grown, left = map(int, out.split())
    assert grown > 40_000_000
    assert left < 0.15 * grown


def test_collect_and_trim_collects_frozen_cycles_if_requested() -> None:
    out = run("""
        import gc, weakref
        from cortex.models import memory_budget
        class Model: pass
        def make():
            model = Model()
            model.me = model
            return model
        model = make()
        gc.collect()
        gc.freeze()
        gone = weakref.ref(model)
        del model
        memory_budget.collect_and_trim()
        before = gone() is not None
        memory_budget.collect_and_trim(is_frozen=True)
        print(before, gone() is None, gc.get_freeze_count() > 0)
    """)
    assert out == "True True True"


def test_collect_and_trim_does_not_freeze_unfrozen_objects() -> None:
    out = run("""
        import gc
        from cortex.models import memory_budget
        memory_budget.collect_and_trim(is_frozen=True)
        print(gc.get_freeze_count())
    """)
    assert out == "0"
