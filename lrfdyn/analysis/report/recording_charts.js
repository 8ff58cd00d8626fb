// What the network says over the frames, and how its layers fire.

const MOST_CLASSES = 6;
const { scores, step_scores: ownScores, firing } = results;
const layers = Object.keys(firing);
const frameNumbers = ends.map((_, i) => i + 1);

// The classes with the highest score at any step, the last word first; the rest is one bar.
const shownClasses = (() => {
  const peak = (i) => Math.max(...scores.map((row) => row[i]));
  const best = results.classes.map((_, i) => i).sort((a, b) => peak(b) - peak(a)).slice(0, MOST_CLASSES);
  best.sort((a, b) => scores[LAST][b] - scores[LAST][a]);
  return best.map((i, index) => ({ key: String(i), label: results.classes[i], index, of: (rows, step) => rows[step][i] }));
})();
const others = results.classes.length - shownClasses.length;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const otherClasses = { label: plural(others, "other class").replace("classs", "classes"), index: 7,
  of: (rows, step) => Math.max(0, 1 - sum(shownClasses.map((one) => one.of(rows, step)))) };

/** Return the bars of the scores after a step. */
function scoreBars(width, step) {
  const all = others > 0 ? [...shownClasses, otherClasses] : shownClasses;
  return barChart(width, { label: `Scores after frame ${step + 1}`, format: percent(1), tickLabel: "after the last frame",
    items: all.map((one) => ({ label: one.label, index: one.index, value: one.of(scores, step), tick: one.of(scores, LAST),
      more: [] })) });
}

/** Return what makes a mark of the current step: `move(node, step)` is called whenever that changes. */
function marker() {
  let marks = [];
  followers.push((step) => {
    marks = marks.filter(([node]) => node.isConnected);  // a chart is drawn anew for every width, and for a file
    for (const [node, move] of marks) move(node, step);
  });
  return (node, move) => {
    marks.push([node, move]);
    move(node, clock.step);
    return node;
  };
}

function scoresFigure(parent) {
  const marks = marker();
  const rowsOf = { total: scores, single: ownScores };
  const chosen = results.predicted.name;
  figure(parent, { id: "scores", title: "Class scores", choices: [["total", "All frames so far"], ["single", "Each frame alone"]],
    legend: shownClasses,
    caption: "Softmax of the logits after every frame: those of all frames until then, on which the prediction rests, or " +
      "those of the frame alone with the membranes as the frames before left them. " +
      (exit ? `Dashed: the threshold, ${short(exit.threshold)}, and the frame after which the network stops, ` +
        `${exit.step + 1}${exit.sure ? "" : ", the last, as it is never that sure"}. ` : "") +
      "The wide line is where the player is; a click moves it.",
    draw: (width, { choice, hidden }) => {
      const rows = rowsOf[choice];
      let frame = null;
      const chart = lineChart(width, { label: "Class scores after every frame", height: 320,
        tipTitle: (number) => `After frame ${number}`,
        series: shownClasses.filter((one) => !hidden.has(one.key)).map((one) =>
          ({ ...one, points: frameNumbers.map((x, i) => ({ x, y: one.of(rows, i) })) })),
        x: { label: "Frame", range: LAST ? [1, LAST + 1] : [0, 2], format: String,
          ticks: LAST ? ticksBetween(1, LAST + 1, Math.min(LAST, width / 40)).filter(Number.isInteger) : [1] },
        y: { label: "Score", range: [0, 1], format: percent(0), tip: ({ y }) => percent(1)(y) },
        extra: (axes) => {
          frame = axes;
          const stops = clip(exit?.sure ? `stops: ${chosen}` : `never above ${short(exit?.threshold)}`, 30);
          const lines = !exit || choice !== "total" ? [] : [{ axis: "y", value: exit.threshold, text: "" },
            { axis: "x", value: exit.step + 1, text: stops }].map((line) => reference(axes, line));
          return [...lines, marks(svg("line", { class: "now", y1: axes.box.top, y2: axes.box.bottom }),
            (line, step) => fill(line, { x1: axes.scaleX(step + 1), x2: axes.scaleX(step + 1), "data-step": step + 1 }, []))];
        } });
      chart.addEventListener("click", (event) => {
        const area = chart.getBoundingClientRect();
        const at = ((event.clientX - area.left) / area.width) * width;
        const far = frameNumbers.map((number) => Math.abs(frame.scaleX(number) - at));
        goToStep(far.indexOf(Math.min(...far)));
      });
      return chart;
    },
    table: ({ choice }) => [["class", ...frameNumbers.map((number) => `frame ${number}`)],
      ...results.classes.map((name, i) => [name, ...rowsOf[choice].map((row) => row[i])])] });
}

const goToStep = (step) => clock.go?.(ends[step], step);
const layerLabel = (name) => name.replace(/(?<=.)\.neuron$/, "");

/** Return the map of firing rates, a row for every layer and a column for every frame. */
function firingMap(width, marks) {
  const row = 20;
  const most = Math.max(1e-9, ...Object.values(firing).flat());
  const letters = Math.max(...layers.map((name) => layerLabel(name).length));
  const left = Math.min(0.4 * width, 6.8 * letters + 12);
  const fitting = Math.floor((left - 8) / 6.6);
  const wide = (width - left - 2) / (LAST + 1);
  const top = 24;
  const height = top + row * layers.length + 40;
  const cellAt = (step, i) => ({ x: left + step * wide, y: top + row * i, width: wide, height: row });
  const cells = layers.flatMap((name, i) => firing[name].map((rate, step) => {
    const [red, green, blue] = heatColour(rate / most);
    const text = wide < 44 ? null : svg("text", { x: left + (step + 0.5) * wide, y: top + row * i + 14, "text-anchor": "middle",
      class: 0.3 * red + 0.59 * green + 0.11 * blue > 130 ? "on-light" : "on-dark" }, percent(1)(rate));
    return [svg("rect", { ...cellAt(step, i), width: wide + 0.3, height: row - 1, fill: `rgb(${red},${green},${blue})` }), text];
  }));
  const every = Math.max(1, Math.ceil(22 / wide));
  const cursor = svg("rect", { class: "cell", visibility: "hidden" });
  const now = marks(svg("rect", { class: "now", y: top - 2, width: wide, height: row * layers.length + 3, rx: 2 }),
    (mark, step) => fill(mark, { x: left + step * wide, "data-step": step + 1 }, []));
  const chart = canvasOf(width, height, "Share of neurons that fire, by layer and frame. The table below has all values",
    layers.map((name, i) => svg("text", { x: left - 8, y: top + row * i + 14, "text-anchor": "end" },
      ((text) => (text.length > fitting ? "…" + text.slice(1 - fitting) : text))(layerLabel(name)))),
    frameNumbers.filter((_, i) => i % every === 0).map((number) =>
      svg("text", { x: left + (number - 0.5) * wide, y: 14, "text-anchor": "middle" }, number)),
    svg("text", { class: "name", x: 0, y: 14 }, "Frame"), cells, now, cursor,
    svg("g", { transform: `translate(${left},0)` }, heatScale(height - 24, undefined, percent(1)(most))));
  readCells(chart, { cursor, cellAt, box: { left, top, wide, row } });
  return chart;
}

/** Let pointer, touch and arrow keys move a cursor over the cells of `chart` and name their values. */
function readCells(chart, { cursor, cellAt, box }) {
  let at = [clock.step, 0];
  const bound = (value, most) => Math.max(0, Math.min(most, value));
  const show = (step, i, event) => {
    at = [bound(step, LAST), bound(i, layers.length - 1)];
    const name = layers[at[1]];
    fill(cursor, { ...cellAt(...at), visibility: "visible" }, []);
    const area = cursor.getBoundingClientRect();
    showTip(event?.clientX ?? area.right, event?.clientY ?? area.top, name, [[null, `frame ${at[0] + 1}`, percent(2)(firing[name][at[0]])],
      [null, "all frames", percent(2)(sum(firing[name]) / (LAST + 1))]]);
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  };
  const place = (event) => {
    const area = chart.getBoundingClientRect();
    const scale = chart.viewBox.baseVal.width / area.width;
    return [Math.floor(((event.clientX - area.left) * scale - box.left) / box.wide),
      Math.floor(((event.clientY - area.top) * scale - box.top) / box.row)];
  };
  const inside = ([step, i]) => step >= 0 && step <= LAST && i >= 0 && i < layers.length;
  const point = (event) => (inside(place(event)) ? show(...place(event), event) : hide());
  const key = (event) => {
    const [across, down] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key] ?? [];
    if (across === undefined) return;
    event.preventDefault();
    show(at[0] + across, at[1] + down);
  };
  fill(chart, { tabindex: 0, pointermove: point, pointerdown: point, pointerleave: hide, blur: hide, keydown: key,
    click: (event) => { if (inside(place(event))) goToStep(place(event)[0]); } }, []);
  chart.setAttribute("aria-label", `${chart.getAttribute("aria-label")}. Arrow keys read the values.`);
}

function firingFigure(parent) {
  const marks = marker();
  figure(parent, { id: "firing-steps", title: "Firing of the layers",
    caption: "Share of the neurons of every layer that fire at every frame, in the order of the network. The frame of the " +
      "player is outlined; a click moves it.",
    draw: (width) => firingMap(width, marks),
    table: () => [["layer", ...frameNumbers.map((number) => `frame ${number}`)],
      ...layers.map((name) => [name, ...firing[name]])] });
  parent.append(folded("Firing of the layers as a table", grid("Firing of the layers",
    ["Layer", ...frameNumbers.map((number) => `Frame ${number}`), "All"], layers.map((name) =>
      [html("th", { scope: "row", class: "code" }, name), ...firing[name].map((rate) => numberCell(rate, percent(2)(rate))),
        ((mean) => numberCell(mean, percent(2)(mean)))(sum(firing[name]) / (LAST + 1))]))));
}
