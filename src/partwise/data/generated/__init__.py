"""Data drawn from a known truth, at any size."""
