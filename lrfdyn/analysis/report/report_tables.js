// The tables of the report: the summary, the derived state, and the folded details.

const named = (kind, scope = "row") => html("th", { scope }, swatch(kind.index), kind.label);

const COLUMNS = [
  { field: "accuracy_mean", title: "Accuracy", unit: "test, %", best: 1,
    format: orDash((value) => (100 * value).toFixed(2)) },
  { field: "parameters", title: "Parameters", unit: "trained", best: -1, format: count },
  { field: "state_bytes", title: "State", unit: "derived", best: -1, format: bytes },
  { field: "peak_inference_bytes", title: "Peak memory", unit: "measured", best: -1, format: bytes },
  { field: "firing_rate", title: "Firing", unit: "per step", best: 0, format: percent(1) },
  { field: "energy_pj", title: "Energy", unit: `per ${noun}`, best: -1, format: joules },
  { field: "short_range_share", title: "Nearby", unit: "attention", best: 0, format: percent(1) },
  { field: "entropy_mean", title: "Entropy", unit: "nats", best: 0, format: twoDigits },
  { field: "images_per_second", title: "Speed", unit: `${noun}s/s`, best: 1,
    format: orDash((value) => (value >= 100 ? count(value) : short(value))) },
];

// What the summary shows of the parts of an entry.
for (const kind of kinds) {
  kind.energy_pj ??= kind.energy?.energy_pj;
  for (const field of ["short_range_share", "entropy_mean"]) kind[field] ??= kind.locality?.[field];
}

/** Return the text of the best value of a column; null where all attentions show the same. */
function bestOf({ field, best, format }) {
  const values = kinds.map((kind) => kind[field]).filter(isNumber);
  if (!best || new Set(values.map(format)).size < 2) return null;
  return format(best > 0 ? Math.max(...values) : Math.min(...values));
}

/** Return the two rows of an attention: its numbers, and the terms of its state that unfold under them. */
function summaryRows(kind, bests) {
  const id = `state-${kind.position}`;
  const terms = kind.state_terms ?? [];
  const options = Object.entries(kind.options ?? {}).map(([name, value]) => `${name} = ${plain(value)}`).join(", ");
  const more = html("tr", { class: "more", id, hidden: true }, html("td", { colspan: COLUMNS.length + 1 },
    html("ul", { class: "terms" }, terms.map((term) => html("li", {}, symbols(term.name), ": ",
      formula(term.formula), ` = ${count(term.elements)} elements, ${bytes(term.bytes)}`)),
    options ? html("li", {}, `Options: ${options}`) : null)));
  const unfold = html("button", { type: "button", class: "unfold", "aria-expanded": "false", "aria-controls": id,
    "aria-label": `Terms of the state of ${kind.label}`,
    title: terms.map((term) => `${term.name}: ${term.formula}`).join("\n"),
    click: () => {
      more.hidden = !more.hidden;
      unfold.setAttribute("aria-expanded", String(!more.hidden));
      unfold.textContent = more.hidden ? "▸" : "▾";
    } }, "▸");
  const cell = (column, i) => {
    const text = column.format(kind[column.field]);
    const spread = column.field === "accuracy_mean" && hasSpread(kind)
      ? html("span", { class: "plus" }, ` ± ${(100 * kind.accuracy_spread).toFixed(2)}`) : null;
    const best = bests[i] !== null && text === bests[i] ? { class: "best", title: "Best of the column" } : {};
    return html("td", {}, html("span", best, text, spread),
      column.field === "state_bytes" && terms.length ? unfold : null);
  };
  return html("tbody", {}, html("tr", {}, named(kind), COLUMNS.map(cell)), more);
}

function summary() {
  if (!kinds.length) return;
  const bests = COLUMNS.map(bestOf);
  const bodies = new Map(kinds.map((kind, i) => [kind, summaryRows({ ...kind, position: i }, bests)]));
  const table = html("table", { class: "pinned compact" });
  const sortBy = (column, header) => {
    const rising = header.getAttribute("aria-sort") === "none" ? (column.best ?? -1) < 0
      : header.getAttribute("aria-sort") === "descending";
    for (const other of table.tHead.rows[0].cells) {
      other.setAttribute("aria-sort", other === header ? (rising ? "ascending" : "descending") : "none");
      other.querySelector(".arrow").textContent = other !== header ? "↕" : rising ? "↑" : "↓";
    }
    const order = (a, b) => {
      const [one, two] = [a[column.field], b[column.field]];
      if (typeof one === "string") return (rising ? 1 : -1) * one.localeCompare(two);
      // Missing values go last either way.
      if (!isNumber(one) || !isNumber(two)) return Number(isNumber(two)) - Number(isNumber(one));
      return rising ? one - two : two - one;
    };
    table.append(...[...kinds].sort(order).map((kind) => bodies.get(kind)));
  };
  const headers = [{ field: "label", title: "Attention", unit: "" }, ...COLUMNS].map((column) => {
    const click = () => sortBy(column, header);
    const header = html("th", { scope: "col", "aria-sort": "none" },
      html("button", { type: "button", class: "sort", title: "Sort by this column", click }, column.title,
        html("span", { class: "arrow", "aria-hidden": "true" }, "↕"), html("small", {}, column.unit)));
    return header;
  });
  table.append(html("thead", {}, html("tr", {}, headers)), ...bodies.values());
  const batch = isNumber(results.batch) ? `a batch of ${plural(results.batch, noun)}` : "one batch";
  const accuracy = !seeds ? "No accuracy is known of these models." : seeds > 1
    ? `Accuracy is the mean over ${seeds} seeds ± ${spreadName}; means within the spread of each other do not differ.`
    : "One seed per attention: small differences in accuracy mean nothing.";
  section("summary", "Summary").append(scrolling("Summary table", table), html("p", { class: "soft" }, `${accuracy} ` +
    (kinds.length > 1 ? "The best value of each column is marked: the highest accuracy and speed, the lowest of " +
      "parameters, memory and energy. " : "") +
    "State is what one attention layer must hold (▸ unfolds its terms), peak memory that of the whole model at batch 1; " +
    "nearby is the share of attention at short distance. Speed is measured on the machine above, in the implementation " +
    `that also trains: the fastest of up to seven evaluation passes over ${batch}.`));
}

function stateTable() {
  const listed = kinds.filter((kind) => (kind.state_terms ?? []).length);
  if (!listed.length) return;
  const body = (kind) => {
    const terms = kind.state_terms;
    const elements = terms.reduce((sum, term) => sum + term.elements, 0);
    const sum = terms.length < 2 ? [] : [html("tr", { class: "total" },
      html("td", { class: "text", colspan: 2 }, "Sum"), html("td", {}, count(elements)),
      html("td", {}, bytes(kind.state_bytes)))];
    const name = fill(named(kind, "rowgroup"), { rowspan: terms.length + sum.length }, []);
    return html("tbody", {}, terms.map((term, i) => html("tr", {}, i === 0 ? name : null,
      html("td", { class: "text" }, symbols(term.name)), html("td", { class: "text" }, formula(term.formula)),
      html("td", {}, count(term.elements)), html("td", {}, bytes(term.bytes)))), sum);
  };
  const heads = html("tr", {}, heading("Attention"), heading("Term", "text"), heading("Formula", "text"),
    heading("Elements"), heading("Memory"));
  section("state", "Derived state, term by term",
    "What one attention layer must keep for one time step, derived from its formulas and not measured.").append(
    scrolling("Derived state by term", html("table", { class: "pinned" }, html("thead", {}, heads), listed.map(body))));
}

/** Return the names of all lists, one that only some have behind the one that it follows there. */
function inOrder(lists) {
  const all = [];
  for (const names of lists) {
    names.forEach((name, i) => {
      if (!all.includes(name)) all.splice(i ? all.indexOf(names[i - 1]) + 1 : 0, 0, name);
    });
  }
  return all;
}

/** Return the name of a layer, its end as a formula where it is one: "blocks.0.attn.k^T v". */
function layerName(name) {
  const end = name.lastIndexOf(".") + 1;
  return name.includes("^", end) ? [name.slice(0, end), formula(name.slice(end))] : name;
}

/** Return a table of one number per layer and model, with bars that compare within it. */
function layerTable(label, valuesOf, format) {
  const shown = kinds.filter((kind) => Object.keys(valuesOf(kind)).length);
  const values = shown.map(valuesOf);
  const layers = inOrder(values.map(Object.keys));
  const largest = Math.max(1e-9, ...values.flatMap(Object.values).filter(isNumber));
  return grid(label, ["Layer", ...shown.map((kind) => [swatch(kind.index), kind.label])],
    layers.map((layer) => [html("th", { scope: "row", class: "code" }, layerName(layer)), ...shown.map((kind, i) => {
      const value = values[i][layer];
      return numberCell(value, format(value),
        { class: `cellbar s${kind.index}`, style: `--v: ${isNumber(value) ? value / largest : 0}` });
    })]));
}

function details() {
  if (!kinds.length) return;
  const parent = section("details", "Details");
  if ((results.runs ?? []).length) {
    const labels = new Map(kinds.map((kind) => [kind.key, kind]));
    const heads = ["Attention", "Seed", "Test accuracy", "Training time", "Weights"];
    parent.append(folded("All runs", grid("All runs", heads, results.runs.map((run) => [
      labels.has(run.attention) ? named(labels.get(run.attention)) : html("th", { scope: "row" }, plain(run.attention)),
      numberCell(run.seed, plain(run.seed)), numberCell(run.test_accuracy, percent(2)(run.test_accuracy)),
      numberCell(run.train_seconds, duration(run.train_seconds)), html("td", { class: "code" }, plain(run.weights))]))));
  }
  const groups = { Data: results.data, Model: { name: results.model?.name, ...results.model?.config,
    grid: results.model?.grid?.join(" × "), time_steps: results.model?.time_steps }, Recipe: results.recipe,
  Machine: results.machine };
  const list = (values) => html("dl", {}, Object.entries(values ?? {}).map(([key, value]) =>
    [html("dt", {}, key.replaceAll("_", " ")), html("dd", {}, plain(value))]));
  parent.append(folded("Configuration", html("div", { class: "groups" },
    Object.entries(groups).map(([name, values]) => html("div", {}, html("h3", {}, name), list(values))))));
}
