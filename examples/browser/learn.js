// What a device computes: no network, no storage, no page. Everything here is a function of its arguments.
//
// The model is matrix factorisation. A user's vector (and bias) is local, the rows of items are keyed, and the mean
// and the learned defaults of the local part are shared. Numbers are computed in 64 bits and sent in 32.

import { below, child, clientKey } from "./random.js";

/** An error that a person can read: what was found, and what to do. */
export class Fault extends Error {}

// Safetensors: 8 bytes with the length of a JSON header, the header, then the arrays one after the other.

const TYPES = { F32: Float32Array, I32: Int32Array };
const LARGEST_HEADER = 1 << 20;

/** Bytes of named arrays ({name: {shape, values}}) and of partwise's own header, which is JSON in a string. */
export function writeTensors(arrays, header = {}) {
  const told = { __metadata__: { partwise: JSON.stringify(header) } };
  let end = 0;
  for (const [name, { shape, values }] of Object.entries(arrays)) {
    const dtype = values instanceof Int32Array ? "I32" : "F32";
    told[name] = { dtype, shape, data_offsets: [end, (end += values.byteLength)] };
  }
  const text = new TextEncoder().encode(JSON.stringify(told));
  const first = 8 + Math.ceil(text.length / 8) * 8; // the header is filled up with spaces
  const bytes = new Uint8Array(first + end).fill(0x20, 8, first);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(first - 8), true);
  bytes.set(text, 8);
  for (const [name, { values }] of Object.entries(arrays))
    bytes.set(new Uint8Array(values.buffer, values.byteOffset, values.byteLength), first + told[name].data_offsets[0]);
  return bytes;
}

/** Arrays and header of such bytes. `wanted` ({name: shape}) are the arrays that must be there, and no others. */
export function readTensors(bytes, wanted, dtype = "F32") {
  const size = (shape) => 4 * shape.reduce((a, b) => a * b, 1);
  const needed = Object.values(wanted).reduce((sum, shape) => sum + size(shape), 0);
  if (bytes.length < 8 || bytes.length > 8 + LARGEST_HEADER + needed)
    throw new Fault(`a message of ${bytes.length} bytes is not what this device asked for`);
  const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
  const { __metadata__: metadata, ...told } = parsed(bytes.subarray(8, 8 + length), "the header of a message");
  const header = parsed(metadata?.partwise ?? "{}", "partwise's header of a message");
  const foreign = Object.keys(told).find((name) => !Object.hasOwn(wanted, name));
  if (foreign) throw new Fault(`the message has an array '${foreign}', and this page expects ${Object.keys(wanted)}`);
  const arrays = {};
  for (const [name, shape] of Object.entries(wanted)) {
    const [begin, end] = told[name]?.data_offsets ?? [];
    const fits = told[name]?.dtype === dtype && String(told[name].shape) === String(shape);
    if (!fits || !(begin >= 0) || end - begin !== size(shape) || 8 + length + end > bytes.length)
      throw new Fault(`'${name}' in the message must be ${dtype} [${shape}], and is ${JSON.stringify(told[name])}`);
    arrays[name] = new TYPES[dtype](bytes.slice(8 + length + begin, 8 + length + end).buffer);
  }
  return { arrays, header };
}

/** The names and values of a JSON text. */
export function parsed(text, what) {
  try {
    const found = JSON.parse(typeof text === "string" ? text : new TextDecoder().decode(text));
    if (found instanceof Object) return found;
  } catch {
    // as if it were something else
  }
  throw new Fault(`${what} is no JSON with names and values`);
}

export function hex(buffer) {
  return Array.from(new Uint8Array(buffer), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// What the run wants of a device. Settings that this page cannot follow are refused before it takes part.

const UNDERSTOOD = {
  task: ["planted", "movielens", "ratings"],
  algorithm: ["fed_recon"],
  "split.kind": ["none", "alternate", "halves"],
  "reconstruct.method": ["solve", "steps"],
  "reconstruct.optimizer": ["sgd"],
  "update.method": ["steps"],
  "update.optimizer": ["sgd"],
  "update.joint": [false],
  "update.begin": ["first", "random"],
  "update.schedule": ["constant"],
  "reconstruct.schedule": ["constant"],
  "update.precision": ["float32"],
  "update.passes": [1],
  "select.item": ["own", "all"],
  "server.weighting": ["examples", "uniform"],
  "server.mean": ["cohort", "holders"],
  "deploy.precision": ["float32"],
  "deploy.reports": ["clients"],
  "deploy.held_out": [0],
  "cohort.min_examples": [0],
  "privacy.clip": ["none"], // it does not clip its updates
  "privacy.keys": [0],
  "serving.way": ["on_demand", "broadcast", "pregenerated"],
  "data.duplicates": ["last", "mean"],
};
const NUMBERS = /^(split\.(batch_size|percent|count)|(reconstruct|update)\.(batch_size|epochs|max_steps|rate|pull))$/;
const OTHERS = /^(?!(split|reconstruct|update|select)\.)/; // only the sections that clients read are closed to new settings
const LEAVES = ["user", "item", "user_bias", "item_bias", "mean"];
const MOST_SOLVED = 512; // local numbers; beyond that the Python device takes another method

/** The offer of a run (`GET /v1/run`) as what this device does in a round. */
export function planOf(offer) {
  const { settings, leaves } = offer;
  if (offer.protocol !== 1) throw new Fault(`the server speaks protocol ${offer.protocol}, and this page knows 1`);
  for (const [key, value] of Object.entries(settings)) {
    const known = UNDERSTOOD[key] ?? (NUMBERS.test(key) || OTHERS.test(key) ? [value] : []);
    if (!known.includes(value))
      throw new Fault(
        `the run has ${key} = ${value}, and this page knows ${known.join(", ") || "no such setting"}: ` +
          `take part with a Python device`,
      );
  }
  const other = Object.keys(leaves).find((name) => !LEAVES.includes(name));
  if (other)
    throw new Fault(`the model has '${other}', and this page knows ${LEAVES.join(", ")}: take part with a Python device`);
  if (leaves.item.psi !== "take") throw new Fault(`rows are sent as ${leaves.item.psi}, and this page knows take`);
  const { dim, biases, initial, center, spread, num_items: numItems } = offer.options;
  if (!["learned", "zero"].includes(initial))
    throw new Fault(`local parameters start '${initial}' in this run, and this page knows learned and zero`);
  if (dim + 1 > MOST_SOLVED) throw new Fault(`vectors of ${dim} numbers are too long for this page (511 at most)`);
  const schedule = (part) => ({
    size: settings[`${part}.batch_size`],
    epochs: settings[`${part}.epochs`] ?? Infinity,
    most: settings[`${part}.max_steps`] ?? Infinity,
    rate: settings[`${part}.rate`],
  });
  return {
    ...{ run: offer.run, model: offer.model, files: offer.files, ids: offer.vocabularies.item.map(String), numItems },
    ...{ dim, biases, learned: initial === "learned", center, spread },
    split: { kind: settings["split.kind"], size: settings["split.batch_size"], percent: settings["split.percent"] },
    reconstruct: { solve: settings["reconstruct.method"] === "solve", ...schedule("reconstruct") },
    pull: settings["reconstruct.pull"],
    hold: settings["deploy.hold"],
    update: schedule("update"),
    anywhere: settings["update.begin"] === "random",
    duplicates: ["shuffle", "time"].includes(settings["data.order"]) ? settings["data.duplicates"] : "kept",
    all: settings["select.item"] === "all",
    uniform: settings["server.weighting"] === "uniform",
  };
}

/** A person's ratings ([{item, rating}]) as examples in the run's keys, and the sorted keys that they need. */
export function choose(plan, ratings) {
  const number = new Map(plan.ids.map((id, key) => [id, key]));
  const known = oneEach(ratings, plan.duplicates).filter(({ item }) => number.has(String(item)));
  const own = new Set(known.map(({ item }) => number.get(String(item))));
  const keys = plan.all ? plan.ids.map((_, key) => key) : [...own].sort((a, b) => a - b);
  const place = new Map(keys.map((key, position) => [key, position]));
  const examples = known.map(({ item, rating }) => ({
    row: place.get(number.get(String(item))),
    target: (rating - plan.center) / plan.spread,
  }));
  return { keys, examples };
}

/** One rating for each item, at the place of its first: the last, or the mean. So none is both given and predicted. */
function oneEach(ratings, duplicates) {
  if (!["last", "mean"].includes(duplicates)) return ratings;
  const values = new Map();
  for (const { item, rating } of ratings) values.set(String(item), [...(values.get(String(item)) ?? []), rating]);
  const one = (given) => (duplicates === "last" ? given.at(-1) : given.reduce((a, b) => a + b) / given.length);
  return Array.from(values, ([item, given]) => ({ item, rating: one(given) }));
}

/** Names and shapes of the arrays that a message with this many keys has. */
export function shapesOf(plan, count, mark = "") {
  const shapes = { [`item${mark}`]: [count, plan.dim] };
  if (plan.biases) Object.assign(shapes, { [`item_bias${mark}`]: [count], mean: [] });
  if (plan.learned) shapes["default/user"] = [plan.dim];
  if (plan.learned && plan.biases) shapes["default/user_bias"] = [];
  return shapes;
}

/** The slices that the server sent, checked: they must be what `about` says, and of this many keys. */
export function readSlices(plan, about, count, bytes) {
  const { arrays, header } = readTensors(bytes, shapesOf(plan, count, ":rows"));
  const wanted = { format: 1, kind: "slices", ...about };
  for (const name of Object.keys(wanted))
    if (header[name] !== wanted[name])
      throw new Fault(`the message's ${name} is ${header[name]}, and must be ${wanted[name]}`);
  return { ...weightsOf(plan, arrays, count), version: header.version, rng: checkedKey(header.rng) };
}

/** The round's random key, as a message says it. */
export function checkedKey(rng) {
  const word = (each) => Number.isInteger(each) && each >= 0 && each < 2 ** 32;
  if (!Array.isArray(rng) || rng.length !== 2 || !rng.every(word))
    throw new Fault(`a message must say its rng as two numbers of 32 bits, and says ${JSON.stringify(rng)}`);
  return rng;
}

/** All numbers of the model that this device has. The local part starts at its learned default, or at zero. */
export function weightsOf(plan, arrays, count) {
  const rows = Float64Array.from(arrays["item:rows"]);
  return {
    items: Array.from({ length: count }, (_, i) => rows.slice(i * plan.dim, (i + 1) * plan.dim)),
    itemBias: Float64Array.from(arrays["item_bias:rows"] ?? new Float64Array(count)),
    mean: arrays.mean?.[0] ?? 0,
    user: Float64Array.from(arrays["default/user"] ?? new Float64Array(plan.dim)),
    userBias: arrays["default/user_bias"]?.[0] ?? 0,
  };
}

// The round: split, rebuild the local part, train, report.

const SPLITS = {
  none: (examples) => [examples, examples],
  alternate: (examples, { size }) => [0, 1].map((part) => examples.filter((_, j) => Math.floor(j / size) % 2 === part)),
  halves(examples, { percent }) {
    const first = Math.floor((examples.length * percent + 99) / 100);
    return [examples.slice(0, first), examples.slice(first)];
  },
};

/** One round on this device: the bytes of its report. The local part is in none of them. `keys` are told if need be. */
export function report(plan, { about, client }, received, examples, keys = null) {
  const [support, query] = SPLITS[plan.split.kind](examples, plan.split);
  const before = rebuild(plan, received, support);
  const after = copied(before);
  const moved = { user: new Float64Array(plan.dim), userBias: 0 }; // the change of the defaults
  let loss = 0;
  let seen = 0;
  for (const batch of batches(query, plan.update, firstBatch(plan, client, received.rng, query.length))) {
    loss += step(plan, after, batch, plan.update.rate, { server: true, local: moved });
    seen += batch.length;
  }
  const weight = plan.uniform ? Math.min(query.length, 1) : query.length;
  const arrays = contribution(plan, before, after, moved, weight);
  arrays["#sums"] = { shape: [4], values: Float32Array.of(weight, Math.min(weight, 1), loss, seen) };
  if (keys) arrays["#keys:item"] = { shape: [keys.length], values: Int32Array.from(keys) };
  const valid = Object.values(arrays).every(({ values }) => values.every(Number.isFinite));
  return writeTensors(valid ? arrays : {}, { format: 1, kind: "report", ...about, valid });
}

/** The number of the batch with which a client begins in this round. */
function firstBatch(plan, client, rng, count) {
  if (!plan.anywhere) return 0;
  const update = child(clientKey(rng, client), "phase 1"); // phase 0 rebuilds the local part
  return below(child(update, "begin"), Math.max(1, Math.ceil(count / plan.update.size)));
}

/** The change of what the server stores, times the weight. */
function contribution(plan, before, after, moved, weight) {
  const change = {
    item: after.items.flatMap((row, i) => [...row].map((x, d) => x - before.items[i][d])),
    item_bias: Array.from(after.itemBias, (x, i) => x - before.itemBias[i]),
    mean: [after.mean - before.mean],
    "default/user": moved.user,
    "default/user_bias": [moved.userBias],
  };
  const shapes = Object.entries(shapesOf(plan, after.items.length));
  return Object.fromEntries(
    shapes.map(([name, shape]) => [name, { shape, values: Float32Array.from(change[name], (x) => x * weight) }]),
  );
}

/** The weights with the local part that fits these examples best; nothing else changes. */
export function rebuild(plan, received, examples) {
  const weights = copied(received);
  if (plan.reconstruct.solve) return solved(plan, weights, examples);
  const pull = (2 * plan.pull) / Math.max(examples.length, 1);
  for (const batch of batches(examples, plan.reconstruct)) {
    const { user, userBias } = { ...weights, user: weights.user.slice() };
    step(plan, weights, batch, plan.reconstruct.rate, { local: weights });
    const drawn = plan.reconstruct.rate * pull; // towards the default
    user.forEach((x, d) => (weights.user[d] -= drawn * (x - received.user[d])));
    weights.userBias -= drawn * (userBias - received.userBias);
  }
  return weights;
}

/** The exact minimum of the summed squares + pull * |local - default|^2: one step, -H^-1 g. */
function solved(plan, weights, examples) {
  const size = plan.dim + (plan.biases ? 1 : 0);
  const table = Array.from({ length: size }, () => new Float64Array(size + 1)); // H, and g as its last column
  for (const { row, target } of examples) {
    const along = plan.biases ? [...weights.items[row], 1] : weights.items[row];
    const error = found(weights, row) - target;
    for (let i = 0; i < size; i++) {
      for (let j = 0; j < size; j++) table[i][j] += 2 * along[i] * along[j];
      table[i][size] += 2 * error * along[i];
    }
  }
  const scale = table.reduce((sum, line, i) => sum + line[i], 0) / size;
  const ridge = Math.max(2 * plan.pull, scale > 0 ? 1e-4 * scale : 1); // the pull, or what makes H invertible
  table.forEach((line, i) => (line[i] += ridge));
  for (let k = 0; k < size; k++) {
    table[k] = table[k].map((x) => x / table[k][k]);
    for (let i = 0; i < size; i++) if (i !== k) table[i] = table[i].map((x, j) => x - table[i][k] * table[k][j]);
  }
  weights.user.forEach((_, d) => (weights.user[d] -= table[d][size]));
  if (plan.biases) weights.userBias -= table[plan.dim][size];
  return weights;
}

/** Batches in the order of the examples, the same in every epoch, from batch number `begin` on. */
function* batches(examples, { size, epochs, most }, begin = 0) {
  const each = Math.ceil(examples.length / size);
  for (let i = 0; each && i < Math.min(epochs * each, most); i++) {
    const first = ((begin + i) % each) * size;
    yield examples.slice(first, first + size);
  }
}

/**
 * One step of SGD on the mean loss of a batch; returns the summed loss before it. `server`: whether what the server
 * stores is trained. `local` takes the change of the local part: the weights themselves if it is rebuilt. In training
 * the learned defaults have its gradient, and the local part stays where it is.
 */
function step(plan, weights, batch, rate, { server = false, local }) {
  const errors = batch.map(({ row, target }) => found(weights, row) - target);
  const pushes = errors.map((error) => (-2 * rate * error) / batch.length);
  const user = weights.user.slice();
  const items = batch.map(({ row }) => weights.items[row].slice()); // all gradients are taken before the step
  batch.forEach(({ row }, i) => {
    for (let d = 0; d < plan.dim; d++) {
      if (server) weights.items[row][d] += pushes[i] * user[d];
      local.user[d] += pushes[i] * items[i][d];
    }
    if (server && plan.biases) weights.itemBias[row] += pushes[i];
    if (server && plan.biases) weights.mean += pushes[i];
    if (plan.biases) local.userBias += pushes[i];
  });
  return errors.reduce((sum, error) => sum + error ** 2, 0);
}

/** The prediction in the units in which the model learns. Biases are zero where there are none. */
function found({ items, itemBias, mean, user, userBias }, row) {
  return items[row].reduce((sum, x, d) => sum + x * user[d], mean + userBias + itemBias[row]);
}

function copied(weights) {
  return structuredClone(weights);
}

/** The best items among those whose rows are here and that were not rated: [{item, rating}], best first. */
export function recommend({ plan, keys, weights, rated }, count = 10) {
  const seen = new Set(rated.map(String));
  return keys
    .map((key, row) => ({ item: plan.ids[key], rating: plan.center + plan.spread * found(weights, row) }))
    .filter(({ item }) => !seen.has(item))
    .sort((a, b) => b.rating - a.rating)
    .slice(0, count);
}
