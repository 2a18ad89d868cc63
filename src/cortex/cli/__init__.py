"""The command line: arguments in, client calls, text or JSON out."""
