// A service worker: the page's own files are kept, so that it opens without a network. Requests to the run pass by.

const FILES = ["./", "learn.js", "device.js", "pages.js", "random.js"];

self.addEventListener("install", (event) =>
  event.waitUntil(caches.open("page").then((kept) => kept.addAll(FILES))),
);

self.addEventListener("fetch", (event) => {
  if (event.request.method === "GET" && !new URL(event.request.url).pathname.startsWith("/v1/"))
    event.respondWith(fresh(event.request).catch(() => caches.match(event.request)));
});

async function fresh(request) {
  const answer = await fetch(request);
  if (answer.ok) await (await caches.open("page")).put(request, answer.clone());
  return answer;
}
