"""Check-ins at places: Foursquare's New York as STAN's authors cut it (a Parquet or CSV file with the columns
`user`, `poi`, `minute`), or the original text file of Yang et al. (2014), `dataset_TSMC2014_NYC.txt`.

Columns: `item` (key, the place), `time`. A client is a user; its rows are in the order of time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from partwise.data.loaders.locate import data_root, first_of
from partwise.data.reading import reading
from partwise.data.store import ClientStore, group_rows
from partwise.data.table import read_table
from partwise.types import UserError

FOLDER = "foursquare-nyc"
FILES = ("foursquare_nyc_stan.parquet", "dataset_TSMC2014_NYC.txt")
FIELDS = ("user", "venue", "category_id", "category", "latitude", "longitude", "offset", "time")
HOW = f"give {FILES[0]} (columns user, poi, minute) or {FILES[1]}, or the folder that holds it"
UTC = "%a %b %d %H:%M:%S +0000 %Y"


def load(path: str | Path | None = None) -> ClientStore:
    """Read either format. Without a path, the environment variable PARTWISE_DATA says where to look."""
    root = data_root(path, "check-ins", HOW, HOW)
    source = first_of(root, [*FILES, *(f"{FOLDER}/{name}" for name in FILES)], "check-ins", f"; {HOW}")
    if source.suffix == ".txt":
        return _original(source).reorder(by="time")
    store = read_table(source, client="user", columns=["poi", "minute"], ids=["poi"])
    return store.rename({"poi": "item", "minute": "time"}).reorder(by="time")


def _original(source: Path) -> ClientStore:
    with reading(source):
        try:
            table = pyarrow.csv.read_csv(
                source,
                read_options=pyarrow.csv.ReadOptions(column_names=list(FIELDS), encoding="latin-1"),
                parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
                convert_options=pyarrow.csv.ConvertOptions(
                    include_columns=["user", "venue", "time"],
                    column_types={"user": pa.int64(), "venue": pa.string(), "time": pa.string()},
                ),
            )
            times = pc.strptime(table["time"], format=UTC, unit="s").cast(pa.int64())  # pyright: ignore
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{source}: {error}; expected lines of {', '.join(FIELDS)} with tabs between them, and times "
                f"such as 'Tue Apr 03 18:00:09 +0000 2012'. {HOW}"
            ) from error
    columns = {"item": np.array(table["venue"].to_pylist()), "time": times.to_numpy()}
    return group_rows(
        table["user"].to_numpy(), columns, ("item",), {"source": "check-ins", "file": str(source)}
    )
