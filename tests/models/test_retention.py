from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cortex.models.content_store import StoredContent, choose_victim, unneeded

held_contents = st.lists(
    st.builds(
        StoredContent,
        st.sampled_from("abcdefgh"),
        st.frozensets(st.sampled_from(["iris", "mnist"])),
        st.floats(0, 10),
    ),
    unique_by=lambda item: item.digest,
)
digests = st.frozensets(st.sampled_from("abcdefgh"))


@given(held_contents, digests)
def test_the_one_asked_for_longest_ago_goes_unless_it_is_kept(held: list[StoredContent], kept: frozenset[str]) -> None:
    victim = choose_victim(held, "iris", kept)
    free = [item for item in held if "iris" in item.apis and item.digest not in kept]
    if victim is None:
        assert not free
    else:
        assert victim in free
        assert victim.used_at == min(item.used_at for item in free)


@given(held_contents, digests, digests, digests)
def test_what_a_catalogue_has_or_somebody_keeps_is_needed(
    held: list[StoredContent], one: frozenset[str], other: frozenset[str], kept: frozenset[str]
) -> None:
    assert unneeded(held, [one, other], kept) == {item.digest for item in held} - one - other - kept
