// Where single queries look: maps laid over the pictures.

const pictures = results.pictures ?? [];

/** Return the map as an image address: weak weights let the picture through. */
function veilImage(map, largest) {
  const cell = Math.max(1, Math.ceil(192 / map.length));
  const canvas = html("canvas", { width: cell * map[0].length, height: cell * map.length });
  const context = canvas.getContext("2d");
  map.forEach((row, i) => row.forEach((value, j) => {
    const strength = value / largest;
    context.fillStyle = `rgba(${heatColour(strength).join(",")},${(0.3 + 0.6 * strength).toFixed(3)})`;
    context.fillRect(j * cell, i * cell, cell, cell);
  }));
  return canvas.toDataURL();
}

/** Return the tiles of one picture and query: the picture, and over it the map of every model. */
function mapTiles({ picture, place, tiles }, { columns, side, gap, top }) {
  const name = `${picture.name}, query at row ${place[0]}, column ${place[1]}`;
  return svg("g", {}, svg("text", { x: 0, y: top + 12 }, name), tiles.map(({ label, index, grid, map }, i) => {
    const left = (i % columns) * (side + gap);
    const above = top + 44 + Math.floor(i / columns) * (side + 34);
    const square = { x: left, y: above, width: side, height: side, preserveAspectRatio: "none" };
    const [high, wide] = [side / grid[0], side / grid[1]];
    const largest = map ? Math.max(1e-12, ...map.flat()) : 1;
    const layers = svg("g", {},
      svg("image", { href: picture.source, class: map === undefined ? null : "grey", "image-rendering": "pixelated", ...square }),
      map ? svg("image", { href: veilImage(map, largest), "image-rendering": "pixelated", ...square }) : null);
    if (map) {
      layers.addEventListener("pointermove", (event) => {
        const area = layers.getBoundingClientRect();
        const cell = (at, start, length, cells) =>
          Math.max(0, Math.min(cells - 1, Math.floor(((at - start) / length) * cells)));
        const row = cell(event.clientY, area.top, area.height, grid[0]);
        const column = cell(event.clientX, area.left, area.width, grid[1]);
        showTip(event.clientX, event.clientY, label, [[null, `row ${row}, column ${column}`, percent(2)(map[row][column])]]);
      });
      layers.addEventListener("pointerleave", hideTip);
    }
    return [index === null ? null : mark(index, left + 6, above - 13, 5),
      svg("text", { class: "name", x: left + (index === null ? 0 : 18), y: above - 9 },
        clip(label, Math.floor((side - 18) / 7.6))), layers,
      map === null ? svg("text", { x: left + side / 2, y: above + side / 2, "text-anchor": "middle", class: "halo" },
        "no weight") : null,
      svg("rect", { class: "query", x: left + place[1] * wide, y: above + place[0] * high, width: wide, height: high }),
      svg("rect", { class: "frame", ...square, preserveAspectRatio: null })];
  }));
}

function mapsFigure(parent) {
  const shown = kinds.filter((kind) => kind.attention_maps?.maps?.length);
  if (!shown.length || !pictures.length) return;
  const [first] = shown;
  const layers = Math.max(...shown.map((kind) => kind.attention_maps.layers.length));
  const choices = [["average", "Average"],
    ...Array.from({ length: layers }, (_, i) => [`layer-${i + 1}`, `Layer ${i + 1}`])];
  const mapOf = (kind, i, q, choice) => {
    const found = kind.attention_maps.maps[i]?.[q];
    return (choice === "average" ? found?.average : found?.by_layer[Number(choice.slice("layer-".length)) - 1]) ?? null;
  };
  const rowsOf = (choice) => pictures.flatMap((picture, i) => first.attention_maps.queries.map((place, q) => ({
    picture, place, tiles: [{ label: "picture", index: null, grid: first.attention_maps.grid },
      ...shown.map((kind) => ({ label: kind.label, index: kind.index, grid: kind.attention_maps.grid,
        map: mapOf(kind, i, q, choice) }))] })));
  figure(parent, { id: "attention-maps", title: "Where single queries look", choices: layers > 1 ? choices : choices.slice(0, 1),
    caption: "The weights that the outlined token gives all tokens, laid over the picture in grey, each map divided by " +
      "its largest value: absolute values, added up over the time steps. " +
      `Those of LRF-Dyn are the same for every ${noun}.` + (noun === "recording" ? " The picture is the sum of all " +
        "frames, brighter in orange and darker in blue." : ""),
    draw: (width, { choice }) => {
      const gap = 12;
      const wanted = shown.length + 1;
      const columns = Math.min(wanted, Math.max(2, Math.floor((width + gap) / (116 + gap))));
      const side = Math.min(200, (width - gap * (columns - 1)) / columns);
      const block = 30 + Math.ceil(wanted / columns) * (side + 34);
      const rows = rowsOf(choice);
      const height = rows.length * block + 22;
      return canvasOf(width, height, "Attention of single queries over pictures",
        rows.map((row, i) => mapTiles(row, { columns, side, gap, top: i * block })), heatScale(height - 22));
    },
    table: ({ choice }) => [["attention", "picture", "query_row", "query_column", "row", "column", "weight"],
      ...rowsOf(choice).flatMap(({ picture, place, tiles }) => tiles.filter(({ map }) => map).flatMap(({ label, map }) =>
        map.flatMap((row, i) => row.map((value, j) => [label, picture.name, ...place, i, j, value]))))] });
}

function scoresFigure(parent) {
  const all = kinds.filter((kind) => kind.locality?.score_histogram?.share?.length).map((kind) =>
    ({ ...kind, legend: `${kind.label}, entropy ${twoDigits(kind.locality.entropy_mean)}, ` +
      `${percent(0)(kind.locality.score_histogram.zero)} zero` }));
  if (!all.length) return;
  const layers = Math.max(...all.map((kind) => (kind.locality.score_histogram.share_by_layer ?? []).length));
  const seriesOf = (choice) => all.map((kind) => {
    const { edges, share, share_by_layer: byLayer } = kind.locality.score_histogram;
    const values = (choice === "average" ? share : byLayer?.[Number(choice.slice("layer-".length)) - 1]) ?? [];
    const places = values.length ? edges.map(Math.log2) : [];
    return { ...kind, bins: values.map((value, i) => [edges[i], edges[i + 1], value]), edges: places,
      points: values.map((y, i) => ({ x: (places[i] + places[i + 1]) / 2, y })) };
  }).filter(({ points }) => points.length);
  const times = (power) => (power < 0 ? `1/${short(2 ** -power)}` : short(2 ** power));
  figure(parent, { id: "attention-scores", title: "Distribution of attention weights",
    choices: [["average", "Average"], ...Array.from({ length: layers > 1 ? layers : 0 },
      (_, i) => [`layer-${i + 1}`, `Layer ${i + 1}`])],
    legend: all.map((kind) => ({ ...kind, label: kind.legend })),
    caption: "Share of all pairs of a query and a key by their weight, absolute and normalised per query, in units of the " +
      "uniform weight `1 / N` (dashed); the first bin holds all that is less. Pairs whose weight is zero have no bin, the " +
      "names have their share, and the mean entropy (in nats) of a query's weights. Causal kinds give the tokens behind a " +
      "query nothing.",
    draw: (width, { choice, hidden }) => {
      const every = seriesOf(choice);
      const series = every.filter(({ key }) => !hidden.has(key));
      const measured = series.length ? series : every;
      const used = measured.flatMap(({ points }) => points.filter(({ y }) => y > 0).map(({ x }) => x));
      const range = rangeOf([...used, 0], { margin: 0.03 });
      const high = rangeOf([0, ...measured.flatMap(({ points }) => points.map(({ y }) => y))])[1];
      const within = series.map((one) => {
        const kept = one.points.map((_, i) => i).filter((i) => one.edges[i + 1] > range[0] && one.edges[i] < range[1]);
        return { ...one, points: kept.map((i) => one.points[i]),
          edges: [...kept, kept.at(-1) + 1].map((i) => Math.max(range[0], Math.min(range[1], one.edges[i]))) };
      });
      return lineChart(width, { label: "Distribution of attention weights", series: within,
        tipTitle: (power) => `${short(2 ** power)} times the uniform weight`,
        references: [{ axis: "x", value: 0, text: "uniform" }],
        x: { label: "Weight / uniform weight", range, format: times,
          ticks: ticksBetween(...range, Math.max(3, width / 70)).filter(Number.isInteger) },
        y: { label: "Share of pairs", range: [0, high], format: percent(0), tip: ({ y }) => percent(2)(y) } });
    },
    table: ({ choice }) => [["attention", "bin_low", "bin_high", "share"],
      ...seriesOf(choice).flatMap(({ label, bins }) => bins.map((bin) => [label, ...bin]))] });
}
