"""Object stores and local files: list, read, write and download."""
