"""What an operator keeps in its home before it serves."""

from __future__ import annotations

from cortex.control.opening import read_token
from cortex.home import Home


def test_token_is_made_once_is_private_and_can_be_an_argument_of_a_command(home: Home) -> None:
    home.create()
    token = read_token(home)
    assert token.isalnum() and len(token) >= 32
    assert home.token_file.stat().st_mode & 0o777 == 0o600
    assert read_token(home) == token
    home.token_file.write_text("")  # as one that was killed before it wrote leaves it
    assert read_token(home).isalnum()
