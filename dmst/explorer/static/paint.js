/* What a panel shows: every sentence, map and chart, painted from the answers it got and the state. */

import { curves, dots } from "./charts.js";
import { overlay } from "./draw.js";
import { live } from "./net.js";
import { forced, modelOf, state, writeGates } from "./state.js";

const RATES = {
  variational: "R_var: nats that the tokens cost in the heads' subspaces, at the input of each layer. Lower is more compact; it is not accuracy.",
  complete: "R+: R_var with what lies outside the subspaces paid for too, in nats.",
  coding: "R: nats of all tokens as one group, the cost that grouping has to beat.",
  active: "How many heads are on (gate not 0) for this picture.",
};
const percent = (p) => (p === null ? "not a number" : p > 0 && p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);
const points = (p) => `${Math.abs(p) < 5e-4 ? "" : p < 0 ? "−" : "+"}${(100 * Math.abs(p)).toFixed(1)}`;
const short = (g) => (g === null || g === undefined ? "–" : g !== 0 && Math.abs(g) < 0.005 ? "< 0.01" : g.toFixed(2));

/* Of a panel: root, $, slot, shown ({model, image, gates, look, before, rates, picture}), hover, typing, changed. */
export class Painted {
  name() {
    return modelOf(this.slot)?.name ?? "the network";
  }

  /* ---- where we are ---- */

  get layer() {
    return Math.min(state.layer ?? Infinity, this.shown.look.layers.length - 1);
  }

  get heads() {
    const told = this.shown.look.layers[this.layer];
    return told.gate?.length || told.maps.length || modelOf(this.slot).heads || 1;
  }

  get gated() {
    return modelOf(this.slot).gates;
  }

  get head() {
    return Math.min(state.head ?? 0, this.heads - 1);
  }

  get patch() {
    const [rows, columns] = this.shown.look.grid;
    return state.patch && Math.floor(state.patch.y * rows) * columns + Math.floor(state.patch.x * columns);
  }

  /* What a head does in a layer, and by whose will. */
  told(layer, head) {
    const { gate, computed_gate: computed } = this.gated ? this.shown.look.layers[layer] : {};
    const set = this.shown.gates[layer]?.[head] ?? null;
    const was = computed?.[head] ?? null;
    const now = gate?.[head] ?? set;
    const [off, silent] = [set === 0, set === null && now === 0];
    const before = was === null ? "" : was === 0 ? ", silent by itself" : `, by itself ${short(was)}`;
    const own = silent ? "silent" : now === null ? "on" : `gate ${short(now)}`;
    const words = off ? `off${before}` : set !== null ? `forced to ${short(set)}${before}` : own;
    return { now, was, set, off, silent, words };
  }

  /* ---- painting ---- */

  paintName() {
    const told = modelOf(this.slot);
    if (!told) return;
    this.$(".name").textContent = told.name;
    const size = told.image_size ? `, sees ${told.image_size[1]} × ${told.image_size[0]} pixels` : "";
    this.$(".facts").textContent = told.depth
      ? `${told.operator} operator, ${told.depth} layers of ${told.heads} heads, ${told.parameters.toLocaleString("en")} parameters${size}`
      : "";
    this.root.setAttribute("aria-label", told.name);
  }

  paint() {
    if (!this.shown) return;
    if (!this.shown.rates) delete this.root.dataset.rates;
    this.paintName();
    this.paintAnswer();
    this.paintPlace();
    this.root.dataset.key = this.shown.key;
    this.root.dataset.gates = writeGates(this.shown.gates);
  }

  /* All that a layer, a head or a patch moves. */
  paintPlace() {
    if (!this.shown) return;
    this.rooms ??= [".routes", ".curve", ".through"].map((each) => this.$(each).clientWidth); // read at once, before anything is written
    this.paintMap();
    this.paintTiles();
    this.paintForce();
    this.paintDots();
    this.paintRates();
    this.paintPatch();
    Object.assign(this.root.dataset, { layer: this.layer, head: this.head });
  }

  scale(layer) {
    const told = this.shown.look.layers[layer];
    const numbers = state.stretch ? told.maps.flat().filter((x) => x !== null) : [];
    return numbers.length ? { low: Math.min(...numbers), high: Math.max(...numbers) } : { low: told.low ?? 0, high: told.high ?? 1 };
  }

  quantity(layer = this.layer) {
    return this.shown.look.layers[layer].kind === "attention" ? "attention received" : "membership";
  }

  paintMap() {
    const { look: seenNow, picture } = this.shown;
    const { layer, head, patch } = this;
    const told = seenNow.layers[layer];
    const values = told.maps[head] ?? null;
    const { low, high } = this.scale(layer);
    const marks = [];
    if (this.hover !== undefined && this.hover !== null) marks.push({ patch: this.hover, thin: true });
    if (patch !== null) marks.push({ patch });
    overlay(this.$(".map"), picture, values, seenNow.grid, { low, high, strength: state.strength, marks });
    const what = values ? `${this.quantity()}, layer ${layer}, head ${head}` : `the picture as ${this.name()} sees it`;
    this.$(".see-title").textContent = what[0].toUpperCase() + what.slice(1);
    this.$(".map").setAttribute("aria-label", `${what}; ${seenNow.grid[0]} by ${seenNow.grid[1]} patches; Shift and arrows choose one`);
    this.$(".legend").hidden = !values;
    this.$(".low").textContent = short(low);
    this.$(".high").textContent = short(high);
    this.$(".means").textContent = told.means;
    const how = this.told(layer, head);
    const badge = how.off ? "You switched this head off here: its map is computed, and adds nothing."
      : how.silent ? "A silent head: its gate is exactly 0 for this picture, so this map adds nothing." : "";
    this.$(".badge").hidden = !badge;
    this.$(".badge").textContent = badge;
    this.paintReadout();
  }

  paintReadout() {
    const at = this.hover ?? this.patch;
    const { look: seenNow } = this.shown;
    const values = seenNow.layers[this.layer].maps[this.head];
    const place = (n) => `row ${Math.floor(n / seenNow.grid[1])}, column ${n % seenNow.grid[1]}`;
    this.$(".readout").textContent = !values ? "" : at === null || at === undefined
      ? "Point at a patch for its value; click it to follow it through the layers."
      : `Patch in ${place(at)}: ${this.quantity()} ${values[at] === null ? "not a number" : values[at].toFixed(3)}`;
  }

  paintTiles() {
    const { layer, head, heads } = this;
    const told = this.shown.look.layers[layer];
    const box = this.$(".tiles");
    while (box.children.length > heads) box.lastElementChild.remove();
    while (box.children.length < heads) box.append(this.tile(box.children.length));
    box.setAttribute("aria-label", `Heads of layer ${layer}`);
    this.$(".heads-title").textContent = `The ${heads} heads of layer ${layer}`;
    const on = Array.from({ length: heads }, (_, k) => this.told(layer, k)).filter(({ off, silent }) => !off && !silent).length;
    this.$(".heads-words").textContent = this.gated
      ? `${on} of ${heads} are on for this picture. The bar is the gate: how much a head counts. A head at 0 adds nothing.`
      : `This operator has no gate: every head counts, unless you switch it off.${on < heads ? ` ${on} of ${heads} are on.` : ""}`;
    const { low, high } = this.scale(layer);
    [...box.children].forEach((tile, k) => {
      const how = this.told(layer, k);
      const [canvas, bar, words, toggle] = ["canvas", ".gate i", ".words", ".switch"].map((each) => tile.querySelector(each));
      const classes = ["tile", k === head && "chosen", how.silent && "silent", how.off && "off", how.set !== null && "forced"];
      tile.className = classes.filter(Boolean).join(" ");
      const style = { low, high, strength: state.strength, longest: 128, faint: how.silent || how.off };
      overlay(canvas, this.shown.picture, told.maps[k] ?? null, this.shown.look.grid, style);
      bar.style.width = `${100 * Math.min(Math.max(how.now ?? 1, 0), 1)}%`;
      const own = how.silent ? "silent" : how.now === null ? "on" : short(how.now);
      words.textContent = how.off ? "off" : how.set !== null ? `forced ${short(how.set)}` : own;
      tile.querySelector(".tick").style.left = `${100 * (how.was ?? 0)}%`;
      tile.querySelector(".tick").hidden = how.set === null || how.was === null;
      tile.querySelector(".pick").setAttribute("aria-label", `Head ${k}: ${how.words}`);
      tile.querySelector(".pick").title = `Head ${k}: ${how.words}`;
      toggle.setAttribute("aria-checked", !how.off);
      toggle.setAttribute("aria-label", `Head ${k} of layer ${layer}, ${how.words}`);
    });
  }

  tile(k) {
    const tile = document.createElement("div");
    const make = (name, className, text = "") => Object.assign(document.createElement(name), { className, textContent: text });
    const pick = Object.assign(make("button", "pick"), { type: "button", tabIndex: -1 });
    const gate = make("span", "gate");
    gate.append(make("i", ""), make("b", "tick"));
    const label = make("span", "label");
    label.append(make("span", "number", `head ${k}`), make("span", "words"));
    pick.append(make("canvas", ""), gate, label);
    const toggle = Object.assign(make("button", "switch live"), { type: "button" });
    toggle.setAttribute("role", "switch");
    pick.addEventListener("click", () => this.changed("place", { head: k, layer: this.layer }));
    toggle.addEventListener("click", () => this.toggle(this.layer, k));
    tile.append(pick, toggle);
    return tile;
  }

  paintForce() {
    const { layer, head } = this;
    const how = this.told(layer, head);
    const wish = forced(this.slot, layer, head);
    this.$(".force-words").textContent = `Head ${head} in layer ${layer}: ${how.words}.`;
    this.$(".dial").hidden = !this.gated;
    const value = wish ?? how.was ?? how.now ?? 0;
    for (const each of [".gate-range", ".gate-number"]) {
      const input = this.$(each);
      input.setAttribute("aria-label", `Gate of head ${head} in layer ${layer}`);
      if (each !== this.typing) input.value = each === ".gate-number" ? Number(value.toFixed(3)) : value;
    }
    const all = this.shown.look.layers.every((_, l) => forced(this.slot, l, head) === 0);
    this.$(".off-here").textContent = wish === null ? `Switch head ${head} off here` : `Give head ${head} back here`;
    this.$(".off-all").textContent = all ? `Head ${head} back in all layers` : `Head ${head} off in all layers`;
    this.$(".layer-off").textContent = this.wholeLayerOff() ? `All heads of layer ${layer} back` : `All heads of layer ${layer} off`;
  }

  wholeLayerOff() {
    return Array.from({ length: this.heads }, (_, k) => forced(this.slot, this.layer, k)).every((g) => g === 0);
  }

  paintDots() {
    const { layer, head, heads } = this;
    const { layers } = this.shown.look;
    const gates = layers.map((_, l) => Array.from({ length: heads }, (_unused, k) => {
      const how = this.told(l, k);
      const title = `Layer ${l}, head ${k}: ${how.words}`;
      return { size: Math.min(how.now ?? 0.3, 1), silent: how.silent, off: how.off, forced: how.set !== null, title };
    }));
    this.$(".dots-title").textContent = this.gated ? "Every gate" : "Every head";
    const silent = gates.flat().filter((each) => each.silent).length;
    const label = this.gated
      ? `Layers across, heads down. The larger a disc, the larger the gate; ${silent} of ${gates.flat().length} heads are silent (small dots).`
      : "Layers across, heads down. No gates here: every head is on unless you switch it off.";
    dots(this.$(".dots"), { gates, layer, head, label, room: this.rooms[0], pick: (l, k) => this.changed("place", { layer: l, head: k }) });
    this.$(".dots-words").textContent = `${label} Crosses are off by you${this.gated ? ", rings forced" : ""}. Click one to go there.`;
  }

  paintAnswer() {
    const { look: now, before } = this.shown;
    const [first, second] = now.top;
    const box = this.$(".top5");
    this.$(".said").textContent = `${first.class}, ${percent(first.probability)}`;
    box.replaceChildren(...now.top.map(({ class: name, index, probability }) => {
      const row = document.createElement("li");
      const [label, bar, fill, tick, number] = ["span", "span", "i", "b", "span"].map((each) => document.createElement(each));
      Object.assign(label, { className: "class", textContent: name, title: name });
      Object.assign(bar, { className: "track" });
      Object.assign(number, { className: "number", textContent: percent(probability) });
      fill.style.width = `${100 * probability}%`;
      tick.style.left = `${100 * before.probabilities[index]}%`;
      tick.hidden = now === before;
      bar.append(fill, tick);
      row.append(label, bar, number);
      return row;
    }));
    this.$(".margin").textContent = second
      ? `Margin ${(now.margin ?? 0).toFixed(3)}: ${first.class} leads ${second.class} by ${(100 * now.margin).toFixed(1)} points.${now === before ? "" : " Orange marks: before."}`
      : "";
    this.paintChanged();
  }

  paintChanged() {
    const { look: now, before } = this.shown;
    const table = this.$(".changed table");
    const nothing = now === before;
    table.hidden = nothing;
    if (nothing) {
      this.$(".changed-words").textContent = live
        ? "Nothing: every head is as the network has it. Switch one off and its effect is listed here."
        : "Nothing: every head is as the network has it.";
      return;
    }
    const names = new Map([...before.top, ...now.top].map((each) => [each.index, each.class]));
    const rows = [...names].map(([index, name]) => ({ name, old: before.probabilities[index], fresh: now.probabilities[index] }));
    rows.sort((a, b) => Math.max(b.old, b.fresh) - Math.max(a.old, a.fresh));
    table.tBodies[0].replaceChildren(...rows.map(({ name, old, fresh }) => {
      const row = document.createElement("tr");
      const texts = [name, percent(old), percent(fresh), points(fresh - old)];
      const cells = texts.map((text, i) => Object.assign(document.createElement(i ? "td" : "th"), { textContent: text }));
      cells[0].scope = "row";
      cells[0].title = name;
      cells[3].className = fresh < old - 5e-4 ? "down" : fresh > old + 5e-4 ? "up" : "";
      row.append(...cells);
      return row;
    }));
    const [old, fresh] = [before.top[0], now.top[0]];
    const count = Object.values(this.shown.gates).reduce((sum, heads) => sum + Object.keys(heads).length, 0);
    const kind = `${count} ${count === 1 ? "gate" : "gates"} set by you. `;
    const most = Math.max(...rows.map((row) => Math.abs(row.fresh - row.old)));
    this.$(".changed-words").textContent = kind + (most < 5e-4
      ? `The answer is still ${fresh.class}, and no probability here moved by as much as 0.1 points: for this picture the network does not need what you took.`
      : old.index === fresh.index
      ? `The answer is still ${fresh.class}; its probability moved by ${points(fresh.probability - old.probability)} points, the margin by ${points(now.margin - before.margin)}.`
      : `The answer was ${old.class} and is now ${fresh.class}.`);
  }

  paintRates() {
    const { rates: now, last, ratesBefore: first } = this.shown;
    const told = now ?? last;
    this.$(".curve").classList.toggle("stale", !now);
    this.$(".rate").value = state.rate;
    if (!told) { // nothing of this picture yet, and nothing of another
      for (const each of [".rates", ".certificates"]) this.$(each).replaceChildren();
      for (const each of [".certificate", ".convention", ".rate-words"]) this.$(each).textContent = "";
      return;
    }
    const values = told.rates[state.rate];
    const none = !values || values.every((x) => x === null);
    const svg = this.$(".rates");
    svg.classList.toggle("none", none);
    this.$(".rate-words").textContent = none ? "This quantity needs memberships, and the operator of this network has none." : RATES[state.rate];
    if (!none) {
      const series = [{ values, kind: "main", name: "now" }];
      const old = first?.rates[state.rate];
      if (old && first !== told) series.push({ values: old, kind: "before", name: "before you changed a head" });
      const unit = state.rate === "active" ? "heads" : "nats";
      const here = values[this.layer];
      const label = `${unit} by layer; ${here === null ? "none" : here.toFixed(2)} in layer ${this.layer}`;
      const range = state.rate === "active" ? { low: 0, high: this.heads } : {};
      curves(svg, { series, layer: this.layer, unit, label, room: this.rooms[1], format: (x) => x.toFixed(unit === "heads" ? 0 : 2), ...range });
      if (series.length > 1) this.$(".rate-words").textContent += " Dashed: before you changed a head.";
    } else svg.replaceChildren();
    const own = told.certificates.find((each) => each.startsWith(`Layer ${this.layer} `) || each.startsWith(`Layer ${this.layer}:`));
    this.$(".certificate").textContent = own ?? told.certificates[0] ?? "";
    this.$(".certificates").replaceChildren(...told.certificates.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
    this.$(".convention").textContent = [told.convention && `The curve: ${told.convention}.`, told.certified && `The sentences: ${told.certified}.`].filter(Boolean).join(" ");
    if (now) this.root.dataset.rates = this.shown.key;
  }

  paintPatch() {
    const { patch, head, heads, layer } = this;
    const { layers, grid } = this.shown.look;
    const svg = this.$(".patch");
    const some = patch !== null && layers.some((each) => each.maps.length);
    svg.toggleAttribute("hidden", !some);
    const what = this.quantity();
    if (!some) {
      this.$(".through-title").textContent = "One patch through the layers";
      this.$(".patch-words").textContent = "Click a patch of the map: how much it belongs to each head, layer by layer, is drawn here.";
      return;
    }
    const row = (k) => layers.map((each) => each.maps[k]?.[patch] ?? null);
    const series = Array.from({ length: heads }, (_, k) => ({ values: row(k), kind: k === head ? "main" : "other", name: `head ${k}` }));
    const place = `row ${Math.floor(patch / grid[1])}, column ${patch % grid[1]}`;
    this.$(".through-title").textContent = `Patch in ${place}, through the layers`;
    const ends = (name) => layers.map((each) => each[name]);
    const range = layers[layer].kind === "membership" ? { low: Math.min(0, ...ends("low")), high: Math.max(1, ...ends("high")) } : {};
    const label = `${what} of the patch in ${place} in head ${head}, layer by layer: ${row(head).map(short).join(", ")}`;
    curves(svg, { series, layer, unit: what, label, room: this.rooms[2], format: short, ...range });
    this.$(".patch-words").textContent = `Thick: head ${head}; thin: the other heads. Heads of the same number in two layers are different subspaces. Click another patch to follow that one.`;
    this.$(".patch").dataset.values = JSON.stringify(row(head));
  }
}
