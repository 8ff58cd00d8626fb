// Synaptic operations, energy and firing rates: the parts of every model, and layer by layer.

/** Return the part of the network that a layer belongs to. */
function partOf({ name, kind }) {
  const names = name.split(".");
  if (kind === "attention") return "inside attention";
  if (names.includes("attn") || names.includes("attention")) return "projections";
  if (names.includes("mlp")) return "MLP";
  return names[0] === "head" ? "classifier" : "stem and other convolutions";
}

const PART_NAMES = ["stem and other convolutions", "projections", "inside attention", "MLP", "classifier"];

/** Return one stacked bar per item {label, index, parts: [[part, value, more]]}, the colour being that of the part. */
function stackChart(width, { label, items, parts, format }) {
  const row = 46;
  const most = Math.max(...items.map((item) => item.parts.reduce((sum, [, value]) => sum + value, 0)), 1e-9);
  const scale = (value) => (value / most) * (width - 4);
  const nodes = items.map((item, i) => {
    let left = 0;
    const total = item.parts.reduce((sum, [, value]) => sum + value, 0);
    const blocks = item.parts.filter(([, value]) => value > 0).map(([part, value, more]) => {
      const block = tipOn(svg("rect", { class: `bar p${PART_NAMES.indexOf(part)}`, x: left, y: row * i + 20,
        width: Math.max(0.5, scale(value)), height: 14 }), `${item.label}, ${part}: ${format(value)}`,
      () => [`${item.label}: ${part}`, [[null, "energy", format(value)],
        [null, "share", percent(1)(value / total)], ...more]]);
      left += scale(value);
      return block;
    });
    return [mark(item.index, 6, row * i + 9, 5),
      svg("text", { class: "name", x: 18, y: row * i + 13 }, clip(item.label, Math.floor((width - 100) / 7.6))),
      svg("text", { class: "name", x: width - 4, y: row * i + 13, "text-anchor": "end" }, format(total)), ...blocks];
  });
  let [x, y] = [0, row * items.length + 16];
  const legend = parts.map((part) => {
    const needed = 36 + 6.6 * part.length;
    if (x > 0 && x + needed > width) [x, y] = [0, y + 20];
    const entry = [svg("rect", { class: `bar p${PART_NAMES.indexOf(part)}`, x, y: y - 10, width: 12, height: 12, rx: 2 }),
      svg("text", { x: x + 17, y }, part)];
    x += needed;
    return entry;
  });
  return canvasOf(width, y + 8, label, nodes, legend);
}

function energySection() {
  const counted = kinds.filter((kind) => kind.energy?.layers?.length);
  if (!counted.length) return;
  const parent = section("energy", "Operations and energy");
  const parts = PART_NAMES.filter((part) => counted.some(({ energy }) => energy.layers.map(partOf).includes(part)));
  const items = counted.map((kind) => ({ label: kind.label, index: kind.index, parts: parts.map((part) => {
    const layers = kind.energy.layers.filter((layer) => partOf(layer) === part);
    const sum = (field) => layers.reduce((total, layer) => total + layer[field], 0);
    return [part, sum("energy_pj"), [[null, "accumulates", large(sum("accumulates"))],
      [null, "multiply-accumulates", large(sum("multiply_accumulates"))]]];
  }) }));
  figure(parent, { id: "energy-parts", title: `Energy per ${noun}`,
    caption: `Energy of the synaptic operations of one ${noun} over all time steps, from the spikes that were sent. The ` +
      "colours are parts of the network, not models. The assumptions are listed below.",
    draw: (width) => stackChart(width, { label: `Energy per ${noun} by part of the network`, items, parts,
      format: joules }),
    table: () => [["model", "layer", "kind", "accumulates", "multiply_accumulates", "energy_pj"],
      ...counted.flatMap(({ label, energy }) => energy.layers.map((layer) => [label, layer.name, layer.kind,
        layer.accumulates, layer.multiply_accumulates, layer.energy_pj]))] });
  parent.append(grid(`Operations per ${noun}`, ["Model", "Accumulates", "Multiply-accumulates", "Energy"],
    counted.map((kind) => [named(kind), ...["accumulates", "multiply_accumulates"].map((field) =>
      numberCell(kind.energy[field], large(kind.energy[field]))),
    numberCell(kind.energy.energy_pj, joules(kind.energy.energy_pj))])));
  parent.append(folded("What is counted, and what is not", html("ul", { class: "notes" },
    (counted[0].energy.assumptions ?? []).map((line) => html("li", {}, prose(line))))));
  parent.append(folded("Energy by layer", html("p", { class: "soft" },
    `Energy per ${noun}. The bars compare within the table; a click on a heading sorts.`),
  layerTable("Energy by layer",
    ({ energy }) => Object.fromEntries((energy?.layers ?? []).map((layer) => [layer.name, layer.energy_pj])), joules)));
}

function firingSection() {
  const listed = kinds.filter((kind) => Object.keys(kind.firing_by_layer ?? {}).length);
  if (!listed.length) return;
  const parent = section("firing", "Firing rates");
  const all = listed.map((kind) => ({ ...kind, points: Object.entries(kind.firing_by_layer).map(([name, y], i, list) =>
    ({ x: list.length > 1 ? i / (list.length - 1) : 0, y, name })).filter((point) => isNumber(point.y)) }));
  figure(parent, { id: "firing-rates", title: "Firing rate through the network", legend: all,
    caption: "Share of neurons that spike in a time step, from the first neuron layer to the last.",
    draw: (width, { hidden }) => {
      const series = all.filter(({ key }) => !hidden.has(key));
      const high = rangeOf([0, ...(series.length ? series : all).flatMap(({ points }) => points.map(({ y }) => y))])[1];
      return lineChart(width, { label: "Firing rate against depth", series, height: 300,
        tipTitle: (x) => `At ${percent(0)(x)} of the depth`,
        x: { label: "Depth (first to last neuron layer)", range: [0, 1], format: percent(0) },
        y: { label: "Firing rate", range: [0, high], format: percent(0),
          tip: ({ y, name }) => `${percent(1)(y)}, ${name}` } });
    },
    table: () => [["model", "layer", "firing_rate"], ...all.flatMap(({ label, points }) =>
      points.map((point) => [label, point.name, point.y]))] });
  parent.append(folded("Firing rate by layer", html("p", { class: "soft" },
    "Mean share of neurons that spike in a time step. The bars compare within the table; a click on a heading sorts."),
  layerTable("Firing rate by layer", (kind) => kind.firing_by_layer ?? {}, percent(1))));
}
