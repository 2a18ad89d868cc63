"""One module per command, imported when it runs.

`configure(parser)` adds its arguments, `run(arguments, session)` executes it.
"""
