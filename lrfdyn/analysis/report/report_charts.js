// The kinds of charts: lines, points, bars and heat maps. Each function returns one SVG element.

const canvasOf = (width, height, label, ...children) =>
  svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label }, ...children);

/** Return about `wanted` round numbers from `low` to `high`. */
function ticksBetween(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const far = (factor) => Math.abs(Math.log((factor * power) / raw));
  const step = power * [1, 2, 5, 10].reduce((best, factor) => (far(factor) < far(best) ? factor : best));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(i * step);
  return ticks;
}

/** Return [low, high] around the finite values with a margin; never empty, also for equal values. */
function rangeOf(values, { margin = 0.08, least = 0, floor = -Infinity, ceiling = Infinity } = {}) {
  const finite = values.filter(isNumber);
  if (!finite.length) return [0, 1];
  let low = Math.min(...finite);
  let high = Math.max(...finite);
  const missing = (least || (high === low ? Math.abs(high) * 0.1 || 1 : 0)) - (high - low);
  if (missing > 0) [low, high] = [low - missing / 2, high + missing / 2];
  const extra = (high - low) * margin;
  return [Math.max(floor, low - extra), Math.min(ceiling, high + extra)];
}

const linear = ([low, high], from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);

/** Return axes for the ranges of `x` and `y`: the drawn group, both scales, and the inner box. */
function axes(width, height, x, y) {
  const yTicks = y.ticks ?? ticksBetween(...y.range, Math.max(3, Math.round(height / 70)));
  const yTexts = yTicks.map(y.format);
  const left = 12 + 6.7 * Math.max(2, ...yTexts.map((text) => text.length));
  const box = { left, right: width - 14, top: 30, bottom: height - 42 };
  const scaleX = linear(x.range, box.left, box.right);
  const scaleY = linear(y.range, box.bottom, box.top);
  const xTicks = x.ticks ?? ticksBetween(...x.range, Math.max(3, Math.round((box.right - box.left) / 90)));
  const group = svg("g", { "aria-hidden": "true" },
    yTicks.map((tick, i) => [
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: scaleY(tick), y2: scaleY(tick) }),
      svg("text", { x: box.left - 8, y: scaleY(tick) + 4, "text-anchor": "end" }, yTexts[i])]),
    svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    xTicks.map((tick) => [
      svg("line", { class: "axis", x1: scaleX(tick), x2: scaleX(tick), y1: box.bottom, y2: box.bottom + 5 }),
      svg("text", { x: scaleX(tick), y: box.bottom + 19, "text-anchor": "middle" }, x.format(tick))]),
    svg("text", { class: "name", x: 0, y: 12 }, y.label),
    svg("text", { class: "name", x: box.right, y: height - 4, "text-anchor": "end" }, x.label));
  return { group, scaleX, scaleY, box };
}

/** Return a dashed line whose dashes stand out from what they cross. */
const dashed = (ends) => ["under", "ref"].map((name) => svg("line", { class: name, ...ends }));

/** Return a dashed line at a value of one axis, with its name beside it. */
function reference({ scaleX, scaleY, box }, { axis, value, text }) {
  if (!isNumber(value)) return null;
  if (axis === "x") {
    const at = scaleX(value);
    const toLeft = at > (box.left + box.right) / 2;
    return [...dashed({ x1: at, x2: at, y1: box.top, y2: box.bottom }),
      svg("text", { class: "halo", x: at + (toLeft ? -7 : 7), y: box.top + 9, "text-anchor": toLeft ? "end" : "start" }, text)];
  }
  const at = scaleY(value);
  return [...dashed({ x1: box.left, x2: box.right, y1: at, y2: at }),
    svg("text", { class: "halo", x: box.right, y: at - 7, "text-anchor": "end" }, text)];
}

/**
 * Return a chart of lines over a common x.
 *
 * A series is {key, label, index, points: [{x, y, low, high}]}; one with `edges` is a histogram, whose points are
 * the middles of its bins. `extra(axes)` returns what is drawn under the lines.
 */
function lineChart(width, { label, height = 340, x, y, series, references = [], tipTitle, extra = () => null }) {
  const frame = axes(width, height, x, y);
  const { scaleX, scaleY, box } = frame;
  const px = (value) => scaleX(value).toFixed(1);
  const py = (value) => scaleY(value).toFixed(1);
  const outline = (points) => "M" + points.map((point) => `${px(point.x)},${py(point.y)}`).join("L");
  const steps = (points, edges) => `M${px(edges[0])},${py(0)}` + points.map((point, i) =>
    `V${py(point.y)}H${px(edges[i + 1])}`).join("") + `V${py(0)}`;
  const band = (points) => "M" + points.map((point) => `${px(point.x)},${py(point.high)}`).join("L") + "L" +
    points.toReversed().map((point) => `${px(point.x)},${py(point.low)}`).join("L") + "Z";
  const bands = series.map(({ points, index, edges }) => {
    const ranged = points.filter((point) => point.high > point.low);
    if (edges) return svg("path", { class: `band faint s${index}`, d: steps(points, edges) });
    return ranged.length > 1 ? svg("path", { class: `band s${index}`, d: band(ranged) }) : null;
  });
  const marked = series.map(({ points, edges }, order) => {
    const every = Math.max(1, Math.ceil(points.length / 20));
    const first = Math.floor((order * every) / series.length);
    return points.filter((point, i) => i % every === first && !(edges && scaleY(0) - scaleY(point.y) < 4))
      .map((point) => [scaleX(point.x), scaleY(point.y)]);
  });
  // A mark that later ones cover is larger than they are: all stay visible, one inside the other.
  const covers = ([x, y]) => (marks) => marks.some(([a, b]) => Math.hypot(a - x, b - y) < 3.5);
  const radius = (place, order) => 3.6 + 1.5 * Math.min(4, marked.slice(order + 1).filter(covers(place)).length);
  const lines = series.map(({ points, index, edges }, order) => !points.length ? null : svg("g", {},
    svg("path", { class: `line s${index}`, d: edges ? steps(points, edges) : outline(points) })));
  const marks = series.map(({ index }, order) => marked[order].map((place) =>
    mark(index, place[0].toFixed(1), place[1].toFixed(1), radius(place, order))));
  const cursor = svg("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const chart = canvasOf(width, height, label, frame.group, bands, extra(frame), cursor, lines, marks,
    references.map((ref) => reference(frame, ref)), series.length ? null :
      svg("text", { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2, "text-anchor": "middle" },
        "No series is shown."));
  readValues(chart, { series, cursor, scaleX, box, y, tipTitle });
  return chart;
}

/** Let pointer, touch and arrow keys move a cursor over `chart` that names all values at its x. */
function readValues(chart, { series, cursor, scaleX, box, y, tipTitle }) {
  const stops = [...new Set(series.flatMap(({ points }) => points.map((point) => point.x)))].sort((a, b) => a - b);
  if (!stops.length) return;
  let at = -1;
  const valueAt = ({ points, edges }, stop) => (edges
    ? points.find((_, i) => edges[i] <= stop && stop < edges[i + 1])
    : points.find((point) => point.x === stop));
  const show = (stop, clientY) => {
    at = stop;
    const place = scaleX(stops[at]);
    fill(cursor, { x1: place, x2: place, visibility: "visible" }, []);
    const area = chart.getBoundingClientRect();
    const scale = area.width / chart.viewBox.baseVal.width;
    const rows = series.map((one) => [one, valueAt(one, stops[at])]).filter(([, point]) => point)
      .sort(([, a], [, b]) => b.y - a.y)
      .map(([one, point]) => [one.index, one.label, y.tip(point)]);
    showTip(area.left + place * scale, clientY ?? area.top + area.height / 2, tipTitle(stops[at]), rows);
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  };
  const point = (event) => {
    const area = chart.getBoundingClientRect();
    const place = ((event.clientX - area.left) / area.width) * chart.viewBox.baseVal.width;
    if (place < box.left - 20) return hide();
    const far = stops.map((stop) => Math.abs(scaleX(stop) - place));
    return show(far.indexOf(Math.min(...far)), event.clientY);
  };
  const key = (event) => {
    const move = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: stops.length - 1 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(stops.length - 1, move)));
  };
  fill(chart,
    { tabindex: 0, pointermove: point, pointerdown: point, pointerleave: hide, blur: hide, keydown: key }, []);
  chart.setAttribute("aria-label", `${chart.getAttribute("aria-label")}. Arrow keys read the values.`);
}

/** Return ticks for a range of base-two logarithms of bytes: powers of two, or round sizes in a short range. */
function byteTicks([low, high], wanted) {
  if (high - low < 2.5) {
    const unit = 1024 ** Math.max(0, Math.floor(low / 10));
    return ticksBetween(2 ** low / unit, 2 ** high / unit, wanted).map((tick) => Math.log2(tick * unit));
  }
  const step = Math.max(1, Math.ceil((high - low) / wanted));
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i += 1) ticks.push(i * step);
  return ticks;
}

/** Choose for each point a place {left, base} for its name that covers no other name or point, where there is one. A
    name that had to go far away gets a `line` [x, y] to lead from there to the point. */
function placeNames(points, box) {
  const taken = points.flatMap(({ x, y, r, covers, top, bottom }) =>
    [[x - r, y - r, x + r, y + r], [x - r - 8 - 5 * covers, top, x + 2, bottom]]);
  const apart = (a, b) => a[2] <= b[0] || b[2] <= a[0] || a[3] <= b[1] || b[3] <= a[1];
  return points.map(({ x, y, r, text }) => {
    const wide = 7 * text.length;
    const rows = [0, -15, 15, -30, 30, -45, 45, -60, 60, -75, 75, -90, 90];
    const spots = rows.flatMap((dy) => [[x + r + 6, y + dy - 8], [x - r - 12 - wide, y + dy - 8]]);
    spots.splice(2, 0, [x - wide / 2, y - r - 19], [x - wide / 2, y + r + 3]);
    const rectangles = spots.map(([left, top]) => [left, top, left + wide, top + 16])
      .filter(([left, top, right, bottom]) =>
        left >= box.left && right <= box.right + 10 && top >= box.top - 12 && bottom <= box.bottom);
    const best = rectangles.find((one) => taken.every((other) => apart(one, other))) ?? rectangles[0] ??
      [box.left, y - 8, box.left + wide, y + 8];
    taken.push(best);
    const end = [Math.min(Math.max(x, best[0]), best[2]), Math.min(Math.max(y, best[1]), best[3])];
    return { left: best[0], base: best[1] + 12, line: Math.hypot(end[0] - x, end[1] - y) > r + 10 ? end : null };
  });
}

/** Return a chart of one named point per item {label, index, x, y, low, high, values, size, tip}; x in bytes. */
function pointChart(width, { label, height = 400, xLabel, yLabel, items }) {
  const logs = items.map((item) => Math.log2(Math.max(1, item.x)));
  const xRange = rangeOf(logs, { margin: 0.12, least: 1 });
  const yRange = rangeOf(items.flatMap((item) => [item.y, item.low, item.high, ...item.values]),
    { margin: 0.14, least: 0.01 });
  const frame = axes(width, height,
    { range: xRange, label: xLabel, ticks: byteTicks(xRange, Math.max(2, Math.round(width / 130))),
      format: (power) => bytes(2 ** power) },
    { range: yRange, label: yLabel, ticks: ticksBetween(...yRange, 5).filter((tick) => tick <= 1.0000001),
      format: percent(yRange[1] - yRange[0] < 0.04 ? 1 : 0) });
  const { scaleX, scaleY, box } = frame;
  const largest = Math.max(...items.map((item) => item.size || 0), 1);
  const points = items.map((item, i) => ({ item, x: scaleX(logs[i]), y: scaleY(item.y),
    r: Math.max(4, 11 * Math.sqrt((item.size || 0) / largest)), text: clip(item.label, 26),
    top: scaleY(Math.max(item.high, ...item.values)) - 3, bottom: scaleY(Math.min(item.low, ...item.values)) + 3 }));
  // A point that would cover others is hollow, and its single runs stand beside theirs.
  points.forEach((point, i) => {
    point.covers = points.slice(0, i).filter(({ x, y, r }) => Math.hypot(point.x - x, point.y - y) < 0.8 * r).length;
  });
  const names = placeNames(points, box);
  const near = (a) => points.filter((b) => Math.hypot(a.x - b.x, a.y - b.y) < 14).map((b) => b.item);
  return canvasOf(width, height, label, frame.group,
    points.map(({ item, x }) => [
      isNumber(item.low) && item.high > item.low ? svg("line",
        { class: `spread s${item.index}`, x1: x, x2: x, y1: scaleY(item.low), y2: scaleY(item.high) }) : null]),
    points.map(({ item, x, y }, i) => (names[i].line ? svg("line",
      { class: `leader s${item.index}`, x1: names[i].line[0], y1: names[i].line[1], x2: x, y2: y }) : null)),
    points.map((point) => tipOn(svg("g", {}, mark(point.item.index, point.x, point.y, point.r, point.covers ? "hollow" : "big"),
      point.item.values.length < 2 ? null : point.item.values.map((value) =>
        svg("circle", { class: `seed s${point.item.index}`, cx: point.x - point.r - 5 * (1 + point.covers),
          cy: scaleY(value), r: 2.2 }))),
    `${point.item.label}: ${point.item.tip.map(([name, value]) => `${name} ${value}`).join(", ")}`,
    () => {
      const items = near(point);
      if (items.length === 1) return [point.item.label, point.item.tip.map(([name, value]) => [null, name, value])];
      return ["At this place", items.map((item) => [item.index, item.label, item.tip[0][1]])];
    })),
    points.map(({ text }, i) => svg("text", { class: "name", x: names[i].left, y: names[i].base }, text)));
}

/** Return one bar per share {label, index, value, tick, more}: `tick` to compare with, `more` for the tooltip. */
function barChart(width, { label, items, format, tickLabel }) {
  const row = 46;
  const height = row * items.length + 26;
  // The whole track is 100 %: the longest bar must not look like all of it.
  const scale = (value) => Math.min(1, value) * (width - 4);
  const block = (name, i, length) =>
    svg("rect", { class: name, x: 0, y: row * i + 21, width: length, height: 10, rx: 3 });
  return canvasOf(width, height, label, items.map((item, i) => tipOn(svg("g", {},
    svg("rect", { class: "hit", x: 0, y: row * i, width, height: row }),
    svg("text", { class: "name", x: 0, y: row * i + 14 }, clip(item.label, Math.floor((width - 60) / 7.6))),
    svg("text", { class: "name", x: width - 4, y: row * i + 14, "text-anchor": "end" }, format(item.value)),
    block("track", i, width - 4), block(`bar s${item.index}`, i, scale(item.value || 0)),
    isNumber(item.tick) ? svg("line",
      { class: "tick", x1: scale(item.tick), x2: scale(item.tick), y1: row * i + 17, y2: row * i + 35 }) : null),
  `${item.label}: ${format(item.value)}, ${tickLabel} ${format(item.tick)}`,
  () => [item.label, [[null, "measured", format(item.value)], [null, tickLabel, format(item.tick)], ...item.more]])),
  svg("line", { class: "tick", x1: 1, x2: 1, y1: height - 16, y2: height - 2 }),
  svg("text", { x: 10, y: height - 5 }, tickLabel));
}

// Dark to light through hues that stay apart for every colour vision.
const HEAT = [[12, 12, 38], [52, 26, 92], [112, 36, 108], [172, 50, 96], [222, 82, 70], [245, 138, 58],
  [250, 200, 94], [253, 250, 206]];

function heatColour(value) {
  const place = Math.max(0, Math.min(1, value)) * (HEAT.length - 1);
  const below = Math.min(HEAT.length - 2, Math.floor(place));
  return HEAT[below].map((part, i) => Math.round(part + (HEAT[below + 1][i] - part) * (place - below)));
}

/** Return the cells as an image address, every cell a square of pixels so that no viewer blurs its border. */
function heatImage(map, shade) {
  const cell = Math.max(1, Math.ceil(192 / map.length));
  const canvas = html("canvas", { width: cell * map[0].length, height: cell * map.length });
  const context = canvas.getContext("2d");
  map.forEach((row, i) => row.forEach((value, j) => {
    context.fillStyle = `rgb(${heatColour(shade(value ?? 0)).join(",")})`;
    context.fillRect(j * cell, i * cell, cell, cell);
  }));
  return canvas.toDataURL();
}

/** Return the scale of the colours of maps that are divided by their largest value, which `most` names. */
const heatScale = (top, shade = (value) => value, most = "1 (largest of each map)") => [
  Array.from({ length: 60 }, (_, i) => svg("rect", { x: 14 + 2 * i, y: top, width: 2.2, height: 10,
    fill: `rgb(${heatColour(shade(i / 59)).join(",")})` })),
  svg("text", { x: 0, y: top + 10 }, "0"), svg("text", { x: 142, y: top + 10 }, most)];

/** Return the maps of the items {label, index, map, centre, tip} side by side, with the scale of their colours. */
function heatMaps(width, { label, items, shade }) {
  const gap = 18;
  const most = Math.min(items.length, Math.max(2, Math.floor((width + gap) / (170 + gap))));
  const rows = Math.ceil(items.length / most);
  const columns = Math.ceil(items.length / rows);
  const side = Math.min(240, (width - gap * (columns - 1)) / columns);
  const height = rows * (side + 46) + 26;
  return canvasOf(width, height, label, items.map((item, i) => {
    const left = (i % columns) * (side + gap);
    const top = Math.floor(i / columns) * (side + 46) + 26;
    const image = svg("image", { href: heatImage(item.map, shade), x: left, y: top, width: side, height: side,
      "image-rendering": "pixelated", preserveAspectRatio: "none" });
    const tile = tipOn(svg("g", {}, image), `${item.label}: effective receptive field`, () => [item.label, item.tip]);
    image.addEventListener("pointermove", (event) => {
      event.stopPropagation();
      const area = image.getBoundingClientRect();
      const cell = (at, start, length, cells) =>
        Math.max(0, Math.min(cells - 1, Math.floor(((at - start) / length) * cells)));
      const row = cell(event.clientY, area.top, area.height, item.map.length);
      const column = cell(event.clientX, area.left, area.width, item.map[0].length);
      showTip(event.clientX, event.clientY, item.label,
        [[null, `row ${row}, column ${column}`, short(item.map[row][column])], ...item.tip]);
    });
    const [down, across] = (item.centre ?? []).map((at, axis) =>
      ((at + 0.5) / (axis ? item.map[0].length : item.map.length)) * side);
    return [mark(item.index, left + 6, top - 13, 5),
      svg("text", { class: "name", x: left + 18, y: top - 9 }, clip(item.label, Math.floor((side - 18) / 7.6))), tile,
      item.centre ? svg("path", { class: "cross",
        d: `M${left + across - 5},${top + down}h10M${left + across},${top + down - 5}v10` }) : null,
      svg("rect", { class: "frame", x: left, y: top, width: side, height: side })];
  }),
  heatScale(height - 22, shade));
}
