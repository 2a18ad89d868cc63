"""One module per command, loaded when it is called: `configure(parser)` says what it takes, `run` does it."""
