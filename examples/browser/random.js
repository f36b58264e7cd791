// The randomness of a client in a round, bit for bit as in Python. A random key is two words of 32 bits. A round has
// one, which the server sends with the slices. Keys that follow from it have names: of a client, and of a use there.

const ROTATIONS = [
  [13, 15, 26, 6],
  [17, 29, 16, 24],
];
const PARITY = 0x1bd11bda;

/** Threefry-2x32 with 20 rounds: two words of 32 bits from a key and two others. */
function threefry([a, b], first, second) {
  const keys = [a, b, a ^ b ^ PARITY];
  let [x, y] = [first + a, second + b];
  for (let five = 0; five < 5; five++) {
    for (const by of ROTATIONS[five % 2]) {
      x = (x + y) | 0;
      y = x ^ ((y << by) | (y >>> (32 - by)));
    }
    x = (x + keys[(five + 1) % 3]) | 0;
    y = (y + keys[(five + 2) % 3] + five + 1) | 0;
  }
  return [x >>> 0, y >>> 0];
}

/** The key that follows from a key and a number below 2^32. Part i of a key that is split is the same. */
export function foldIn(key, number) {
  return threefry(key, 0, number);
}

/** The key of one use, by its name. */
export function child(key, use) {
  return foldIn(key, crc32(new TextEncoder().encode(use)));
}

/** The key of a client in a round. */
export function clientKey(key, name) {
  const number = hash64(new TextEncoder().encode(name));
  return foldIn(foldIn(key, Number(number >> 32n)), Number(number & 0xffffffffn));
}

/** A whole number from 0 to below `end`, at random: of 64 bits, or of 32 if `end` is above 2^16 (as in JAX). */
export function below(key, end) {
  const [high, low] = [0, 1].map((part) => {
    const [x, y] = threefry(foldIn(key, part), 0, 0);
    return BigInt((x ^ y) >>> 0);
  });
  return Number((end > 2 ** 16 ? low : (high << 32n) + low) % BigInt(end));
}

function crc32(bytes) {
  let sum = ~0;
  for (const byte of bytes) {
    sum ^= byte;
    for (let bit = 0; bit < 8; bit++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
}

// BLAKE2b (RFC 7693), of which browsers have none.

const BLOCK = 128; // bytes
const ALL = (1n << 64n) - 1n;
const START = [
  0x6a09e667f3bcc908n,
  0xbb67ae8584caa73bn,
  0x3c6ef372fe94f82bn,
  0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n,
  0x9b05688c2b3e6c1fn,
  0x1f83d9abfb41bd6bn,
  0x5be0cd19137e2179n,
];
const ORDERS = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
  [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
  [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
  [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const COLUMNS = [0, 1, 2, 3].map((i) => [i, i + 4, i + 8, i + 12]);
const DIAGONALS = [0, 1, 2, 3].map((i) => [i, 4 + ((i + 1) % 4), 8 + ((i + 2) % 4), 12 + ((i + 3) % 4)]);

/** A digest of 8 bytes, as a little-endian number. */
export function hash64(bytes) {
  const state = [...START];
  state[0] ^= 0x01010000n ^ 8n; // no key, and 8 bytes
  const blocks = Math.max(1, Math.ceil(bytes.length / BLOCK));
  for (let i = 0; i < blocks; i++) {
    const end = Math.min((i + 1) * BLOCK, bytes.length);
    const block = new Uint8Array(BLOCK);
    block.set(bytes.subarray(i * BLOCK, end));
    compress(state, block, BigInt(end), i + 1 === blocks);
  }
  return state[0];
}

function compress(state, block, end, last) {
  const view = new DataView(block.buffer);
  const words = ORDERS[0].map((i) => view.getBigUint64(8 * i, true));
  const v = [...state, ...START];
  v[12] ^= end;
  if (last) v[14] ^= ALL;
  for (let round = 0; round < 12; round++) {
    const order = ORDERS[round % 10];
    [...COLUMNS, ...DIAGONALS].forEach((places, i) => mix(v, places, words[order[2 * i]], words[order[2 * i + 1]]));
  }
  for (let i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

function mix(v, [a, b, c, d], x, y) {
  const turned = (value, by) => ((value >> by) | (value << (64n - by))) & ALL;
  v[a] = (v[a] + v[b] + x) & ALL;
  v[d] = turned(v[d] ^ v[a], 32n);
  v[c] = (v[c] + v[d]) & ALL;
  v[b] = turned(v[b] ^ v[c], 24n);
  v[a] = (v[a] + v[b] + y) & ALL;
  v[d] = turned(v[d] ^ v[a], 16n);
  v[c] = (v[c] + v[d]) & ALL;
  v[b] = turned(v[b] ^ v[c], 63n);
}
