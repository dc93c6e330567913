/* What a panel shows: every sentence, map and chart, painted from the answers it got and the state. */

import { curves, dots } from "./charts.js";
import { groupColour, overlay } from "./draw.js";
import { countChanges, forced, groupsOff, modelOf, state, writeGates } from "./state.js";

const RATES = {
  variational: "R_var: what it costs, in nats, to describe the tokens within the heads' subspaces, at the input of each layer. A lower rate is more compact; it is not accuracy.",
  complete: "R+: R_var plus the cost of what lies outside the subspaces, in nats.",
  coding: "R: what it costs, in nats, to describe all tokens as one group. Grouping should cost less.",
  active: "How many heads are on (gate not 0) for this picture.",
};
const MIXTURE = "R_mix: what it costs, in nats, to describe the tokens by the groups of the heads, each around its mean, at the input of each layer. A lower rate is more compact; it is not accuracy.";
const SCORED = "Measured on 359 digits (dmst analyze scored): the gradient points best at the patches that an answer needs. Memberships show grouping, and point at those patches little better than chance.";
const NEEDED = 0.05; // of a probability: with a smaller loss an answer does not need what was switched off
const percent = (p) => (p === null ? "not a number" : p > 0 && p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);
const points = (p) => `${Math.abs(p) < 5e-4 ? "" : p < 0 ? "−" : "+"}${(100 * Math.abs(p)).toFixed(1)}`;
const signed = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x).toPrecision(2)}`;
const short = (g) => (g === null || g === undefined ? "–" : g !== 0 && Math.abs(g) < 0.005 ? "< 0.01" : g.toFixed(2));

/* Of a panel: root, $, slot, shown ({model, image, gates, look, before, rates, picture, grey}), hover, typing, changed. */
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

  get everyLayer() {
    return this.shown.look.layers.map((_, l) => l);
  }

  get everyHead() {
    return Array.from({ length: this.heads }, (_, k) => k);
  }

  /* By the wish of the user; `shown` is what was computed. */
  areOff(layers, heads, gates = this.slot.gates) {
    return layers.every((l) => heads.every((k) => gates[l]?.[k] === 0));
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

  /* Of layers whose heads have groups: {groups, mass, nearest, pull} of a head; null in others. */
  groups(layer = this.layer, head = this.head) {
    const told = this.shown.look.layers[layer];
    return told.groups ? { groups: told.groups[head], mass: told.mass[head], nearest: told.nearest[head], pull: told.pull[head] } : null;
  }

  /* Where gates lie in this network: 0 to 1, or further where it has others. */
  get gateRange() {
    const all = this.shown.look.layers.flatMap((each) => each.computed_gate ?? []).filter((g) => g !== null);
    return [Math.floor(100 * Math.min(0, ...all)) / 100, Math.ceil(100 * Math.max(1, ...all)) / 100];
  }

  /* What a head does in a layer, and by whose will. */
  told(layer, head) {
    const { gate, computed_gate: computed } = this.gated ? this.shown.look.layers[layer] : {};
    const set = this.shown.gates[layer]?.[head] ?? null;
    const was = computed?.[head] ?? null;
    const now = gate?.[head] ?? set;
    const [off, silent] = [set === 0, set === null && now === 0];
    const before = was === null ? "" : was === 0 ? " (silent without you)" : ` (${short(was)} without you)`;
    const own = silent ? "silent" : now === null ? "on" : `gate ${short(now)}`;
    const words = off ? `off${before}` : set !== null ? `gate set to ${short(set)}${before}` : own;
    return { now, was, set, off, silent, words };
  }

  /* ---- painting ---- */

  paintName() {
    const told = modelOf(this.slot);
    if (!told) return;
    this.$(".name").textContent = told.name;
    const size = told.image_size ? `, sees ${told.image_size[1]} × ${told.image_size[0]} pixels` : "";
    this.$(".facts").textContent = told.depth
      ? `${told.operator} attention, ${told.depth} layers of ${told.heads} heads, ${told.parameters.toLocaleString("en")} parameters${size}`
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
    const told = this.shown.look.layers[layer];
    return told.kind === "attention" ? "attention received" : told.groups ? "membership in its group" : "membership";
  }

  /* What the large map shows: its values and scale, its name, and what it means. */
  get large() {
    const { layer, head } = this;
    const { look, rates } = this.shown;
    if (state.map === "gradient") { // comes with the rates; until then none is shown: the last one is of another answer
      const { map = null, low, high } = rates?.gradient ?? {};
      const name = look.top[0].class;
      const means = `The gradient: how much each patch moves the score of ${name}, the answer. Yellow patches raise it, dark blue ones lower it.`;
      return { values: map, low, high, quantity: "gradient", title: `gradient for ${name}`, means: `${means} ${SCORED}`, ends: ["lowers", "raises"] };
    }
    const told = look.layers[layer];
    const { low, high } = this.scale(layer);
    const values = told.maps[head] ?? null;
    const title = values ? `${told.groups ? "groups" : this.quantity()}, layer ${layer}, head ${head}` : `the picture as ${this.name()} sees it`;
    const groups = told.groups?.[head];
    const off = groupsOff(this.shown.gates, layer, head);
    return { values, low, high, groups, off, quantity: this.quantity(), title, means: told.means, ends: [short(low), short(high)] };
  }

  paintMap() {
    const { look: { grid }, picture, grey } = this.shown;
    const { values, low, high, groups, off, title, means, ends } = this.large;
    const marks = groups && this.patch !== null ? this.groups().nearest[groups[this.patch]].map((patch) => ({ patch, dashed: true })) : [];
    if (this.hover !== undefined && this.hover !== null) marks.push({ patch: this.hover, thin: true });
    if (this.patch !== null) marks.push({ patch: this.patch });
    overlay(this.$(".map"), values ? grey : picture, values, grid, { low, high, groups, off, strength: state.strength, marks });
    this.$(".see-title").textContent = title[0].toUpperCase() + title.slice(1);
    this.$(".map").setAttribute("aria-label", `${title}; ${grid[0]} by ${grid[1]} patches; Shift and arrow keys choose one`);
    this.$(".legend").hidden = !values || Boolean(groups);
    [this.$(".low").textContent, this.$(".high").textContent] = ends;
    this.$(".means").textContent = means;
    const how = this.told(this.layer, this.head);
    const badge = state.map === "gradient" ? "" : how.off ? "You switched this head off. Its map is still computed, but it adds nothing."
      : how.silent ? "This head is silent: its gate is exactly 0 for this picture, so it adds nothing." : "";
    this.$(".badge").hidden = !badge;
    this.$(".badge").textContent = badge;
    this.paintReadout();
  }

  paintReadout() {
    const at = this.hover ?? this.patch;
    const [, columns] = this.shown.look.grid;
    const { values, quantity, groups } = this.large;
    const place = (n) => `row ${Math.floor(n / columns)}, column ${n % columns}`;
    const number = (x) => (x === null ? "not a number" : quantity === "gradient" ? signed(x) : x.toFixed(3));
    this.$(".readout").textContent = !values ? "" : at === null || at === undefined
      ? "Point at a patch to read its value. Click it to follow it through the layers."
      : groups ? `Patch in ${place(at)}: group ${groups[at]}, membership ${number(values[at])}`
      : `Patch in ${place(at)}: ${quantity} ${number(values[at])}`;
    this.$(".group-words").hidden = !groups || this.patch === null;
    if (groups && this.patch !== null) this.$(".group-words").textContent = this.groupWords(groups[this.patch], place);
  }

  /* Of the chosen patch, in the chosen head. */
  groupWords(group, place) {
    const { mass, nearest, pull } = this.groups();
    const off = groupsOff(this.shown.gates, this.layer, this.head).includes(group);
    const mean = pull.reduce((sum, each) => sum + each, 0) / pull.length;
    return `Group ${group} has mass ${short(mass[group])}, of ${pull.length + this.shown.look.prefix} tokens. ${off ? "You switched it off, so it moves nothing. " : ""}`
      + `The patches nearest to its mean have a dashed frame: ${nearest[group].map(place).join("; ")}. `
      + `The head moves this patch by ${pull[this.patch].toPrecision(2)} (mean of all patches: ${mean.toPrecision(2)}).`;
  }

  paintTiles() {
    const { layer, head, heads } = this;
    const told = this.shown.look.layers[layer];
    const box = this.$(".tiles");
    while (box.children.length > heads) box.lastElementChild.remove();
    while (box.children.length < heads) box.append(this.tile(box.children.length));
    box.setAttribute("aria-label", `Heads of layer ${layer}`);
    this.$(".heads-title").textContent = `The ${heads} heads of layer ${layer}`;
    const all = Array.from({ length: heads }, (_, k) => this.told(layer, k));
    const on = all.filter(({ off, silent }) => !off && !silent).length;
    const signed = all.some(({ now }) => now < 0) ? " Gates below 0 have bars too: a bar shows the size without the sign." : "";
    this.$(".heads-words").textContent = this.gated
      ? `${on} of ${heads} heads are on for this picture. The bar shows the gate: how much a head counts. A silent head has gate 0 and adds nothing.${signed}`
      : `This network has no gate: every head counts, unless you switch it off.${on < heads ? ` ${on} of ${heads} are on.` : ""}`;
    const { low, high } = this.scale(layer);
    const most = Math.max(...this.gateRange);
    const share = (g) => Math.min(Math.abs(g) / most, 1);
    [...box.children].forEach((tile, k) => {
      const how = this.told(layer, k);
      const [canvas, bar, words, toggle] = ["canvas", ".gate i", ".words", ".switch"].map((each) => tile.querySelector(each));
      const classes = ["tile", k === head && "chosen", how.silent && "silent", how.off && "off", how.set !== null && "forced"];
      tile.className = classes.filter(Boolean).join(" ");
      const groups = { groups: told.groups?.[k], off: groupsOff(this.shown.gates, layer, k) };
      const style = { low, high, ...groups, strength: state.strength, longest: 128, faint: how.silent || how.off };
      const values = told.maps[k] ?? null;
      overlay(canvas, values ? this.shown.grey : this.shown.picture, values, this.shown.look.grid, style);
      bar.style.width = `${100 * share(how.now ?? most)}%`;
      const own = how.silent ? "silent" : how.now === null ? "on" : short(how.now);
      words.textContent = how.off ? "off" : how.set !== null ? `set ${short(how.set)}` : own;
      tile.querySelector(".tick").style.left = `${100 * share(how.was ?? 0)}%`;
      tile.querySelector(".tick").hidden = how.set === null || how.was === null;
      tile.querySelector(".pick").setAttribute("aria-label", `Head ${k}: ${how.words}`);
      tile.querySelector(".pick").title = `Head ${k}: ${how.words}`;
      toggle.dataset.state = how.off ? "off" : how.silent ? "silent" : "on";
      toggle.setAttribute("aria-checked", toggle.dataset.state === "on");
      toggle.setAttribute("aria-label", `Head ${k} of layer ${layer}: ${how.words}`);
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
    const toggle = Object.assign(make("button", "switch"), { type: "button" });
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
      [input.min, input.max] = this.gateRange;
      if (each !== this.typing) input.value = each === ".gate-number" ? Number(value.toFixed(3)) : value;
    }
    const { everyLayer: layers, everyHead: heads } = this;
    const act = (name, what, back) => (this.$(name).textContent = `${back ? "Restore" : "Switch off"} ${what}`);
    act(".off-here", `head ${head} here`, wish !== null);
    act(".off-all", `head ${head} in all layers`, this.areOff(layers, [head]));
    act(".layer-off", `all heads of layer ${layer}`, this.areOff([layer], heads));
    act(".all-off", `all ${layers.length * heads.length} heads`, this.areOff(layers, heads));
    this.paintGroups();
  }

  /* One switch for each group of the chosen head, in its colour. */
  paintGroups() {
    const { layer, head } = this;
    const told = this.groups();
    this.$(".group-switches").hidden = !told;
    if (!told) return;
    const box = this.$(".groups");
    while (box.children.length > told.mass.length) box.lastElementChild.remove();
    while (box.children.length < told.mass.length) box.append(this.groupSwitch(box.children.length));
    const off = groupsOff(this.slot.gates, layer, head);
    [...box.children].forEach((each, g) => {
      each.setAttribute("aria-checked", !off.includes(g));
      each.classList.toggle("here", this.patch !== null && told.groups[this.patch] === g);
      each.title = `Group ${g} of head ${head}: mass ${short(told.mass[g])}${off.includes(g) ? ", off" : ""}`;
      each.setAttribute("aria-label", each.title);
    });
  }

  groupSwitch(group) {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: group });
    const [red, green, blue] = groupColour(group);
    made.setAttribute("role", "switch");
    made.style.setProperty("--group", `rgb(${red} ${green} ${blue})`);
    made.style.setProperty("--on-group", 0.299 * red + 0.587 * green + 0.114 * blue > 120 ? "#000" : "#fff");
    made.addEventListener("click", () => this.toggle(this.layer, `${this.head}.${group}`));
    return made;
  }

  paintDots() {
    const { layer, head, heads } = this;
    const { layers } = this.shown.look;
    const most = Math.max(...this.gateRange);
    const gates = layers.map((_, l) => Array.from({ length: heads }, (_unused, k) => {
      const how = this.told(l, k);
      const title = `Layer ${l}, head ${k}: ${how.words}`;
      return { size: Math.min(Math.abs(how.now ?? 0.3 * most) / most, 1), silent: how.silent, off: how.off, forced: how.set !== null, title };
    }));
    this.$(".dots-title").textContent = this.gated ? "All gates" : "All heads";
    const silent = gates.flat().filter((each) => each.silent).length;
    const label = this.gated
      ? `Columns are layers, rows are heads. The size of a disc shows the size of the gate. ${silent} of ${gates.flat().length} heads are silent (small dots).`
      : "Columns are layers, rows are heads. There are no gates here: every head is on unless you switch it off.";
    dots(this.$(".dots"), { gates, layer, head, label, room: this.rooms[0], pick: (l, k) => this.changed("place", { layer: l, head: k }) });
    const crosses = gates.flat().some((each) => each.off) ? " You switched off the heads with a cross." : "";
    const rings = gates.flat().some((each) => each.forced && !each.off) ? " You set the gates of the heads with a ring." : "";
    this.$(".dots-words").textContent = `${label}${crosses}${rings} Click a head to go to it.`;
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
      ? `Margin ${(now.margin ?? 0).toFixed(3)}: ${first.class} leads ${second.class} by ${(100 * now.margin).toFixed(1)} points.${now === before ? "" : " The orange marks show the probabilities before your change."}`
      : "";
    this.paintChanged();
  }

  paintChanged() {
    const { look: now, before } = this.shown;
    const table = this.$(".changed table");
    const nothing = now === before;
    table.hidden = nothing;
    if (nothing) {
      this.$(".changed-words").textContent = "Nothing yet. Switch heads off, and this part says what the answer loses.";
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
    const most = Math.max(...rows.map((row) => Math.abs(row.fresh - row.old)));
    this.$(".changed-words").textContent = this.areOff(this.everyLayer, this.everyHead, this.shown.gates)
      ? this.withoutHeads(old, fresh)
      : this.withGates(most, old, fresh, now.margin - before.margin);
  }

  withGates(most, old, fresh, margin) {
    const { heads, groups } = countChanges(this.shown.gates);
    const told = [heads && `set ${heads} ${heads === 1 ? "gate" : "gates"}`, groups && `switched off ${groups} ${groups === 1 ? "group" : "groups"}`];
    const kind = `You ${told.filter(Boolean).join(" and ")}. `;
    if (old.index !== fresh.index) return `${kind}The answer was ${old.class} and is now ${fresh.class}.`;
    if (most < 5e-4) return `${kind}The answer is still ${fresh.class}, and no probability changed by 0.1 points or more: for this picture the network does not need what you switched off.`;
    return `${kind}The answer is still ${fresh.class}. Its probability changed by ${points(fresh.probability - old.probability)} points, the margin by ${points(margin)}.`;
  }

  /* What all heads do for this picture, seen by doing without them. */
  withoutHeads(old, fresh) {
    const all = `With all ${this.everyLayer.length * this.everyHead.length} heads off the answer`;
    const [was, is] = [percent(old.probability), percent(fresh.probability)];
    if (old.index !== fresh.index) return `${all} changes from ${old.class} (${was}) to ${fresh.class} (${is}): this picture needs the heads.`;
    const still = `${all} is still ${fresh.class}, ${is} (${was} with them)`;
    return fresh.probability < old.probability - NEEDED
      ? `${still}. For this picture the stem and the feed-forward layers find the answer, and the heads make it surer.`
      : `${still}. For this picture the stem and the feed-forward layers do the work: the heads add nothing that the answer needs.`;
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
    this.$(".rate option").textContent = this.groups() ? "the groups (R_mix)" : "the subspaces (R_var)";
    const values = told.rates[state.rate];
    const none = !values || values.every((x) => x === null);
    const svg = this.$(".rates");
    svg.classList.toggle("none", none);
    this.$(".rate-words").textContent = none ? `This rate ${this.groups() ? "is not defined for groups with means" : "needs memberships, and this network has none"}.` : state.rate === "variational" && this.groups() ? MIXTURE : RATES[state.rate];
    if (!none) {
      const series = [{ values, kind: "main", name: "now" }];
      const old = first?.rates[state.rate];
      if (old && first !== told) series.push({ values: old, kind: "before", name: "before your change" });
      const unit = state.rate === "active" ? "heads" : "nats";
      const here = values[this.layer];
      const label = `${unit} by layer; ${here === null ? "none" : here.toFixed(2)} in layer ${this.layer}`;
      const range = state.rate === "active" ? { low: 0, high: this.heads } : {};
      curves(svg, { series, layer: this.layer, unit, label, room: this.rooms[1], format: (x) => x.toFixed(unit === "heads" ? 0 : 2), ...range });
      if (series.length > 1) this.$(".rate-words").textContent += " The dashed line shows the rate before your change.";
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
      this.$(".patch-words").textContent = `Click a patch of the map. This part then shows how much it belongs to ${this.groups() ? "its group in " : ""}each head, layer by layer.`;
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
    this.$(".patch-words").textContent = `The thick line is head ${head}, the thin lines are the other heads. Heads with the same number in two layers are different subspaces. Click another patch to follow it.`;
    this.$(".patch").dataset.values = JSON.stringify(row(head));
  }
}
