"""Everything that runs on one client."""
