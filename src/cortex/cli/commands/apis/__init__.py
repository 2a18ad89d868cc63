"""Commands about deployed APIs and their jobs."""
