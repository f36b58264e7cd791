"""Text from a user into the objects that run."""
