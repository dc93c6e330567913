/* Events: what a person does, turned into changes of the state; the panels do the rest. */

import { contain } from "./draw.js";
import { picture, start, upload } from "./net.js";
import { Panel } from "./panel.js";
import { countChanges, fromFragment, modelOf, state, toFragment } from "./state.js";

const $ = (id) => document.getElementById(id);
const panels = [];

function say(words) {
  $("wrong").hidden = true;
  $("news").textContent = words;
}

function complain(words) {
  say("");
  $("wrong").hidden = false;
  $("wrong").textContent = words;
}

/* ---- the state changed ---- */

function changed(kind, patch = {}, by = null) {
  Object.assign(state, patch);
  if (kind === "look") settle();
  if (kind === "gates") panels.forEach((panel) => panel.shown && panel.paintForce());
  if (kind === "gates" || kind === "slots") panels.forEach((panel) => panel.want());
  if (kind === "look") by.paint();
  if (kind === "place") panels.forEach((panel) => panel.paintPlace());
  paintBar();
  remember();
}

/* What nobody has chosen yet: a layer past the middle, and its head with the largest gate. */
function settle() {
  const first = panels.find((panel) => panel.shown);
  state.layer ??= Math.floor(0.6 * first.shown.look.layers.length);
  if (state.head !== null) return;
  const gates = first.shown.look.layers[first.layer].gate ?? [0];
  state.head = gates.indexOf(Math.max(...gates));
}

const largest = (of) => Math.max(0, ...panels.filter((panel) => panel.shown).map(of));

function paintBar() {
  const depth = largest((panel) => panel.shown.look.layers.length);
  const most = largest((panel) => panel.heads);
  $("layer").max = Math.max(depth - 1, 0);
  $("layer").value = Math.min(state.layer ?? 0, depth - 1);
  $("layer-out").textContent = depth ? Math.min(state.layer ?? 0, depth - 1) : "";
  document.querySelectorAll("#maps input").forEach((radio) => {
    radio.checked = radio.value === state.map;
  });
  const shown = new Set(panels.filter((panel) => panel.shown).map((panel) => panel.quantity()));
  const names = { "attention received": "attention", "membership in its group": "groups" };
  $("map-name").textContent = (shown.size === 1 && names[[...shown][0]]) || "membership";
  document.querySelectorAll(".example.digit").forEach((each) => {
    each.hidden = !state.slots.some((slot) => modelOf(slot)?.channels === 1);
  });
  $("strength").value = state.strength;
  $("stretch").checked = state.stretch;
  if ($("heads").children.length !== most) {
    $("heads").replaceChildren(...Array.from({ length: most }, (_, k) => {
      const label = document.createElement("label");
      const radio = Object.assign(document.createElement("input"), { type: "radio", name: "head", value: k });
      label.append(radio, Object.assign(document.createElement("span"), { textContent: k }));
      return label;
    }));
  }
  const chosen = Math.min(state.head ?? 0, most - 1);
  document.querySelectorAll("#heads input").forEach((radio, k) => {
    radio.checked = k === chosen;
  });
  const [heads, groups] = ["heads", "groups"].map((kind) => state.slots.reduce((sum, slot) => sum + countChanges(slot.gates)[kind], 0));
  const count = (n, name) => n && `${n} ${name}${n === 1 ? "" : "s"}`;
  $("reset").disabled = !heads && !groups;
  $("reset").textContent = ["Restore", [count(heads, "head"), count(groups, "group")].filter(Boolean).join(", ")].join(" ").trim();
}

let later = 0;

function remember() {
  clearTimeout(later);
  later = setTimeout(() => history.replaceState(null, "", toFragment()), 200);
}

function paintModels() {
  const option = (value, text) => Object.assign(document.createElement("option"), { value, textContent: text });
  for (const i of [0, 1]) {
    const select = $(`model-${i}`);
    const some = state.models.map(({ id, name }) => option(id, name));
    select.replaceChildren(...(i ? [option("", "no other"), ...some] : some));
    select.value = state.slots[i]?.model ?? "";
    select.disabled = !state.models.length;
  }
}

function arrange() {
  while (panels.length > state.slots.length) {
    const gone = panels.pop();
    gone.stop();
    gone.root.remove();
  }
  state.slots.forEach((slot, i) => {
    if (panels[i]?.slot === slot) return;
    panels[i]?.stop();
    const panel = new Panel(slot, changed);
    if (panels[i]) panels[i].root.replaceWith(panel.root);
    else $("panels").append(panel.root);
    panels[i] = panel;
    panel.waiting(`Asking ${modelOf(slot).name} …`);
  });
  $("panels").className = `panels ${panels.length > 1 ? "two" : "one"}`;
  changed("slots");
}

/* ---- pictures ---- */

async function show(image) {
  state.image = image;
  $("picture-name").textContent = image.name;
  $("picture-name").title = image.credit ?? "";
  $("thumb").setAttribute("aria-label", `The picture: ${image.name}`);
  document.querySelectorAll(".example").forEach((each) => each.setAttribute("aria-pressed", each.dataset.image === image.id));
  changed("slots");
  const drawn = await picture(image.id);
  if (state.image !== image) return;
  contain($("thumb"), drawn);
  $("picture-size").textContent = image.width ? `${image.width} × ${image.height} px` : "";
}

async function take(file) {
  if (!file) return complain("That was not a picture file. Drop or paste a file from your computer. This page never fetches web addresses.");
  if (file.size > state.limit) return complain(`${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MiB. The limit is ${state.limit / 2 ** 20} MiB.`);
  say(`Reading ${file.name} …`);
  const before = state.image;
  try {
    const { image, width, height } = await upload(file);
    if (state.image !== before) return; // another picture was chosen meanwhile
    say("");
    await show({ id: image, name: file.name || "pasted picture", width, height });
  } catch (error) {
    complain(error.message);
  }
}

async function example(image) {
  const title = `${image.name}: ${image.credit}`;
  const button = Object.assign(document.createElement("button"), { type: "button", className: "example", title });
  const canvas = Object.assign(document.createElement("canvas"), { width: 64, height: 64 });
  button.dataset.image = image.id;
  button.hidden = image.digit; // until a network that reads digits is shown
  button.classList.toggle("digit", image.digit);
  button.setAttribute("aria-pressed", state.image?.id === image.id);
  button.append(canvas, Object.assign(document.createElement("span"), { textContent: image.name }));
  button.addEventListener("click", () => {
    say("");
    show(image).catch((error) => complain(error.message));
  });
  $("examples").append(button);
  contain(canvas, await picture(image.id));
}

function listenForPictures() {
  $("file").addEventListener("change", () => {
    if ($("file").files.length) take($("file").files[0]);
    $("file").value = "";
  });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length || !event.target.matches?.("input")) take(files.find((each) => each.type.startsWith("image/")) ?? files[0]);
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dragging"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    take(event.dataTransfer.files[0]);
  });
}

/* ---- controls ---- */

const step = (key, by, most) => changed("place", { [key]: Math.min(Math.max((state[key] ?? 0) + by, 0), most) });

function movePatch(dx, dy) {
  const panel = panels.find((each) => each.shown);
  const [rows, columns] = panel.shown.look.grid;
  const at = state.patch ?? { x: 0.5 - dx / columns, y: 0.5 - dy / rows };
  const [column, row] = [Math.floor(at.x * columns) + dx, Math.floor(at.y * rows) + dy];
  const inside = (each, count) => (Math.min(Math.max(each, 0), count - 1) + 0.5) / count;
  changed("place", { patch: { x: inside(column, columns), y: inside(row, rows) } });
}

function reset() {
  state.slots.forEach((slot) => {
    slot.gates = {};
  });
  changed("gates");
}

const ARROWS = { ArrowLeft: ["layer", -1, 0], ArrowRight: ["layer", 1, 0], ArrowUp: ["head", 0, -1], ArrowDown: ["head", 0, 1] };

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const [typing, sliding] = ["input[type=number], select", "input[type=range], input[type=radio]"].map((each) => event.target.matches?.(each));
  if (event.key === "?") $("help").showModal();
  const shown = panels.filter((panel) => panel.shown);
  if (typing || !shown.length) return;
  const [key, dx, dy] = ARROWS[event.key] ?? [];
  if (key && sliding && !event.shiftKey) return;
  if (key) {
    event.preventDefault();
    if (event.shiftKey) movePatch(dx, dy);
    else step(key, dx + dy, key === "layer" ? $("layer").max : $("heads").children.length - 1);
  } else if (/^\d$/.test(event.key) && Number(event.key) < $("heads").children.length) changed("place", { head: Number(event.key) });
  else if (event.key === "Escape") changed("place", { patch: null });
  else if (event.key === "x") (shown.find((panel) => panel.root.contains(event.target)) ?? shown[0]).toggle();
  else if (event.key === "r") reset();
}

function theme(name) {
  state.theme = name;
  $("theme").textContent = `Theme: ${name}`;
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("dmst-theme", name);
  } catch {} // storage may be switched off
}

async function copyLink() {
  history.replaceState(null, "", toFragment());
  try {
    await navigator.clipboard.writeText(location.href);
    say("The link is copied. It opens the page with these networks, this picture, layer and head, and your changes.");
  } catch {
    say("The browser did not allow copying. The link is in the address bar.");
  }
}

function listen() {
  $("layer").addEventListener("input", () => changed("place", { layer: $("layer").valueAsNumber }));
  $("heads").addEventListener("change", (event) => changed("place", { head: Number(event.target.value) }));
  $("maps").addEventListener("change", (event) => changed("place", { map: event.target.value }));
  $("strength").addEventListener("input", () => changed("place", { strength: $("strength").valueAsNumber }));
  $("stretch").addEventListener("change", () => changed("place", { stretch: $("stretch").checked }));
  $("reset").addEventListener("click", reset);
  $("link").addEventListener("click", copyLink);
  $("theme").addEventListener("click", () => theme({ system: "light", light: "dark", dark: "system" }[state.theme]));
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("model-0").addEventListener("change", (event) => {
    state.slots[0] = { model: event.target.value, gates: {} };
    arrange();
  });
  $("model-1").addEventListener("change", (event) => {
    state.slots.splice(1, 1, ...(event.target.value ? [{ model: event.target.value, gates: {} }] : []));
    arrange();
  });
  document.addEventListener("keydown", pressed);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    $("panels").focus();
  });
  addEventListener("hashchange", () => restore(location.hash).catch((error) => complain(error.message)));
}

/* ---- beginning ---- */

async function restore(fragment) {
  const { image: asked, missing } = fromFragment(fragment);
  paintModels();
  if (state.slots.length) arrange();
  if (missing) complain(`The link is about ${missing}, which is not loaded here. Start dmst explore with --model ${missing}. The page shows another network, with no changes.`);
  const drawn = state.examples.find(({ id }) => id === asked);
  if (drawn || !asked) return (drawn ?? state.examples[0]) && show(drawn ?? state.examples[0]);
  return show({ id: asked, name: "your picture" }).catch(() => {
    complain("The picture of this link is no longer in memory, because pictures are never saved to disk. Choose it again. The page shows an example.");
    return state.examples[0] && show(state.examples[0]);
  });
}

async function begin() {
  let chosen = "system";
  try {
    chosen = localStorage.getItem("dmst-theme") ?? "system";
  } catch {} // storage may be switched off
  theme(["light", "dark"].includes(chosen) ? chosen : "system");
  listen();
  listenForPictures();
  say("Asking the server …");
  const { models, examples, upload_limit: limit, version } = await start();
  Object.assign(state, { models, examples, limit });
  say("");
  $("about").textContent = `dmst ${version}. The networks run on this computer. Nothing leaves it.`;
  if (!models.length) return complain("The server has no network.");
  const shown = restore(location.hash);
  await Promise.all([shown, ...examples.map(example)]);
}

begin().catch((error) => {
  complain(error.message);
  const again = Object.assign(document.createElement("button"), { type: "button", textContent: "Try again" });
  again.addEventListener("click", () => location.reload());
  $("wrong").append(" ", again);
});
