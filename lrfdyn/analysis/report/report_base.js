"use strict";
// Shared by all parts of the page: elements, number formats, the tooltip, and the frame of a figure.

// Text from the results only ever enters the page as text nodes and attributes, never as markup.
const SVG_NAMESPACE = document.getElementById("mark").namespaceURI;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return node;
}

function html(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

// ---- formulas ----

const MATH_NAMESPACE = new DOMParser().parseFromString("<math></math>", "text/html").body.firstChild.namespaceURI;
const math = (tag, ...children) => fill(document.createElementNS(MATH_NAMESPACE, tag), {}, children);
// Names in capitals, functions, words, single letters, numbers, dots, fractions, signs.
const TOKENS = /[A-Z]{2,}(?:-[A-Z][A-Za-z]+)*|log|exp|[a-z]{2,}(?:[ -]+[a-z]{2,})*|\p{L}|\d+(?:\.\d+)?|\.\.| \/ |\S/gu;

/** Return a text such as "d^2 / h" or "q (k^T v)" as MathML, with the text itself as its annotation. */
function formula(text) {
  const tokens = text.match(TOKENS) ?? [];
  let at = 0;
  const leaf = (token) => {
    if (/^\d/.test(token)) return math("mn", token);
    if (token === "log") return math("mtext", "\u2009log\u2009");
    if (/^[a-z]{2}/.test(token) && token !== "exp") {
      return math("mtext", (at > 1 ? "\u00a0" : "") + token + (at < tokens.length ? "\u00a0" : ""));
    }
    if (/^\p{L}/u.test(token)) return math("mi", token);
    return math("mo", { "-": "−", "..": "…", " / ": "/" }[token] ?? token);
  };
  const inside = new Map();  // what a pair of brackets encloses: a fraction needs none
  const bare = (node) => inside.get(node) ?? node;
  const atom = () => {
    const token = tokens[at++];
    if (token !== "(") return leaf(token);
    const row = math("mrow", ...sequence(")"));
    if (tokens[at++] !== ")") return math("mrow", math("mo", "("), row);
    const node = math("mrow", math("mo", "("), row.cloneNode(true), math("mo", ")"));
    inside.set(node, row);
    return node;
  };
  const power = () => {
    const base = atom();
    if (!["^", "_"].includes(tokens[at]) || at + 1 >= tokens.length) return base;
    return math(tokens[at++] === "^" ? "msup" : "msub", base, atom());
  };
  const sequence = (end) => {
    const items = [];
    while (at < tokens.length && tokens[at] !== end) {
      const divides = tokens[at] === " / " && items.length > 0 && at + 1 < tokens.length;
      if (divides) at += 1;
      items.push(divides ? math("mfrac", bare(items.pop()), bare(power())) : power());
    }
    return items;
  };
  return math("math", math("semantics", math("mrow", ...sequence()), fill(math("annotation", text),
    { encoding: "text/plain" }, [])));
}

/** Return a name such as "k^T v matrix" with its single letters as a formula; one without any stays text. */
const symbols = (name) => (/(?<!\p{L})\p{L}(?!\p{L})/u.test(name) ? formula(name) : name);
/** Return text with the formulas that stand in it between backticks; a sign behind one stays in its line. */
const prose = (text) => String(text).split(/(`[^`]*`[.,;:)]*)/).map((part, i) => {
  if (i % 2 === 0) return part;
  const end = part.lastIndexOf("`");
  return html("span", { class: "held" }, formula(part.slice(1, end)), part.slice(end + 1));
});
/** Return a link to the place with this id, for its heading. */
const anchor = (id, title) => html("a", { class: "anchor", href: `#${id}`, "aria-label": `Link to: ${title}` }, "#");

// ---- numbers ----

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const orDash = (format) => (value) => (isNumber(value) ? format(value) : "–");

const count = orDash((value) => value.toLocaleString("en", { maximumFractionDigits: 0 }));
const percent = (digits) => orDash((value) => (100 * value).toFixed(digits) + "%");
const short = orDash((value) => {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
});
const bytes = orDash((value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(value) >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${Number(value.toPrecision(value >= 100 ? 4 : 3))} ${units[power]}`;
});
const joules = orDash((picojoules) => {
  const units = ["pJ", "nJ", "µJ", "mJ", "J"];
  const power = picojoules > 0 ? Math.max(0, Math.min(4, Math.floor(Math.log10(picojoules) / 3))) : 0;
  return `${Number((picojoules / 1000 ** power).toPrecision(3))} ${units[power]}`;
});
const large = orDash((value) => {
  const units = ["", " k", " M", " G", " T"];
  const power = value > 0 ? Math.max(0, Math.min(4, Math.floor(Math.log10(value) / 3))) : 0;
  return `${Number((value / 1000 ** power).toPrecision(3))}${units[power]}`;
});
const duration = orDash((seconds) => {
  const whole = Math.round(seconds);
  if (whole < 1) return `${short(seconds)} s`;
  const parts = [[Math.floor(whole / 3600), "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  return parts.filter(([amount]) => amount > 0).map(([amount, unit]) => `${amount} ${unit}`).join(" ");
});
const plural = (amount, noun) => `${count(amount)} ${noun}${amount === 1 ? "" : "s"}`;
const clip = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);

// ---- one shape per attention, beside its colour ----

const polygon = (corners) => "M" + corners.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join("L") + "Z";
const star = (points, inner, turn) => (r) => polygon(Array.from({ length: 2 * points }, (_, i) => {
  const radius = i % 2 ? r * inner : r;
  const angle = turn + (Math.PI * i) / points;
  return [radius * Math.sin(angle), -radius * Math.cos(angle)];
}));
// The factors make the shapes look equally large.
const SHAPES = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  (r) => polygon([[-0.89 * r, -0.89 * r], [0.89 * r, -0.89 * r], [0.89 * r, 0.89 * r], [-0.89 * r, 0.89 * r]]),
  (r) => star(3, 0.5, 0)(1.3 * r),
  (r) => star(2, 0.707, 0)(1.25 * r),
  (r) => star(3, 0.5, Math.PI)(1.3 * r),
  (r) => star(5, 0.45, 0)(1.35 * r),
  (r) => star(4, 0.45, 0)(1.35 * r),
  (r) => star(3, 0.866, 0)(1.1 * r),
];
const mark = (index, x, y, r, extra = "") =>
  svg("path", { class: `mark s${index} ${extra}`, d: SHAPES[index](r), transform: `translate(${x},${y})` });
const swatch = (index) =>
  svg("svg", { class: "swatch", viewBox: "-6.5 -6.5 13 13", "aria-hidden": "true" }, mark(index, 0, 0, 5));

// ---- the tooltip ----

const tip = document.getElementById("tip");

/** Show `title` and `rows` ([index or null, name, value]) beside the point (x, y) of the window. */
function showTip(x, y, title, rows) {
  tip.replaceChildren(html("b", {}, title), html("table", {}, rows.map(([index, name, value]) => html("tr", {},
    html("td", {}, index === null ? null : swatch(index), name), html("td", {}, value)))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth - 8 ? x - 16 - box.width : x + 16;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - 8 - box.width))}px`;
  tip.style.top = `${Math.max(8, Math.min(y - box.height / 2, innerHeight - 8 - box.height))}px`;
}

function hideTip() {
  tip.hidden = true;
}

addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});

/** Make `node` show a tooltip when pointed at, touched or focused; `content` returns [title, rows]. */
function tipOn(node, label, content) {
  const show = (event) => {
    const box = node.getBoundingClientRect();
    const pointed = event.clientX !== undefined;
    showTip(pointed ? event.clientX : box.right, pointed ? event.clientY : box.top + box.height / 2, ...content());
  };
  return fill(node, { tabindex: 0, role: "img", "aria-label": label, pointermove: show, pointerdown: show,
    focus: show, pointerleave: hideTip, blur: hideTip }, []);
}

// ---- figures ----

function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = html("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function toCsv(rows) {
  const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  return rows.map((row) => row.map((value) => cell(String(value ?? ""))).join(",")).join("\r\n") + "\r\n";
}

const INLINED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin",
  "stroke-linecap", "font-family", "font-size", "font-weight", "text-anchor", "image-rendering", "paint-order", "filter"];

/** Return the drawing as a file of its own: light, 760 wide, with a legend and without the page's style sheet. */
function toSvgFile(drawing, entries) {
  const host = html("div", { class: "export" }, drawing);
  document.body.append(host);
  let [, , width, height] = drawing.getAttribute("viewBox").split(" ").map(Number);
  let x = 8;
  entries.forEach(({ index, label }, i) => {
    const needed = 34 + 7 * label.length;
    if (i === 0 || x + needed > width) [x, height] = [8, height + 22];
    drawing.append(mark(index, x + 6, height - 8, 5),
      svg("text", { class: "name", x: x + 18, y: height - 4 }, label));
    x += needed;
  });
  const margin = 16;
  const view = [-margin, -margin, width + 2 * margin, height + 2 * margin];
  drawing.prepend(svg("rect", { class: "paper", x: view[0], y: view[1], width: view[2], height: view[3] }));
  // The root last: the rules for the others need its class.
  for (const node of [...drawing.querySelectorAll("*"), drawing]) {
    const style = getComputedStyle(node);
    for (const name of INLINED) node.setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "tabindex", "role"]) node.removeAttribute(name);
  }
  fill(drawing, { viewBox: view.join(" "), width: view[2], height: view[3] }, []);
  host.remove();
  return new XMLSerializer().serializeToString(drawing);
}

/** Call `react` when the size of `node` changes: in the next frame, as what it does may change the size again. */
const onResize = (node, react) => new ResizeObserver(() => requestAnimationFrame(react)).observe(node);

let figures = 0;

/**
 * Append a figure to `parent`.
 *
 * `draw(width, state)` returns an SVG element and `table(state)` the rows of the CSV file. `state.choice` is the
 * key of `choices` ([[key, label], ...]) that is on, `state.hidden` the set of `legend` keys switched off.
 */
function figure(parent, { id, title, caption, choices = [], legend = [], draw, table }) {
  figures += 1;
  const state = { choice: choices.length ? choices[0][0] : null, hidden: new Set() };
  const plot = html("div", { class: "plot" });
  let drawnWidth = 0;
  const redraw = (width = plot.clientWidth) => {
    drawnWidth = width;
    hideTip();
    plot.replaceChildren(draw(Math.max(260, width), state));
  };
  const choose = (key) => () => {
    state.choice = key;
    redraw();
  };
  const toggle = (key) => (event) => {
    if (!state.hidden.delete(key)) state.hidden.add(key);
    event.currentTarget.setAttribute("aria-pressed", String(!state.hidden.has(key)));
    redraw();
  };
  const name = state.choice === null ? () => id : () => `${id}-${state.choice}`;
  const shown = () => legend.filter(({ key }) => !state.hidden.has(key));
  parent.append(html("figure", { id },
    html("div", { class: "head" }, html("h3", {}, title, anchor(id, title)), choices.length < 2 ? null :
      html("div", { class: "choice", role: "radiogroup", "aria-label": `${title}: what to show` },
        choices.map(([key, label], i) => html("label", {},
          html("input", { type: "radio", name: id, value: key, checked: i === 0, change: choose(key) }), label)))),
    plot,
    legend.length < 2 ? null : html("div", { class: "legend", role: "group", "aria-label": `${title}: series` },
      legend.map(({ key, label, index }) =>
        html("button", { type: "button", "aria-pressed": "true", click: toggle(key) }, swatch(index), label))),
    html("figcaption", {}, html("b", {}, `Figure ${figures}. `), prose(caption)),
    html("div", { class: "save" },
      html("button", { type: "button", class: "quiet", "aria-label": `Download SVG: ${title}`,
        click: () => save(`${name()}.svg`, "image/svg+xml", toSvgFile(draw(760, state), shown())) }, "Download SVG"),
      html("button", { type: "button", class: "quiet", "aria-label": `Download CSV: ${title}`,
        click: () => save(`${name()}.csv`, "text/csv", toCsv(table(state))) }, "Download CSV"))));
  redraw();
  // Drawn at the width it is shown in, so that text keeps its size on a phone.
  onResize(plot, () => {
    if (Math.abs(plot.clientWidth - drawnWidth) >= 1) redraw();
  });
  // Paper has another width, which nothing observes.
  addEventListener("beforeprint", () => redraw(680));
  addEventListener("afterprint", () => redraw());
}
