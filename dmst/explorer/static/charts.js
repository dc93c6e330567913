/* Charts as SVG: curves over the layers, and the gates of every layer and head. Colours come from the style sheet. */

function node(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

/* At most about `wanted` round numbers from low to high. */
export function ticks(low, high, wanted = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

const clean = (x) => String(Number(x.toPrecision(6)));

/* series: [{values, name, kind}], kind one of main, before, other; null in values is a gap; room is the width there is. */
export function curves(svg, { series, layer, low, high, unit, label, room, format = clean }) {
  const [width, height] = [Math.max(room, 240), 190];
  const [left, right, top, bottom] = [46, 12, 20, 34];
  const numbers = series.flatMap((each) => each.values).filter((x) => x !== null);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", label);
  if (!numbers.length) return;
  let [least, most] = [low ?? Math.min(...numbers), high ?? Math.max(...numbers)];
  if (low === undefined && most - least < 1e-9) [least, most] = [least - 1, most + 1];
  if (low === undefined) [least, most] = [least - 0.06 * (most - least), most + 0.06 * (most - least)];
  const depth = Math.max(...series.map((each) => each.values.length));
  const x = (l) => left + (depth > 1 ? l / (depth - 1) : 0.5) * (width - left - right);
  const y = (value) => top + (1 - (value - least) / (most - least)) * (height - top - bottom);

  svg.append(node("text", { x: 2, y: 11, class: "unit" }, unit));
  for (const each of ticks(least, most)) {
    svg.append(node("line", { x1: left, x2: width - right, y1: y(each), y2: y(each), class: "rule" }));
    svg.append(node("text", { x: left - 7, y: y(each) + 4, "text-anchor": "end" }, clean(each)));
  }
  const every = Math.ceil(depth / 13);
  for (let l = 0; l < depth; l++) {
    if (l % every === 0) svg.append(node("text", { x: x(l), y: height - 17, "text-anchor": "middle", class: l === layer ? "here" : "" }, l));
  }
  svg.append(node("text", { x: (left + width - right) / 2, y: height - 2, "text-anchor": "middle" }, "layer"));
  svg.append(node("line", { x1: x(layer), x2: x(layer), y1: top - 4, y2: height - bottom, class: "marker" }));

  for (const { values, kind, name } of [...series].sort((a, b) => (a.kind === "main") - (b.kind === "main"))) {
    let path = "";
    values.forEach((value, l) => {
      if (value !== null) path += `${path && values[l - 1] !== null ? "L" : "M"}${x(l).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    const line = node("path", { d: path, class: `curve-line ${kind}` });
    line.append(node("title", {}, name));
    svg.append(line);
    if (kind !== "main") continue;
    values.forEach((value, l) => {
      if (value !== null) svg.append(node("circle", { cx: x(l), cy: y(value), r: l === layer ? 5 : 2.6, class: "point" }));
    });
    const now = values[layer];
    if (now === null || now === undefined) continue;
    const anchor = layer < depth * 0.2 ? "start" : layer > depth * 0.8 ? "end" : "middle";
    const beside = [values[layer - 1], values[layer + 1]].filter((each) => each !== null && each !== undefined);
    const valley = beside.length && beside.every((each) => each > now) && y(now) < height - bottom - 22;
    const at = valley ? y(now) + 19 : Math.max(y(now) - 10, 12);
    svg.append(node("text", { x: x(layer), y: at, "text-anchor": anchor, class: "value" }, format(now)));
  }
}

/* gates: [layer][head] -> {size 0..1, silent, off, forced, title}; pick(layer, head) when one is clicked. */
export function dots(svg, { gates, layer, head, label, room, pick }) {
  const [depth, count] = [gates.length, gates[0].length];
  const [left, top] = [30, 22];
  const cell = Math.min(34, Math.max(16, (Math.max(room, 240) - left - 4) / depth));
  const [width, height] = [left + depth * cell + 4, top + count * cell + 4];
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", label);
  svg.append(node("rect", { x: left + layer * cell, y: top, width: cell, height: count * cell, class: "band" }));
  svg.append(node("rect", { x: left, y: top + head * cell, width: depth * cell, height: cell, class: "band" }));
  const every = Math.ceil((depth * 18) / (depth * cell));
  const number = (x, y, anchor, text, here) => svg.append(node("text", { x, y, "text-anchor": anchor, class: here ? "here" : "" }, text));
  for (let l = 0; l < depth; l += every) number(left + (l + 0.5) * cell, 14, "middle", l, l === layer);
  for (let k = 0; k < count; k++) number(18, top + (k + 0.5) * cell + 4, "end", k, k === head);
  gates.forEach((heads, l) => heads.forEach(({ size, silent, off, forced, title }, k) => {
    const [cx, cy] = [left + (l + 0.5) * cell, top + (k + 0.5) * cell];
    const spot = node("g", { class: ["spot", silent && "silent", off && "off", forced && "forced"].filter(Boolean).join(" ") });
    spot.append(node("rect", { x: cx - cell / 2, y: cy - cell / 2, width: cell, height: cell, class: "catch" }));
    if (off) spot.append(node("path", { d: `M${cx - 4} ${cy - 4}L${cx + 4} ${cy + 4}M${cx + 4} ${cy - 4}L${cx - 4} ${cy + 4}` }));
    else spot.append(node("circle", { cx, cy, r: silent ? 1.6 : Math.max(2, Math.sqrt(Math.max(size, 0)) * (cell / 2 - 1.5)) }));
    spot.append(node("title", {}, title));
    spot.addEventListener("click", () => pick(l, k));
    svg.append(spot);
  }));
  svg.append(node("rect", { x: left + layer * cell, y: top + head * cell, width: cell, height: cell, rx: 4, class: "chosen" }));
}
