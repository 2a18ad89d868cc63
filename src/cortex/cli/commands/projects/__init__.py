"""Commands that begin with a project folder or a model."""
