"""Federated data: many clients' examples as flat columns, in memory or memory-mapped."""

from partwise.data.build import build_store, write_store
from partwise.data.generated.planted_ratings import PlantedRatings, open_planted, planted_ratings
from partwise.data.generated.planted_tags import generate_tags
from partwise.data.generated.rating_law import Truth, oracle
from partwise.data.generated.writers import generate_writers
from partwise.data.holdout import by_client, by_example, by_order, by_value
from partwise.data.rows import read_rows
from partwise.data.store import ClientStore, open_store
from partwise.data.table import read_table

__all__ = [
    "ClientStore",
    "PlantedRatings",
    "Truth",
    "build_store",
    "by_client",
    "by_example",
    "by_order",
    "by_value",
    "generate_tags",
    "generate_writers",
    "open_planted",
    "open_store",
    "oracle",
    "planted_ratings",
    "read_rows",
    "read_table",
    "write_store",
]
