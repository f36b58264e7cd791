"""From text to columns of ids: tags, sentiment, next words."""
