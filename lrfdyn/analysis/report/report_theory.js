// Charts that come with their own axes: lines and regions of the theorems.

/** Return the range, ticks and format of an axis over `values`, in logarithms where the chart says so. */
function axisOf({ log, label }, values, wanted) {
  const to = log ? Math.log10 : (value) => value;
  const from = log ? (value) => 10 ** value : (value) => value;
  const shown = values.map(to).filter(isNumber);
  const range = rangeOf(shown, { margin: 0 });
  let ticks = ticksBetween(...range, wanted);
  if (log) {
    const decades = ticks.filter(Number.isInteger);
    ticks = decades.length > 1 ? decades : [Math.ceil(range[0]), Math.floor(range[1])];
  }
  return { label: log ? `${label} (log scale)` : label, range, ticks, to, from,
    format: (tick) => short(Number(from(tick).toPrecision(6))) };
}

function linesFigure(parent, chart) {
  const all = chart.series.map((series, i) => ({ key: series.label, label: series.label, index: (series.place ?? i) % 8,
    raw: series.points.filter(([x, y]) => isNumber(x) && isNumber(y) && (!chart.y.log || y > 0)) }));
  figure(parent, { id: chart.id, title: chart.title, caption: chart.caption, legend: all,
    draw: (width, { hidden }) => {
      const series = all.filter(({ key }) => !hidden.has(key));
      const points = (series.length ? series : all).flatMap(({ raw }) => raw);
      const x = axisOf(chart.x, points.map((point) => point[0]), Math.max(3, width / 110));
      const y = axisOf(chart.y, points.map((point) => point[1]), 5);
      if (!chart.y.log) y.range = rangeOf(points.map((point) => point[1]), { margin: 0.06 });
      if (!chart.y.log) y.ticks = ticksBetween(...y.range, 5);
      return lineChart(width, { label: chart.title, height: 320, tipTitle: (at) => `${chart.x.label} = ${short(x.from(at))}`,
        series: series.map((one) => ({ ...one, points: one.raw.map(([a, b]) => ({ x: x.to(a), y: y.to(b), value: b })) })),
        x, y: { ...y, tip: ({ value }) => short(value) } });
    },
    table: () => [["series", chart.x.label, chart.y.label],
      ...all.flatMap(({ label, raw }) => raw.map(([x, y]) => [label, x, y]))] });
}

function regionFigure(parent, chart) {
  const { classes, cells } = chart;
  // Two classes: the good one and the bad one; three have one between.
  const tone = (cell) => (classes.length === 2 && cell === 1 ? 2 : cell);
  figure(parent, { id: chart.id, title: chart.title, caption: chart.caption,
    draw: (width) => {
      const height = Math.min(420, Math.max(300, width * 0.5)) + 22 * classes.length;
      const xs = axisOf(chart.x, chart.x.values, Math.max(3, width / 110));
      const ys = axisOf(chart.y, chart.y.values, 5);
      const frame = axes(width, height - 22 * classes.length, xs, ys);
      const { scaleX, scaleY, box } = frame;
      const [wide, high] = [(box.right - box.left) / chart.x.values.length, (box.bottom - box.top) / cells.length];
      const blocks = cells.flatMap((row, i) => {
        const runs = [];
        row.forEach((cell, j) => {
          const last = runs.at(-1);
          if (last && last.cell === cell) last.count += 1;
          else runs.push({ cell, start: j, count: 1 });
        });
        return runs.map(({ cell, start, count }) => svg("rect", { class: `region r${tone(cell)}`,
          x: (box.left + start * wide).toFixed(2), y: (box.bottom - (i + 1) * high).toFixed(2),
          width: (count * wide + 0.3).toFixed(2), height: (high + 0.3).toFixed(2) }));
      });
      const area = svg("rect", { class: "hit", x: box.left, y: box.top, width: box.right - box.left,
        height: box.bottom - box.top });
      const at = (event) => {
        const shape = area.getBoundingClientRect();
        const column = Math.floor(((event.clientX - shape.left) / shape.width) * chart.x.values.length);
        const row = cells.length - 1 - Math.floor(((event.clientY - shape.top) / shape.height) * cells.length);
        const cell = cells[row]?.[column];
        if (cell === undefined) return hideTip();
        return showTip(event.clientX, event.clientY, classes[cell], [[null, chart.x.label, short(chart.x.values[column])],
          [null, chart.y.label, short(chart.y.values[row])]]);
      };
      fill(area, { pointermove: at, pointerdown: at, pointerleave: hideTip }, []);
      const legend = classes.map((name, i) => {
        const y = height - 22 * (classes.length - i) + 14;
        return [svg("rect", { class: `region r${tone(i)}`, x: box.left, y: y - 10, width: 14, height: 12, rx: 2 }),
          svg("text", { x: box.left + 20, y }, name)];
      });
      return canvasOf(width, height, chart.title, blocks, frame.group,
        svg("rect", { class: "frame", x: box.left, y: box.top, width: box.right - box.left,
          height: box.bottom - box.top }), area, legend);
    },
    table: () => [[chart.x.label, chart.y.label, "region"], ...cells.flatMap((row, i) => row.map((cell, j) =>
      [chart.x.values[j], chart.y.values[i], classes[cell]]))] });
}

function theoryFigures() {
  const charts = results.charts ?? [];
  if (!charts.length) return;
  for (const theorem of [...new Set(charts.map(({ title }) => title.split(":")[0]))]) {
    const parent = section(theorem.toLowerCase().replaceAll(" ", "-"), theorem);
    for (const chart of charts.filter(({ title }) => title.startsWith(`${theorem}:`))) {
      (chart.kind === "regions" ? regionFigure : linesFigure)(parent, chart);
    }
  }
}

function checksTable() {
  if (!(results.checks ?? []).length) return;
  section("checks", "Closed forms against sums",
    "Every closed form next to the finite sum that defines it, in double precision.").append(
    grid("Closed forms against sums", ["Quantity", "Sum", "Closed form", "Difference"], results.checks.map((row) => [
      html("th", { scope: "row" }, plain(row.name)), numberCell(row.sum, row.sum?.toFixed(9) ?? "–"),
      numberCell(row.closed_form, row.closed_form?.toFixed(9) ?? "–"),
      numberCell(row.difference, row.difference?.toExponential(1) ?? "–")])));
}
