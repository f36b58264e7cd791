// Slices as files that anybody can serve: one whole file, or pages of rows. A manifest then names the file of shared
// leaves, the order of keys, and an index of pages. A file's name begins with the digest of its bytes, so a cache or a
// mirror need not be trusted. docs/protocol.md has the format.

import { checkedKey, Fault, hex, parsed, readSlices, readTensors, shapesOf, weightsOf } from "./learn.js";

const DIGITS = 32; // of a digest, in a name
const RAW = DIGITS / 2; // its bytes, in an index
const BLOCK_PAGES = 512; // in a file of the index
const LARGEST_HEADER = 1 << 20;
const TRIES = 3; // of a file that does not fit its name
const LARGEST_MANIFEST = 1 << 22;

/**
 * The weights with the rows of these keys, from the file that a task names. `get(name, most, again)` fetches a file of
 * at most so many bytes, past all caches if it is asked `again`.
 */
export async function slicesFromFiles(plan, about, name, keys, get) {
  const kept = await caches.open("files");
  const used = new Set();
  const file = (each, most) => (used.add(each), checkedFile(kept, each, most, get));
  const weights = await (name.endsWith(".json") ? fromPages : fromWhole)(plan, about, name, keys, file);
  for (const { url } of await kept.keys())
    if (!used.has(url.split("/").pop())) await kept.delete(url); // of older versions
  return weights;
}

/** A file from what is kept, or fetched; it must fit its name. */
async function checkedFile(kept, name, most, get) {
  if (!/^[0-9a-f]{32}\.(safetensors|json|index)$/.test(name)) throw new Fault(`'${name}' is no name of a file`);
  const fits = async (bytes) => hex(await crypto.subtle.digest("SHA-256", bytes)).startsWith(name.slice(0, DIGITS));
  const found = await kept.match(`/files/${name}`);
  const before = found && new Uint8Array(await found.arrayBuffer());
  if (before && (await fits(before))) return before;
  for (let tries = 0; tries < TRIES; tries++) {
    const bytes = await get(name, most, tries > 0);
    if (!(await fits(bytes))) continue;
    await kept.put(`/files/${name}`, new Response(bytes));
    return bytes;
  }
  throw new Fault(`the file ${name} is damaged: its digest is not its name`);
}

async function fromWhole(plan, about, name, keys, file) {
  const bytes = await file(name, room(shapesOf(plan, plan.numItems, ":rows")));
  const all = readSlices(plan, { ...about, task: "" }, plan.numItems, bytes);
  return { ...all, items: keys.map((key) => all.items[key]), itemBias: Float64Array.from(keys, (key) => all.itemBias[key]) };
}

async function fromPages(plan, about, name, keys, file) {
  const manifest = checkedManifest(plan, about, await file(name, LARGEST_MANIFEST));
  const { page_rows: pageRows, order, index } = manifest.spaces.item;
  const places = await placesOf(plan, order, file);
  const at = keys.map((key) => places[key]);
  const numbers = [...new Set(at.map((place) => Math.floor(place / pageRows)))];
  const names = await pageNames(plan, pageRows, index, numbers, file);
  const read = async (number, i) => {
    const wanted = rowShapes(plan, Math.min(pageRows, plan.numItems - number * pageRows));
    return [number, readTensors(await file(names[i], room(wanted)), wanted).arrays];
  };
  const pages = new Map(await Promise.all(numbers.map(read)));
  const wanted = sharedShapes(plan);
  const { arrays } = readTensors(await file(manifest.shared, room(wanted)), wanted);
  for (const [array, shape] of Object.entries(rowShapes(plan, keys.length))) {
    const width = shape[1] ?? 1;
    arrays[array] = new Float32Array(keys.length * width);
    at.forEach((place, i) => {
      const first = (place % pageRows) * width;
      arrays[array].set(pages.get(Math.floor(place / pageRows))[array].subarray(first, first + width), i * width);
    });
  }
  return { ...weightsOf(plan, arrays, keys.length), version: manifest.version, rng: checkedKey(manifest.rng) };
}

/** What a manifest says, if it is of this version and fits the model. */
function checkedManifest(plan, about, bytes) {
  const manifest = parsed(bytes, "the manifest");
  const { run, version, model } = about;
  for (const [name, value] of Object.entries({ format: 1, kind: "manifest", run, version, model }))
    if (manifest[name] !== value) throw new Fault(`the manifest's ${name} is ${manifest[name]}, and must be ${value}`);
  const { num_keys: count, page_rows: rows, index } = manifest.spaces?.item ?? {};
  const blocks = Math.ceil(Math.ceil(plan.numItems / rows) / BLOCK_PAGES);
  if (count !== plan.numItems || !(Number.isInteger(rows) && rows > 0) || index?.length !== blocks)
    throw new Fault(`the manifest says ${JSON.stringify({ count, rows })}, and the model has ${plan.numItems} items`);
  return manifest;
}

/** The place of every key in the order of the pages. */
async function placesOf(plan, name, file) {
  const wanted = { order: [plan.numItems] };
  const { order } = readTensors(await file(name, room(wanted)), wanted, "I32").arrays;
  const places = new Array(plan.numItems);
  order.forEach((key, place) => (places[key] = place));
  if (places.length !== plan.numItems || places.includes(undefined)) throw new Fault("the order has not every key once");
  return places;
}

/** The names of these pages. Only the blocks of the index that list them are read. */
async function pageNames(plan, pageRows, index, numbers, file) {
  const total = Math.ceil(plan.numItems / pageRows);
  const blocks = new Map();
  for (const block of new Set(numbers.map((number) => Math.floor(number / BLOCK_PAGES)))) {
    const size = RAW * Math.min(BLOCK_PAGES, total - block * BLOCK_PAGES);
    blocks.set(block, await file(index[block], size));
    if (blocks.get(block).length !== size) throw new Fault(`a block of the index has not ${size} bytes`);
  }
  return numbers.map((number) => {
    const first = RAW * (number % BLOCK_PAGES);
    const digest = blocks.get(Math.floor(number / BLOCK_PAGES)).subarray(first, first + RAW);
    return `${hex(digest)}.safetensors`;
  });
}

function rowShapes(plan, count) {
  return Object.fromEntries(Object.entries(shapesOf(plan, count, ":rows")).filter(([name]) => name.endsWith(":rows")));
}

function sharedShapes(plan) {
  return Object.fromEntries(Object.entries(shapesOf(plan, 0, ":rows")).filter(([name]) => !name.endsWith(":rows")));
}

function room(shapes) {
  return LARGEST_HEADER + Object.values(shapes).reduce((sum, shape) => sum + 4 * shape.reduce((a, b) => a * b, 1), 0);
}
