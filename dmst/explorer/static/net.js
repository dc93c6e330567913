/* Requests to the server that gave this page, and to nobody else. A failed one throws its words for a person. */

export class Fault extends Error {
  constructor(words, status = 0, loading = false) {
    super(words && words[0].toUpperCase() + words.slice(1));
    Object.assign(this, { status, loading });
  }
}

const GONE = "The server does not answer. Is `dmst explore` still running in its terminal?";
const token = takeToken();

/* A server that others can reach puts a token in the link; it is kept for this tab and leaves the address bar. */
function takeToken() {
  const [query, fragment] = [new URLSearchParams(location.search), new URLSearchParams(location.hash.slice(1))];
  const found = query.get("token") ?? fragment.get("token");
  try {
    if (found) sessionStorage.setItem("dmst-token", found);
  } catch {} // storage may be switched off: the token then lasts until the page is left
  if (found) {
    fragment.delete("token");
    history.replaceState(null, "", `${location.pathname}${fragment.size ? `#${fragment}` : ""}`);
    return found;
  }
  try {
    return sessionStorage.getItem("dmst-token");
  } catch {
    return null;
  }
}

async function ask(path, { body, signal, method = body === undefined ? "GET" : "POST" } = {}) {
  const headers = { "X-Dmst": "1", ...(token && { "X-Dmst-Token": token }) };
  if (body !== undefined) headers["Content-Type"] = body instanceof Blob ? "application/octet-stream" : "application/json";
  let answer;
  try {
    const sent = body instanceof Blob ? body : JSON.stringify(body);
    answer = await fetch(path, { method, headers, signal, cache: "no-store", body: sent });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault(GONE);
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  const words = told.error || `The server answered ${answer.status} and gave no reason.`;
  throw new Fault(words, answer.status, ["loading", "waiting"].includes(told.state));
}

const json = async (path, options) => (await ask(path, options)).json();
const bitmap = async (path, signal) => createImageBitmap(await (await ask(path, { signal })).blob());
const asked = (model, image, gates) => ({ model, image, gates });

export const start = () => json("/api/start");
export const upload = (file) => json("/api/images", { body: new Blob([file]) });
export const picture = (image) => bitmap(`/api/images/${encodeURIComponent(image)}`);
export const seen = (model, image, signal) => bitmap(`/api/seen/${encodeURIComponent(model)}/${encodeURIComponent(image)}`, signal);
export const look = (model, image, gates, signal) => json("/api/look", { body: asked(model, image, gates), signal });
export const rates = (model, image, gates, signal) => json("/api/rates", { body: asked(model, image, gates), signal });
