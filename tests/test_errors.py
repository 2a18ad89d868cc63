from __future__ import annotations

import errno

import pytest

from cortex.errors import StorageError, format_size, is_disk_full, type_name, with_article


@pytest.mark.parametrize("noun", ["a BatchAPI", "an AsyncAPI", "a list", "an int", "an OrderedDict"])
def test_a_noun_has_the_article_of_its_first_letter(noun: str) -> None:
    assert with_article(noun.split()[1]) == noun


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (100 * 1024**2, "100 MiB"),
        (300 * 1024**2 + 7, "300 MiB"),
        (1024**2 - 1, "1 MiB"),
        (1023 * 1024**2, "1023 MiB"),
        (10**9, "954 MiB"),
        (int(1.5 * 1024**3), "1.5 GiB"),
        (33_312_456_704, "31 GiB"),
        (5000 * 1024**3, "4.88 TiB"),
        (2**60, "1 EiB"),
        (2**80, "1048576 EiB"),
    ],
)
def test_a_size_has_a_readable_unit(size_bytes: int, shown: str) -> None:
    assert format_size(size_bytes) == shown


def test_the_name_of_a_type_is_bounded() -> None:
    assert type_name(ValueError()) == "ValueError"
    assert type_name(type("E" * 200_000, (Exception,), {})()) == "E" * 99 + "…"


def test_a_full_disk_is_found_among_the_causes_of_an_error_also_if_they_are_cyclic() -> None:
    first, second, full = StorageError("first"), ValueError("second"), OSError(errno.ENOSPC, "full")
    first.__cause__, second.__cause__ = second, first
    assert not is_disk_full(first) and not is_disk_full(None)
    second.__context__ = ExceptionGroup("several", [KeyError(1), full])
    assert is_disk_full(first)
