"""What the process takes, and that freed memory goes back; in processes of their own, as each has one allocator."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from cortex.models import memory_budget


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_resident_memory_grows_and_shrinks_with_what_is_allocated() -> None:
    before = memory_budget.resident_bytes()
    block = bytearray(b"x") * 50_000_000
    grown = memory_budget.resident_bytes() - before
    del block
    assert 45_000_000 < grown < 60_000_000
    assert memory_budget.resident_bytes() - before < 10_000_000
    assert memory_budget.peak_bytes() >= before + grown - 1_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_freed_small_blocks_between_living_ones_go_back() -> None:
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


def test_big_blocks_between_living_ones_go_back_even_where_glibc_puts_them_on_the_heap() -> None:
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


def test_models_of_many_small_objects_go_back_though_names_in_them_were_looked_up() -> None:
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


def test_give_back_finds_cycles_made_before_the_freeze_if_told_so() -> None:
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


def test_give_back_does_not_freeze_what_was_not() -> None:
    out = run("""
        import gc
        from cortex.models import memory_budget
        memory_budget.collect_and_trim(is_frozen=True)
        print(gc.get_freeze_count())
    """)
    assert out == "0"
