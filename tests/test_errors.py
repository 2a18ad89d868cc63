from __future__ import annotations

import pytest

from cortex.errors import with_article


@pytest.mark.parametrize("noun", ["a BatchAPI", "an AsyncAPI", "a list", "an int", "an OrderedDict"])
def test_a_noun_has_the_article_of_its_first_letter(noun: str) -> None:
    assert with_article(noun.split()[1]) == noun
