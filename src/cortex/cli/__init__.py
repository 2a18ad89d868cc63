"""Command line: parses arguments, calls the client, and prints text or JSON."""
