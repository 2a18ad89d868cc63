"""Rules between fields, between APIs, and between a configuration and the files of its project."""
