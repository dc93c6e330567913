/* The one state object of the page, and the link that brings it back. Layers and heads count from 0. */

const STRENGTH = 0.6; // as in dmst.analysis.membership.overlay

export const state = {
  models: [], // of /api/start
  examples: [],
  limit: 0, // bytes of an upload
  image: null, // {id, name, width, height}
  slots: [], // one or two: {model: id, gates: {layer: {head: gate}}}; "head.group": 0 is a group that is off
  layer: null, // null: one past the middle
  head: null, // null: the one with the largest gate
  patch: null, // {x, y}, its middle in shares of the picture: networks may cut it into other patches
  strength: STRENGTH,
  stretch: false,
  map: "membership", // or "gradient": what the large map shows
  rate: "variational",
  theme: "system",
};

export const modelOf = (slot) => state.models.find((model) => model.id === slot.model);

export function setGate(slot, layer, head, value) {
  const heads = { ...slot.gates[layer] };
  if (value === null) delete heads[head];
  else heads[head] = value;
  slot.gates = { ...slot.gates, [layer]: heads };
  if (!Object.keys(heads).length) delete slot.gates[layer];
}

export const forced = (slot, layer, head) => slot.gates[layer]?.[head] ?? null;

/* The groups of a head that are off, and how many heads and groups are not as the network has them. */
export const groupsOff = (gates, layer, head) => Object.keys(gates[layer] ?? {}).filter((key) => key.startsWith(`${head}.`)).map((key) => Number(key.split(".")[1]));

export function countChanges(gates) {
  const keys = Object.values(gates).flatMap(Object.keys);
  const groups = keys.filter((key) => key.includes(".")).length;
  return { heads: keys.length - groups, groups };
}

/* 3.1:0,3.2:0.5,3.4.7:0 is head 1 of layer 3 off, head 2 at 0.5, and group 7 of head 4 off. */
export function writeGates(gates) {
  const layers = Object.keys(gates).map(Number).sort((a, b) => a - b);
  return layers.flatMap((l) => Object.entries(gates[l]).map(([k, g]) => `${l}.${k}:${g}`)).join(",");
}

export function readGates(text) {
  const gates = {};
  for (const [, l, k, g] of (text ?? "").matchAll(/(?:^|,)(\d{1,3})\.(\d{1,3}(?:\.\d{1,4})?):(-?\d*\.?\d+(?:e-?\d{1,3})?)(?=,|$)/g)) {
    const key = k.split(".").map(Number).join(".");
    if (Math.abs(Number(g)) <= (key.includes(".") ? 0 : 100)) (gates[Number(l)] ??= {})[key] = Number(g);
  }
  return gates;
}

const nameOf = (id) => {
  const { name } = state.models.find((model) => model.id === id) ?? { name: id };
  return state.models.filter((model) => model.name === name).length === 1 ? name : id;
};

export function toFragment() {
  const told = new URLSearchParams();
  state.slots.forEach((slot, i) => {
    told.set(i ? "with" : "model", nameOf(slot.model));
    if (Object.keys(slot.gates).length) told.set(i ? "with-gates" : "gates", writeGates(slot.gates));
  });
  if (state.image) told.set("image", state.image.id);
  for (const key of ["layer", "head"]) if (state[key] !== null) told.set(key, state[key]);
  told.set("patch", state.patch ? `${state.patch.x.toFixed(4)},${state.patch.y.toFixed(4)}` : "none");
  if (state.stretch) told.set("stretch", 1);
  if (state.map === "gradient") told.set("map", "gradient");
  if (state.strength !== STRENGTH) told.set("strength", state.strength);
  if (state.rate !== "variational") told.set("rate", state.rate);
  return `#${told}`;
}

/* What a link asks for and there is; what it asks for and there is not is left out. Returns the id of the picture, and the
   network that is not here: what was switched in it is not switched in another. */
export function fromFragment(fragment) {
  const asked = new URLSearchParams(fragment.replace(/^#/, ""));
  const model = (key) => state.models.find((each) => each.name === asked.get(key) || each.id === asked.get(key));
  const whole = (key) => (/^\d{1,5}$/.test(asked.get(key) ?? "") ? Number(asked.get(key)) : null);
  const first = model("model") ?? state.models[0];
  const second = model("with");
  const missing = ["model", "with"].map((key) => (model(key) ? null : asked.get(key))).find(Boolean) ?? null;
  state.slots = first ? [{ model: first.id, gates: asked.get("model") && !model("model") ? {} : readGates(asked.get("gates")) }] : [];
  if (first && second) state.slots.push({ model: second.id, gates: readGates(asked.get("with-gates")) });
  state.layer = whole("layer");
  state.head = whole("head");
  const [x, y] = (asked.get("patch") ?? "0.5,0.5").split(",").map(Number);
  state.patch = x >= 0 && x < 1 && y >= 0 && y < 1 ? { x, y } : null;
  state.stretch = asked.get("stretch") === "1";
  state.map = asked.get("map") === "gradient" ? "gradient" : "membership";
  const strength = Number(asked.get("strength") ?? STRENGTH);
  state.strength = strength >= 0 && strength <= 1 ? strength : STRENGTH;
  state.rate = ["complete", "coding", "active"].includes(asked.get("rate")) ? asked.get("rate") : "variational";
  return { image: asked.get("image"), missing };
}
