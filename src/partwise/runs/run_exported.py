"""Run the model in this folder, which `partwise export` wrote, with jax, numpy and safetensors alone.

python run.py --item 5 --item 17    an option for each column; a list is JSON: --words '["good", "day"]'
python run.py unseen.csv            a table with these columns
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import jax.export
import numpy as np
from safetensors.numpy import load_file

here = Path(__file__).parent
about, ids = (json.loads((here / name).read_text()) for name in ("model.json", "ids.json"))
keys = {name: {str(each): key for key, each in enumerate(listed)} for name, listed in ids["ids"].items()}
inputs, size = about["inputs"], about["rows"]["model.stablehlo"]


def read(name, text):
    """One value as the model reads it: ids as keys, lists filled up with -1. An unknown id raises KeyError."""
    shape, value = inputs[name]["shape"], json.loads(text) if inputs[name]["shape"] else text
    if name in keys:
        found = [-1 if each is None else keys[name][str(each)] for each in (value if shape else [value])]
        value = (found + [-1] * (shape[0] - len(found)))[-shape[0] :] if shape else found[0]
    return np.array(value, inputs[name]["type"]).reshape(shape)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("table", nargs="?", help="a CSV file")
for name in inputs:
    parser.add_argument(f"--{name}", dest=f"--{name}", action="append", default=[])
options = vars(parser.parse_args())
texts = {name: options[f"--{name}"] for name in inputs}
if options["table"]:
    with open(options["table"], newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    for each in inputs.values():
        if rows and each["column"] not in rows[0]:
            parser.error(f"{options['table']} has no column '{each['column']}'")
    texts = {name: [row[each["column"]] for row in rows] for name, each in inputs.items()}
if len({len(column) for column in texts.values()}) > 1 or not all(texts.values()):
    parser.error(f"give a CSV file, or as many values of each of these columns: {', '.join(inputs)}")
asked = []
for number, row in enumerate(zip(*texts.values(), strict=True), 1):
    try:
        asked.append((number, row, {name: read(name, text) for name, text in zip(texts, row, strict=True)}))
    except KeyError as unknown:
        print(f"row {number} is left out: the model does not know {unknown}", file=sys.stderr)
params = load_file(here / "model.safetensors")
program = jax.export.deserialize(bytearray((here / "model.stablehlo").read_bytes()))
any_cores = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}  # as partwise compiles
predict = jax.jit(program.call, compiler_options=any_cores)
size = size or 1 << max(len(asked) - 1, 0).bit_length()
for first in range(0, len(asked), size):
    batch = asked[first : first + size]
    stacked = {name: np.stack([values[name] for _, _, values in batch]) for name in inputs}
    filled = {name: np.resize(column, (size, *column.shape[1:])) for name, column in stacked.items()}
    for (number, row, _), output in zip(batch, np.asarray(predict(params, filled)), strict=False):
        print(json.dumps({"row": number, **dict(zip(texts, row, strict=True)), "output": output.tolist()}))
