"""Models as pure functions, and the roles of their parameters."""
