// What a device keeps and sends: its key, ratings and local part in IndexedDB, signed requests, and the loop over tasks.

import { choose, Fault, hex, parsed, planOf, readSlices, rebuild, report, writeTensors } from "./learn.js";
import { slicesFromFiles } from "./pages.js";

const AGAIN = [408, 425, 429, 500, 502, 503, 504]; // answers after which a request is tried again
const LARGEST = 2 ** 30; // bytes of any answer
const LONGEST_WAIT = 60; // seconds between two tries of a server that does not answer

/** The server does not answer, or not as it should: try again later. */
class Unreachable extends Error {}

/** The server refused a request, and said why. */
export class Refused extends Fault {
  constructor({ reason, what }) {
    super(`${what} (${reason})`);
    this.reason = reason;
  }
}

/** Things by name that stay in this browser: get(name) and put(name, value). */
export async function openStore(name = "partwise") {
  const opening = indexedDB.open(name, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("things");
  const database = await done(opening);
  const things = (mode) => database.transaction("things", mode).objectStore("things");
  return {
    get: (key) => done(things("readonly").get(key)),
    put: (key, value) => done(things("readwrite").put(value, key).transaction), // on the disk, as far as it can be
  };
}

/** The result of a request, or the end of a transaction, of IndexedDB. */
function done(work) {
  return new Promise((resolve, reject) => {
    work.onsuccess = work.oncomplete = () => resolve(work.result);
    work.onerror = work.onabort = () => reject(new Fault(`this browser could not store or read: ${work.error?.message}`));
  });
}

/** This device: its Ed25519 key pair, made at the first visit. The private key cannot be read, not even by this page. */
export async function openDevice(store) {
  let pair = await store.get("key");
  if (!pair) {
    pair = await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"]);
    await store.put("key", pair);
  }
  const raw = await crypto.subtle.exportKey("raw", pair.publicKey);
  return { privateKey: pair.privateKey, public: hex(raw), name: (await sha256(raw)).slice(0, 32) };
}

/** The headers that sign a request: of its method, its path, a digest of its body, the time, and a number used once. */
export async function signature(device, method, path, body) {
  const time = (Date.now() / 1000).toFixed(3);
  const nonce = hex(crypto.getRandomValues(new Uint8Array(16)));
  const text = [method, path, await sha256(body), time, nonce].join("\n");
  const signed = await crypto.subtle.sign("Ed25519", device.privateKey, new TextEncoder().encode(text));
  return {
    "partwise-device": device.name,
    "partwise-time": time,
    "partwise-nonce": nonce,
    "partwise-signature": btoa(String.fromCharCode(...new Uint8Array(signed))),
  };
}

async function sha256(bytes) {
  return hex(await crypto.subtle.digest("SHA-256", bytes));
}

/** The run at a server (an origin, as in "https://example.org"), for one device, until `stop` (an AbortSignal) says so. */
export function linkTo(server, device, stop) {
  async function request(method, path, body = new Uint8Array(), most = LARGEST) {
    const headers = await signature(device, method, path, body);
    const { status, bytes } = await answered(server + path, { method, headers, cache: "no-store", signal: stop, body }, most);
    if (status === 200) return bytes;
    throw new Refused({ reason: `status ${status}`, what: `${server} refuses`, ...parsed(bytes, "the server's refusal") });
  }
  const post = async (path, value) =>
    parsed(await request("POST", path, new TextEncoder().encode(JSON.stringify(value))), "the server's answer");

  /** A file of slices: from a host of files if the run has one, else from the server. */
  async function fileOf(plan, name, most, again) {
    if (!plan.files) return request("GET", `/v1/files/${name}`, undefined, most);
    const { status, bytes } = await answered(`${plan.files}/${name}`, { cache: again ? "reload" : "default", signal: stop }, most);
    if (status === 200) return bytes;
    throw new Refused({ reason: "file", what: `there is no file ${name} at ${plan.files} (status ${status})` });
  }

  return {
    offer: async () => parsed(await request("GET", "/v1/run"), "the offer of the run"),
    join: (clients) => post("/v1/join", { clients }),
    /** Ask for work. The server may hold the answer for so many seconds. */
    poll: (hold) => post("/v1/poll", { ready: true, most: 1, hold }),
    /** The slices of a task: by files if the task names one, else by a request that tells the keys. */
    async slicesOf(plan, { about, slices }, keys) {
      if (slices) return slicesFromFiles(plan, about, slices, keys, (...asked) => fileOf(plan, ...asked));
      const bytes = await request("POST", `/v1/tasks/${about.task}/slices`, writeKeys(keys));
      return readSlices(plan, about, keys.length, bytes);
    },
    /** The newest version of the model, with the rows of these keys. */
    async newest(plan, keys) {
      const bytes = await request("POST", "/v1/model/slices", writeKeys(keys));
      return readSlices(plan, { run: plan.run, model: plan.model, task: "" }, keys.length, bytes);
    },
    report: async (bytes) => parsed(await request("POST", "/v1/reports", bytes), "the server's answer"),
  };
}

function writeKeys(keys) {
  return writeTensors({ item: { shape: [keys.length], values: Int32Array.from(keys) } });
}

/** Status and bytes of an answer, of at most so many; `Unreachable` if a later try may help. */
async function answered(url, { body, ...options }, most) {
  const parts = [];
  let size = 0;
  try {
    const answer = await fetch(url, options.method === "POST" ? { ...options, body } : options);
    if (AGAIN.includes(answer.status)) throw new Unreachable(`it answers with status ${answer.status}`);
    const reader = answer.body.getReader();
    for (let part = await reader.read(); !part.done && size <= most; part = await reader.read()) {
      parts.push(part.value);
      size += part.value.length;
    }
    if (size > most) throw new Fault(`${url} sends more than ${most} bytes`);
    return { status: answer.status, bytes: new Uint8Array(await new Blob(parts).arrayBuffer()) };
  } catch (error) {
    throw error instanceof Fault ? error : new Unreachable(`${new URL(url).origin} does not answer: ${error.message}`);
  }
}

/**
 * Take part until the run ends or `stop` says so. Yields what came of every task:
 * {round, accepted, reason}. A server that does not answer is tried again, later and later.
 */
export async function* takePart(link, device, store, stop) {
  let plan = null;
  let failures = 0;
  while (!stop.aborted) {
    try {
      if (!plan) {
        plan = planOf(await link.offer());
        await link.join([device.name]); // one client, named like its device
      }
      const given = await link.poll(plan.hold);
      failures = 0;
      if (given.ended) return;
      for (const task of given.tasks ?? []) {
        if (!fits(plan, task)) {
          plan = null;
          yield { accepted: false, reason: "the server now has another run: this page begins anew" };
          await sleep(1, stop);
          break;
        }
        yield await work(link, plan, task, store, stop);
      }
      if (given.wait) await sleep(given.wait * (0.8 + 0.4 * Math.random()), stop);
    } catch (error) {
      if (!(error instanceof Unreachable)) throw error;
      if (stop.aborted) return;
      failures += 1;
      yield { reason: error.message };
      await sleep(Math.min(LONGEST_WAIT, 0.5 * 2 ** failures) * (0.5 + 0.5 * Math.random()), stop);
    }
  }
}

/** Whether a task is of the run and the model of which the server has told. */
function fits(plan, { about }) {
  return about.run === plan.run && about.model === plan.model;
}

/** One task, from the choice of keys to the report. */
async function work(link, plan, task, store, stop) {
  const { keys, examples } = choose(plan, (await store.get("ratings")) ?? []);
  const round = task.about.version + 1;
  try {
    if (task.kind !== "train") throw new Fault(`the server asks to ${task.kind}, and this page can only train`);
    const received = await link.slicesOf(plan, task, keys);
    await link.report(report(plan, task, received, examples, task.slices ? keys : null));
    return { round, accepted: true, reason: "" };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    await sleep(1, stop); // the server may offer the same task again
    return { round, accepted: false, reason: error.message };
  }
}

/** Keep the newest version of the model, with all items and this device's own part, to recommend without a network. */
export async function refresh(link, store) {
  const plan = planOf(await link.offer());
  const ratings = (await store.get("ratings")) ?? [];
  const { keys, examples } = choose({ ...plan, all: true }, ratings);
  const weights = rebuild(plan, await link.newest(plan, keys), examples);
  await store.put("model", { plan, keys, weights, rated: ratings.map(({ item }) => item) });
}

function sleep(seconds, stop) {
  return new Promise((resolve) => {
    setTimeout(resolve, 1000 * seconds);
    stop.addEventListener("abort", resolve, { once: true });
  });
}
