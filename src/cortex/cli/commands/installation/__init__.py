"""Commands about the installation: its operator, access to it, and environments."""
