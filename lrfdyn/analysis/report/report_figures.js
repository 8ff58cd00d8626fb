// The figures of the report, each from the part of the results it shows.

// Eight colours and shapes, of which an attention has the same in every report; a ninth model would start over.
const kinds = Object.entries(results.attentions ?? {}).map(([key, values], i) =>
  ({ key, index: (values.place ?? i) % 8, ...values, label: String(values.label ?? key) }));
const noun = results.data?.kind ?? "image";  // what one of the test images or recordings is
const seeds = Math.max(0, ...kinds.map((kind) => (kind.accuracy_values ?? []).length));
const spreadName = results.spread ?? "the spread over the seeds";
const twoDigits = orDash((value) => value.toFixed(2));
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// One seed has no spread.
const hasSpread = (kind) => (kind.accuracy_values ?? []).length > 1 && isNumber(kind.accuracy_spread);
const accuracyText = (kind) =>
  percent(2)(kind.accuracy_mean) + (hasSpread(kind) ? ` ± ${(100 * kind.accuracy_spread).toFixed(2)}` : "");

function accuracyFigure(parent) {
  const sources = {
    state: ["state_bytes", "Derived state per layer and time step (log scale)", "Derived state (log scale)"],
    peak: ["peak_inference_bytes", "Measured peak memory, batch 1 (log scale)", "Measured peak (log scale)"] };
  const shown = kinds.filter((kind) => isNumber(kind.accuracy_mean));
  const choices = [["state", "Derived state"], ["peak", "Measured peak"]]
    .filter(([choice]) => shown.filter((kind) => isNumber(kind[sources[choice][0]])).length > 1);
  if (!choices.length) return;
  const items = (field) => shown.filter((kind) => isNumber(kind[field])).map((kind) => {
    const values = (kind.accuracy_values ?? []).filter(isNumber);
    const spread = hasSpread(kind) ? kind.accuracy_spread : 0;
    return { label: kind.label, index: kind.index, x: kind[field], y: kind.accuracy_mean, values,
      size: kind.parameters, low: kind.accuracy_mean - spread, high: kind.accuracy_mean + spread,
      tip: [["test accuracy", accuracyText(kind)], ["derived state", bytes(kind.state_bytes)],
        ["measured peak", bytes(kind.peak_inference_bytes)], ["parameters", count(kind.parameters)]] };
  });
  figure(parent, { id: "accuracy-memory", title: "Accuracy, memory and parameters", choices,
    caption: "One point per attention; up and to the left is better, and the area of a point is proportional to " +
      "the number of parameters. A point that would cover another is hollow. " +
      (seeds > 1 ? `The bar is ± ${spreadName} and the small dots are the single runs. ` : "") +
      "The derived state is what one layer must keep for one time step, from the formulas in the table of terms; " +
      `the measured peak is that of the whole model on one ${noun}. The accuracy axis does not start at zero.`,
    draw: (width, { choice }) => pointChart(width, { label: "Test accuracy against memory",
      height: width < 500 ? 340 : 400, yLabel: "Test accuracy", xLabel: sources[choice][width < 430 ? 2 : 1],
      items: items(sources[choice][0]) }),
    table: () => {
      const fields = ["label", "accuracy_mean", "accuracy_spread", "state_bytes", "peak_inference_bytes", "parameters"];
      return [["attention", ...fields.slice(1)], ...shown.map((kind) => fields.map((field) => kind[field]))];
    } });
}

/** Return per attention the mean, least and largest `metric` of its runs at every epoch. */
function curveSeries(metric) {
  return kinds.map((kind) => {
    const epochs = new Map();
    for (const run of results.runs ?? []) {
      if (run.attention !== kind.key) continue;
      for (const entry of run.curve ?? []) {
        if (!isNumber(entry[metric])) continue;
        if (!epochs.has(entry.epoch)) epochs.set(entry.epoch, []);
        epochs.get(entry.epoch).push(entry[metric]);
      }
    }
    const points = [...epochs].sort(([a], [b]) => a - b).map(([x, values]) =>
      ({ x, y: mean(values), low: Math.min(...values), high: Math.max(...values) }));
    return { key: kind.key, label: kind.label, index: kind.index, points };
  }).filter(({ points }) => points.length);
}

function curveFigure(parent) {
  const metrics = { test_accuracy: ["Test accuracy", percent(1)], late_accuracy: ["Later half", percent(1)],
    train_loss: ["Train loss", short] };
  const all = { test_accuracy: curveSeries("test_accuracy"), train_loss: curveSeries("train_loss") };
  // The first epochs squeeze the part in which the attentions differ.
  const last = Math.max(0, ...all.test_accuracy.flatMap(({ points }) => points.map((point) => point.x)));
  all.late_accuracy = last < 6 ? [] : all.test_accuracy.map((one) =>
    ({ ...one, points: one.points.filter((point) => point.x >= last / 2) }));
  const choices = Object.keys(metrics).filter((metric) => all[metric].length)
    .map((metric) => [metric, metrics[metric][0]]);
  if (!choices.length) return;
  figure(parent, { id: "learning-curves", title: "Learning curves", choices, legend: all[choices[0][0]],
    caption: (seeds > 1 ? `The line is the mean over ${seeds} seeds and the band runs from the lowest to the highest. `
      : "One run per attention. ") + "Measured after every epoch; the later half is the same accuracy without the " +
      "first epochs." + (kinds.length > 1 ? " Click a name to hide its curve." : ""),
    draw: (width, { choice, hidden }) => {
      const series = all[choice].filter(({ key }) => !hidden.has(key));
      const points = (series.length ? series : all[choice]).flatMap((one) => one.points);
      const [, format] = metrics[choice];
      const loss = choice === "train_loss";
      const name = loss ? "Train loss" : "Test accuracy";
      const range = rangeOf(points.flatMap((point) => [point.low, point.high]),
        { margin: 0.04, least: loss ? 0 : 0.01, floor: 0, ceiling: loss ? Infinity : 1 });
      const epochs = [Math.min(...points.map((point) => point.x)), Math.max(...points.map((point) => point.x))];
      return lineChart(width, { label: `${name} against epoch`, series, tipTitle: (epoch) => `Epoch ${epoch}`,
        x: { label: "Epoch", range: epochs[0] === epochs[1] ? [epochs[0] - 1, epochs[1] + 1] : epochs,
          ticks: ticksBetween(...epochs, Math.min(12, width / 60)).filter(Number.isInteger), format: String },
        y: { label: name, range, format: loss ? short : percent(range[1] - range[0] < 0.05 ? 1 : 0),
          tip: ({ y, low, high }) => format(y) + (high > low ? ` (${format(low)} to ${format(high)})` : "") } });
    },
    table: ({ choice }) => [["attention", "epoch", "mean", "min", "max"],
      ...all[choice].flatMap(({ label, points }) =>
        points.map((point) => [label, point.x, point.y, point.low, point.high]))] });
}

/** Say how many queries are in no average because no key spike met them. */
function withoutWeight(local) {
  const shares = local.filter(({ locality }) => locality.queries_without_weight > 0)
    .map(({ label, locality }) => `${label} ${percent(1)(locality.queries_without_weight)}`);
  return shares.length ? `Left out are queries that no key spike meets: ${shares.join(", ")} of all.` : "";
}

function distanceFigure(parent) {
  const local = kinds.filter((kind) => kind.locality?.distance?.length);
  const layers = Math.max(0, ...local.map((kind) => (kind.locality.weight_by_layer ?? []).length));
  const choices = [["average", "Average"],
    ...Array.from({ length: layers }, (_, i) => [`layer-${i + 1}`, `Layer ${i + 1}`])];
  const weights = ({ locality }, choice) => (choice === "average" ? locality.weight
    : locality.weight_by_layer?.[Number(choice.slice("layer-".length)) - 1]);
  const seriesOf = (choice) => local.map((kind) => ({ ...kind, points: kind.locality.distance
    .map((x, i) => ({ x, y: weights(kind, choice)?.[i] })).filter((point) => isNumber(point.y)) }));
  const grids = [...new Set(local.map(({ locality }) => (locality.grid ?? results.model?.grid ?? []).join(" ")))];
  // Models on other grids have another line each: none is drawn.
  const tokens = grids.length === 1 ? grids[0].split(" ").reduce((a, b) => a * Number(b), 1) : NaN;
  const uniform = 1 / tokens;
  figure(parent, { id: "attention-distance", title: "Attention against distance", choices, legend: local,
    caption: "Mean attention weight between two tokens at a Manhattan distance on the token grid. The weights are " +
      "absolute values, added up over the time steps and normalised to sum to one for every query" +
      `${isNumber(uniform) ? "; the dashed line is uniform attention" : ""}. ${withoutWeight(local)}`,
    draw: (width, { choice, hidden }) => {
      const all = seriesOf(choice);
      const series = all.filter(({ key }) => !hidden.has(key));
      const points = (series.length ? series : all).flatMap((one) => one.points);
      const reach = Math.max(1, ...local.flatMap((kind) => kind.locality.distance));
      const high = rangeOf([...points.map((point) => point.y), uniform, 0])[1];
      return lineChart(width, { label: "Attention weight against Manhattan distance", series,
        tipTitle: (distance) => `Distance ${distance}`,
        references: [{ axis: "y", value: uniform, text: `uniform, 1/${tokens}` }],
        x: { label: "Manhattan distance (tokens)", range: [0, reach], format: String,
          ticks: ticksBetween(0, reach, Math.min(reach, width / 50)).filter(Number.isInteger) },
        y: { label: "Mean weight", range: [0, high], format: short, tip: ({ y }) => short(y) } });
    },
    table: ({ choice }) => [["attention", "distance", "weight"], ...seriesOf(choice).flatMap(({ label, points }) =>
      points.map((point) => [label, point.x, point.y]))] });
}

function shareFigure(parent) {
  const local = kinds.filter((kind) => isNumber(kind.locality?.short_range_share));
  if (!local.length) return;
  const distances = [...new Set(local.map((kind) => kind.locality.short_distance))];
  const near = distances.length === 1 ? `distance ≤ ${distances[0]}` : "short distance";
  const said = distances.length === 1 ? `distance ${distances[0]} or less`
    : "most a quarter of the largest distance on the grid of each model";
  const past = local
    .filter(({ kind, options }) => kind === "causal_ssa" || (kind === "lrf_dyn" && options?.directions !== 2))
    .map(({ locality }) => locality.uniform_over_past?.short_range_share).find(isNumber);
  figure(parent, { id: "short-range-share", title: `Share at ${near}`,
    caption: `Share of a query's attention (absolute values, normalised per query) at ${said}. The ` +
      "tick is the share of uniform attention." + (past === undefined ? "" : " Kinds that run over the tokens in order " +
        `are near by that alone: equal weights over a query and the tokens before it have ${percent(1)(past)}.`),
    draw: (width) => barChart(width, { label: `Share of attention at ${near}`, format: percent(1),
      tickLabel: "uniform attention", items: local.map((kind) => ({ label: kind.label, index: kind.index,
        value: kind.locality.short_range_share, tick: kind.locality.short_range_share_uniform,
        more: [[null, "mean distance", twoDigits(kind.locality.mean_distance)]] })) }),
    table: () => [["attention", "short_distance", "short_range_share", "short_range_share_uniform", "mean_distance"],
      ...local.map(({ label, locality }) => [label, locality.short_distance, locality.short_range_share,
        locality.short_range_share_uniform, locality.mean_distance])] });
}

function entropyFigure(parent) {
  const all = kinds.filter((kind) => kind.locality?.entropy_histogram?.density?.length).map((kind) =>
    ({ ...kind, legend: `${kind.label}, mean ${twoDigits(kind.locality.entropy_mean)}` }));
  if (!all.length) return;
  // Models on other grids have another line each: none is drawn.
  const levels = [...new Set(all.map((kind) => twoDigits(kind.locality.entropy_uniform)))];
  const uniform = levels.length === 1 ? all[0].locality.entropy_uniform : NaN;
  const layers = Math.max(0, ...all.map((kind) => (kind.locality.entropy_histogram.density_by_layer ?? []).length));
  const choices = [["average", "Average"],
    ...Array.from({ length: layers }, (_, i) => [`layer-${i + 1}`, `Layer ${i + 1}`])];
  const seriesOf = (choice) => all.map((kind) => {
    const { edges, density, density_by_layer: byLayer } = kind.locality.entropy_histogram;
    const values = choice === "average" ? density : byLayer?.[Number(choice.slice("layer-".length)) - 1];
    const largest = Math.max(1e-9, ...(values ?? []).filter(isNumber));
    // Bins are as fine as the sample allows, so heights of different models compare only as shares of the largest.
    const bins = (values ?? []).map((density, i) => ({ low: edges[i], high: edges[i + 1], density: density ?? 0 }));
    const first = bins.findIndex(({ density }) => density > 0);
    const taken = first < 0 ? [] : bins.slice(first, 1 + bins.findLastIndex(({ density }) => density > 0));
    return { ...kind, bins, edges: taken.length ? [taken[0].low, ...taken.map(({ high }) => high)] : [],
      points: taken.map(({ low, high, density }) => ({ x: (low + high) / 2, y: density / largest, density })) };
  }).filter(({ points }) => points.length);
  figure(parent, { id: "attention-entropy", title: "Entropy of attention", choices: layers > 1 ? choices : choices.slice(0, 1),
    legend: all.map((kind) => ({ ...kind, label: kind.legend })),
    caption: "Distribution of the entropy (in nats) of each query's weights, absolute and normalised, every " +
      "curve divided by its largest value; bins are wider where there are few queries. Low entropy is attention on few " +
      `tokens; uniform attention over \`N\` tokens has \`log N\`${isNumber(uniform) ? ", the dashed line" : ""}. Causal kinds ` +
      "see only the tokens before a query, so their early queries cannot reach it.",
    draw: (width, { choice, hidden }) => {
      const every = seriesOf(choice);
      const series = every.filter(({ key }) => !hidden.has(key));
      const measured = series.length ? series : every;
      const range = rangeOf([...measured.flatMap(({ edges }) => edges), uniform], { margin: 0.03 });
      return lineChart(width, { label: "Distribution of attention entropy", series,
        tipTitle: (entropy) => `Entropy near ${short(entropy)}`,
        references: [{ axis: "x", value: uniform, text: `uniform, ${short(uniform)}` }],
        x: { label: "Entropy (nats)", range, format: short }, y: { label: "Density / largest", range: [0, 1.14],
          ticks: [0, 0.25, 0.5, 0.75, 1], format: short, tip: ({ density }) => `density ${short(density)}` } });
    },
    table: ({ choice }) => [["attention", "bin_low", "bin_high", "density"],
      ...seriesOf(choice).flatMap(({ label, bins }) =>
        bins.map(({ low, high, density }) => [label, low, high, density]))] });
}

function fieldFigures(parent) {
  const maps = kinds.filter((kind) => kind.receptive_field?.map?.length);
  if (maps.length) {
    const sizeOf = ({ pixels_per_cell: cell = 1, map }) => [cell, cell * map.length];
    const sizes = [...new Set(maps.map((kind) => sizeOf(kind.receptive_field).join(" ")))];
    const [cell, pixels] = sizeOf(maps[0].receptive_field);
    const each = cell > 1 ? `each block of ${cell} × ${cell} of the` : "each of the";
    const cross = maps.some((kind) => kind.receptive_field.centre);
    figure(parent, { id: "receptive-fields", title: "Effective receptive fields",
      choices: [["linear", "Linear"], ["root", "Square root"]],
      caption: `How strongly ${sizes.length > 1 ? "the input pixels move" : `${each} ${pixels} × ${pixels} input pixels moves`} ` +
        `the output at the centre token${cross ? ", above the cross" : ""}, scaled so that the largest value of each map is 1. ` +
        `${sizes.length > 1 ? `The models take ${noun}s of different sizes, drawn alike. ` : ""}` +
        "The square root brings out weak surroundings.",
      draw: (width, { choice }) => heatMaps(width, { label: "Effective receptive fields",
        shade: choice === "root" ? (value) => Math.sqrt(Math.max(0, value)) : (value) => value,
        items: maps.map((kind) => ({ label: kind.label, index: kind.index, map: kind.receptive_field.map,
          centre: kind.receptive_field.centre?.map((at) => (at + 0.5) / (kind.receptive_field.pixels_per_cell ?? 1) - 0.5),
          tip: (kind.receptive_field.share_inside ?? []).slice(0, 4).map((one) =>
            [null, `inside ${one.side} × ${one.side}`, percent(1)(one.share)]) })) }),
      table: () => [["attention", "row", "column", "value"], ...maps.flatMap(({ label, receptive_field: field }) =>
        field.map.flatMap((row, i) => row.map((value, j) => [label, i, j, value])))] });
  }
  const all = kinds.filter((kind) => kind.receptive_field?.share_inside?.length).map((kind) => ({ ...kind,
    points: kind.receptive_field.share_inside.map(({ side, share }) => ({ x: side, y: share }))
      .filter((point) => isNumber(point.y)) }));
  if (!all.length) return;
  figure(parent, { id: "receptive-field-share", title: "Share inside growing squares", legend: all,
    caption: "Share of the summed receptive field inside a centred square of the given side. A curve that rises " +
      "early belongs to a model that looks close by.",
    draw: (width, { hidden }) => {
      const series = all.filter(({ key }) => !hidden.has(key));
      const sides = [...new Set(all.flatMap(({ points }) => points.map((point) => point.x)))].sort((a, b) => a - b);
      return lineChart(width, { label: "Share of the receptive field inside a square", series, height: 320,
        tipTitle: (side) => `Inside ${side} × ${side} pixels`,
        x: { label: "Side of the square (pixels)", range: rangeOf(sides, { margin: 0 }), format: short,
          ticks: sides.length * 30 < width ? sides : undefined },
        y: { label: "Share inside", range: [0, 1], format: percent(0), tip: ({ y }) => percent(1)(y) } });
    },
    table: () => [["attention", "side", "share"], ...all.flatMap(({ label, points }) =>
      points.map((point) => [label, point.x, point.y]))] });
}
