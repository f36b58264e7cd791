"""Last.fm of HetRec 2011: `user_artists.dat`, lines of userID, artistID and a listening count, with tabs between.

Columns: `item` (key, the artist), `count`. A client is a user. There are no times: rows are in the file's order.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from partwise.data.loaders.locate import data_root, first_of
from partwise.data.loaders.packed import open_packed
from partwise.data.reading import reading
from partwise.data.store import ClientStore, group_rows
from partwise.types import UserError

FOLDER = "lastfm-hetrec"
FILES = ("user_artists.dat", "user_artists.dat.gz", "hetrec2011-lastfm-2k.zip")
FIELDS = ("userID", "artistID", "weight")
HOW = f"give {FILES[0]} (plain, .gz, or in {FILES[2]}), or the folder that holds it"


def load(path: str | Path | None = None) -> ClientStore:
    """Read the file. Without a path, the environment variable PARTWISE_DATA says where to look."""
    root = data_root(path, "Last.fm", HOW, HOW)
    source = first_of(root, [*FILES, *(f"{FOLDER}/{name}" for name in FILES)], "Last.fm", f"; {HOW}")
    choose = lambda names: next((each for each in names if each.split("/")[-1] == FILES[0]), None)
    with reading(source), open_packed(source, choose, FILES[0]) as stream:
        text = stream.read()
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(text),
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t"),
            convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(FIELDS, pa.int64())),
        )
    except pa.ArrowInvalid as error:
        raise UserError(f"{source}: {error}; expected lines of {', '.join(FIELDS)}. {HOW}") from error
    missing = [name for name in FIELDS if name not in table.column_names]
    if missing:
        raise UserError(
            f"{source} has the columns {', '.join(table.column_names)}, and {', '.join(missing)} is missing. {HOW}"
        )
    user, item, count = (table[name].to_numpy() for name in FIELDS)
    info = {"source": "Last.fm HetRec 2011", "file": str(source)}
    return group_rows(user, {"item": item, "count": count}, ("item",), info)
