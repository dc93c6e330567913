/* One network's panel: it asks for what the state wants, keeps what it got, and turns clicks into changes of the state. */

import { greyed, ramp } from "./draw.js";
import { look, rates, seen, start } from "./net.js";
import { Painted } from "./paint.js";
import { forced, modelOf, setGate, state } from "./state.js";

const seconds = (s) => new Promise((done) => setTimeout(done, 1000 * s));
const frame = () => new Promise(requestAnimationFrame);
const painted = () => Promise.race([frame().then(frame), seconds(0.1)]); // a hidden tab has no frames

const answers = new Map(); // promises of what was asked, newest last

function once(key, ask) {
  if (!answers.has(key)) {
    const found = ask();
    answers.set(key, found);
    found.catch(() => answers.delete(key));
    if (answers.size > 80) answers.delete(answers.keys().next().value);
  }
  return answers.get(key);
}

export class Panel extends Painted {
  constructor(slot, changed) {
    super();
    this.slot = slot;
    this.changed = changed; // called after this panel altered the state
    this.root = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.wanted = this.shown = null;
    this.$ = (selector) => this.root.querySelector(selector);
    ramp(this.$(".ramp"));
    this.listen();
    let width = 0;
    new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width === width) return;
      width = contentRect.width;
      this.rooms = null;
      this.paintPlace();
    }).observe(this.root);
  }

  /* ---- asking ---- */

  want() {
    const wanted = { model: this.slot.model, image: state.image?.id, gates: this.slot.gates };
    const key = JSON.stringify(wanted);
    if (!wanted.image || key === this.wanted?.key) return;
    if (this.wanted && (wanted.model !== this.wanted.model || wanted.image !== this.wanted.image)) this.stop();
    if (this.shown?.model !== wanted.model) this.shown = null;
    this.other = this.shown !== null && this.shown.image !== wanted.image; // what is shown is of another picture
    this.wanted = { ...wanted, key };
    this.pull();
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
    this.asking = false;
  }

  /* One request at a time; what is wanted by the time it ends is asked next, so a dragged slider never queues. */
  async pull() {
    if (this.asking) return;
    const { signal } = (this.abort = new AbortController());
    this.asking = true;
    const slow = setTimeout(() => this.shown?.key === this.wanted.key || this.waiting(`Asking ${this.name()} …`), this.shown ? 400 : 0);
    try {
      while (!signal.aborted && (this.shown?.key !== this.wanted.key || !this.shown.rates)) await this.step(this.wanted, signal);
    } catch (error) {
      if (!signal.aborted) this.fault(error.message);
    } finally {
      if (!signal.aborted) this.asking = false;
      clearTimeout(slow);
    }
  }

  async step(wanted, signal) {
    const { model, image, gates, key } = wanted;
    const plain = JSON.stringify({ model, image, gates: {} });
    try {
      if (modelOf(this.slot).state !== "ready") await this.loaded(model, signal);
      if (this.shown?.key === key) {
        await painted(); // the answer comes first: rates take the cores for a while
        if (this.shown.key !== this.wanted.key) return;
        const ask = (name, set) => once(`rates ${name}`, () => rates(model, image, set, signal));
        const [now, first] = [await ask(key, gates), await ask(plain, {})];
        if (signal.aborted || this.shown.key !== this.wanted.key) return;
        Object.assign(this.shown, { rates: now, ratesBefore: first });
        this.paintRates();
        if (state.map === "gradient") this.paintMap(); // it comes with the rates
        this.prepare(image);
        return;
      }
      const ask = (name, set) => once(`look ${name}`, () => look(model, image, set, signal));
      const [now, before, picture] = await Promise.all([
        ask(key, gates), ask(plain, {}), once(`seen ${model} ${image}`, () => seen(model, image, signal)),
      ]);
      if (signal.aborted) return;
      const same = this.shown?.model === model && this.shown.image === image;
      const last = same ? this.shown.rates ?? this.shown.last : null;
      const grey = same ? this.shown.grey : greyed(picture);
      this.shown = { ...wanted, picture, grey, before, look: now, rates: null, last, ratesBefore: same ? this.shown.ratesBefore : null };
      this.other = false;
      this.waiting(null);
      this.changed("look", {}, this);
    } catch (error) {
      if (error.name === "AbortError") return; // by the other panel: asked again
      if (!error.loading) throw error;
      await this.loaded(model, signal);
    }
  }

  /* The picture as the other networks see it, while there is time: one of them may be wanted next. */
  prepare(image) {
    const others = state.models.filter((each) => each.state === "ready").slice(0, 4);
    for (const { id } of others) once(`seen ${id} ${image}`, () => seen(id, image));
  }

  async loaded(id, signal) {
    for (;;) {
      state.models = (await start()).models;
      const told = state.models.find((each) => each.id === id);
      if (told.state === "failed") throw new Error(told.words || `${told.name} could not be loaded.`);
      if (told.state === "ready" || signal.aborted) return;
      this.waiting(`Loading ${told.name} … the first time takes a few seconds.`);
      await seconds(0.25);
    }
  }

  waiting(words) {
    this.$(".wait").hidden = words === null;
    this.$(".wait p").textContent = words ?? "";
    this.$(".wait").classList.toggle("first", !this.shown);
    this.$(".fault").hidden = true;
    this.$(".body").hidden = !this.shown;
    this.root.setAttribute("aria-busy", words !== null);
    this.paintName();
  }

  fault(words) {
    if (this.other) this.shown = null; // an answer to another picture is no answer
    this.waiting(null);
    this.$(".fault").hidden = false;
    this.$(".fault p").textContent = words;
  }

  /* ---- acting ---- */

  toggle(layer = this.layer, head = this.head) {
    setGate(this.slot, layer, head, forced(this.slot, layer, head) === null ? 0 : null);
    this.changed("gates");
  }

  /* These heads of these layers off; back, where they all are off. */
  switchAll(layers, heads) {
    const gate = this.areOff(layers, heads) ? null : 0;
    for (const l of layers) for (const k of heads) setGate(this.slot, l, k, gate);
    this.changed("gates");
  }

  patchAt(event) {
    const box = this.$(".map").getBoundingClientRect();
    const share = (at, from, size) => Math.min(Math.max((at - from) / size, 0), 0.9999);
    return { x: share(event.clientX, box.left, box.width), y: share(event.clientY, box.top, box.height) };
  }

  listen() {
    const canvas = this.$(".map");
    const middle = (each, count) => (Math.floor(each * count) + 0.5) / count;
    const show = (hover) => {
      if (hover === this.hover || !this.shown) return;
      this.hover = hover;
      this.paintMap();
    };
    canvas.addEventListener("pointermove", (event) => {
      const [rows, columns] = this.shown.look.grid;
      const { x, y } = this.patchAt(event);
      show(Math.floor(y * rows) * columns + Math.floor(x * columns));
    });
    canvas.addEventListener("pointerleave", () => show(null));
    canvas.addEventListener("click", (event) => {
      const [rows, columns] = this.shown.look.grid;
      const { x, y } = this.patchAt(event);
      this.changed("place", { patch: { x: middle(x, columns), y: middle(y, rows) } });
    });
    for (const each of [".gate-range", ".gate-number"]) {
      this.$(each).addEventListener("input", (event) => {
        const value = event.target.valueAsNumber;
        const [least, most] = this.gateRange;
        if (!(value >= least && value <= most)) return;
        this.typing = each;
        setGate(this.slot, this.layer, this.head, value);
        this.changed("gates");
      });
      this.$(each).addEventListener("change", () => {
        this.typing = null;
        this.paintForce();
      });
    }
    this.$(".off-here").addEventListener("click", () => this.toggle());
    this.$(".off-all").addEventListener("click", () => this.switchAll(this.everyLayer, [this.head]));
    this.$(".layer-off").addEventListener("click", () => this.switchAll([this.layer], this.everyHead));
    this.$(".all-off").addEventListener("click", () => this.switchAll(this.everyLayer, this.everyHead));
    this.$(".rate").addEventListener("change", (event) => this.changed("place", { rate: event.target.value }));
    this.$(".retry").addEventListener("click", () => {
      this.waiting(`Asking ${this.name()} …`);
      this.pull();
    });
  }
}
