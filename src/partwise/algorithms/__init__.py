"""One published algorithm per file."""
