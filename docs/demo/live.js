"use strict";
// The live page: both models run on one picture, and what they gave is drawn. Numbers come from the files' own outputs.

const RUNS = 9; // of the median time of a picture
const PATIENCE = 1500; // milliseconds after which no further run is timed
const live = { set: null, token: 0, layer: "average", part: null, shown: null, waiting: null, working: false };
let ort = null;

const say = (text, bad = false) => {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", bad);
};
const milliseconds = (value) => `${value < 10 ? value.toFixed(1) : value.toFixed(0)} ms`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
const className = (number) => live.set.classes[number].replaceAll("_", " ");
const tokenName = (token) => `row ${Math.floor(token / live.set.grid[1]) + 1}, column ${(token % live.set.grid[1]) + 1}`;

// ---- running ----

/** Load a file beside the page, as bytes. */
async function load(file) {
  const answer = await fetch(file);
  if (!answer.ok) throw new Error(`${file} is not beside this page.`);
  return new Uint8Array(await answer.arrayBuffer());
}

/** Run a model on levels; return its logits, scores, spikes by layer [T, H, W] and attention by layer [N, N]. */
async function run(model, levels, set = live.set) {
  const input = new ort.Tensor("uint8", levels.slice(), [1, set.channels, set.size, set.size]);
  const start = performance.now();
  const given = await model.session.run({ images: input });
  const time = performance.now() - start;
  const logits = [...given.logits.data];
  const powers = logits.map((logit) => Math.exp((logit - Math.max(...logits)) * model.scale));
  const named = (kind) => Object.fromEntries(Object.keys(given).filter((name) => name.startsWith(kind))
    .map((name) => [name.slice(kind.length), given[name].data]));
  return { logits, scores: powers.map((power) => power / sum(powers)), spikes: named("spikes/"),
    attention: named("attention/"), times: [time] };
}

/** Show what the models make of a picture. While they work, only the last picture that comes is kept. */
async function look(picture) {
  live.waiting = picture;
  if (live.working) return;
  live.working = true;
  try {
    while (live.waiting) await lookAt(live.waiting, live.set);
  } finally {
    live.working = false;
  }
}

async function lookAt(picture, set) {
  live.waiting = null;
  const results = [];
  for (const model of set.models) results.push(await run(model, picture.levels, set));
  if (set !== live.set) return; // another one was chosen meanwhile
  if (picture.moving && live.shown?.moving) {
    results.forEach((result, i) => result.times.push(...live.shown.results[i].times.slice(0, RUNS - 1)));
  }
  live.shown = { ...picture, results };
  draw();
  const until = performance.now() + PATIENCE;
  const alone = () => !picture.moving && !live.waiting && set === live.set && performance.now() < until;
  for (let i = 1; i < RUNS && alone(); i += 1) {
    for (const [j, model] of set.models.entries()) results[j].times.push(...(await run(model, picture.levels, set)).times);
  }
  if (live.shown?.results === results) drawTimes();
}

// ---- what they say ----

/** Draw levels [C, H, W] into a canvas of their size. */
function paint(canvas, levels, grey = false) {
  const { size, channels } = live.set;
  const [count, image] = [size * size, new ImageData(size, size)];
  for (let i = 0; i < count; i += 1) {
    const colour = [0, 1, 2].map((part) => levels[(channels === 3 ? part * count : 0) + i]);
    const light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2];
    image.data.set([...(grey ? [light, light, light] : colour), 255], 4 * i);
  }
  Object.assign(canvas, { width: size, height: size });
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function drawAnswer() {
  const { results, levels, name, label } = live.shown;
  paint(byId("picture"), levels);
  byId("picture").setAttribute("aria-label", `${name}, as the networks see it`);
  byId("picture-text").textContent = label === undefined ? name : `${name} of the class ${className(label)}.`;
  const verdict = (best) => (label === undefined ? "" : best === label ? ", right" : ", wrong");
  byId("cards").replaceChildren(...live.set.models.map((model, i) => {
    const order = results[i].scores.map((score, k) => [score, k]).sort((a, b) => b[0] - a[0]).slice(0, 5);
    return html("figure", { class: `card s${i}`, "aria-label": model.label },
      html("div", { class: "head" }, html("h3", {}, swatch(i), model.label),
        html("span", { class: "soft time", id: `time-${i}` })),
      html("p", { class: "says" }, html("b", {}, className(order[0][1])),
        html("span", { class: "soft" }, percent(1)(order[0][0]), verdict(order[0][1]))),
      html("ol", { class: "scores" }, order.map(([score, k]) => {
        const bar = html("i", { "aria-hidden": "true" });
        bar.style.width = `${100 * score}%`;
        return html("li", {}, html("span", {}, className(k)), html("span", { class: "soft" }, percent(1)(score)),
          html("span", { class: "track" }, bar));
      })),
      html("figcaption", {}, `${percent(1)(model.top1 / 100)} right of ${count(model.test_images)} test pictures, `,
        `${large(model.parameters)} parameters`));
  }));
  drawTimes();
}

function drawTimes() {
  live.shown.results.forEach(({ times }, i) => {
    byId(`time-${i}`).textContent = `${milliseconds(median(times))} a picture`;
    byId(`time-${i}`).title = times.length > 1 ? `Median of ${times.length} runs, here` : "One run, here";
  });
}

// ---- where a token looks ----

/** Return the weights that a token gives all tokens, which sum to 1: of a layer, or their mean; null without any. */
function weightsOf(model, { attention }, token, layer) {
  const size = live.set.grid[0] * live.set.grid[1];
  const rows = (layer === "average" ? model.attention : [model.attention[layer]])
    .map((name) => [...attention[name].slice(token * size, (token + 1) * size)])
    .filter((row) => sum(row) > 0)
    .map((row) => row.map((weight) => weight / sum(row)));
  return rows.length ? rows[0].map((_, n) => sum(rows.map((row) => row[n])) / rows.length) : null;
}

/** Draw the picture, the weights of the chosen token over it, if there are any, and the token itself. */
function drawMap(canvas, weights) {
  const [height, width] = live.set.grid;
  const [wide, high] = [canvas.width / width, canvas.height / height];
  const [context, under] = [canvas.getContext("2d"), html("canvas")];
  paint(under, live.shown.levels, weights);
  context.imageSmoothingEnabled = false;
  context.drawImage(under, 0, 0, canvas.width, canvas.height);
  const most = Math.max(...(weights ?? []));
  (weights ?? []).forEach((weight, n) => {
    context.fillStyle = `rgba(${heatColour(weight / most).join(",")},${0.7 + (0.25 * weight) / most})`;
    context.fillRect((n % width) * wide, Math.floor(n / width) * high, wide, high);
  });
  Object.assign(context, { strokeStyle: "#3ce0c8", lineWidth: 4 });
  context.strokeRect((live.token % width) * wide + 2, Math.floor(live.token / width) * high + 2, wide - 4, high - 4);
}

function drawAttention() {
  drawMap(byId("map-picture"), null);
  const told = live.set.models.map((model, i) => {
    const weights = weightsOf(model, live.shown.results[i], live.token, live.layer);
    drawMap(byId(`map-${i}`), weights);
    if (!weights) return `${model.label} at nothing`;
    const most = Math.max(...weights);
    return `${model.label} most at ${tokenName(weights.indexOf(most))} (${percent(1)(most)})`;
  });
  byId("token").textContent = `The token in ${tokenName(live.token)} looks: ${told.join("; ")}. Each map is as bright as its ` +
    "largest weight allows.";
}

/** Make the two maps, which follow the pointer and the arrow keys. */
function makeMaps() {
  const [height, width] = live.set.grid;
  const cell = Math.max(8, Math.floor(448 / Math.max(height, width)));
  const choose = (row, column) => {
    live.token = Math.max(0, Math.min(height - 1, row)) * width + Math.max(0, Math.min(width - 1, column));
    if (live.shown) drawAttention();
  };
  const point = (event) => {
    const area = event.currentTarget.getBoundingClientRect();
    choose(Math.floor(((event.clientY - area.top) / area.height) * height),
      Math.floor(((event.clientX - area.left) / area.width) * width));
  };
  const panel = (key, label, ...head) => html("div", { class: `map-${key}` }, html("h3", {}, ...head, label),
    html("canvas", { id: `map-${key}`, class: "sharp", width: width * cell, height: height * cell, role: "img",
      "aria-label": label, pointermove: point, pointerdown: point }));
  byId("maps").replaceChildren(panel("picture", "The picture"),
    ...live.set.models.map(({ label }, i) => panel(i, label, swatch(i))));
  byId("maps").onkeydown = (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(Math.floor(live.token / width) + step[0], (live.token % width) + step[1]);
  };
}

// ---- how the layers fire ----

function drawSpikes() {
  const { time_steps: steps, models } = live.set;
  const layers = models.map((model) => new Map(model.layers.filter(({ part }) => part === live.part)
    .map((layer) => [layer.label, layer])));
  const found = live.shown.results;
  const side = (values) => Math.sqrt(values.length / steps); // pictures are square
  // Shares of channels, and the largest of them all.
  const shares = layers.map((own, i) => new Map([...own].map(([label, { name, neurons }]) => {
    const counts = found[i].spikes[name];
    return [label, Array.from(counts, (value) => (value * counts.length) / (steps * neurons))];
  })));
  const most = Math.max(1e-9, ...shares.flatMap((own) => [...own.values()].flat()));
  const cell = (label, i) => {
    const values = shares[i].get(label);
    if (!values) return html("div", { class: "none soft" }, `${models[i].label} has none`);
    const [edge, rate] = [side(values), sum(values) / values.length];
    return html("div", { class: "film", role: "img", "aria-label": `${models[i].label}, ${label}: ${percent(1)(rate)}` },
      Array.from({ length: steps }, (_, t) => {
        const canvas = html("canvas", { class: "sharp", width: edge, height: edge, title: `time step ${t + 1}` });
        const image = new ImageData(edge, edge);
        values.slice(t * edge * edge, (t + 1) * edge * edge).forEach((share, n) =>
          image.data.set([...heatColour(share / most), 255], 4 * n));
        canvas.getContext("2d").putImageData(image, 0, 0);
        return canvas;
      }), html("span", { class: "rate" }, percent(1)(rate)));
  };
  const labels = [...new Set(layers.flatMap((own) => [...own.keys()]))];
  const heads = models.map((model, i) => html("div", {}, html("h3", {}, swatch(i), model.label),
    html("div", { class: "film soft", "aria-hidden": "true" }, Array.from({ length: steps }, (_, t) => html("span", {}, `t = ${t + 1}`)))));
  byId("spikes").replaceChildren(html("b"), ...heads,
    ...labels.flatMap((label) => [html("b", {}, label), ...models.map((_, i) => cell(label, i))]));
  const totals = models.map((model, i) => {
    const spikes = sum(Object.values(found[i].spikes).map((values) => sum([...values])));
    return `${model.label} sent ${count(spikes)} spikes, ` +
      `${percent(1)(spikes / (steps * sum(model.layers.map(({ neurons }) => neurons))))} of what its neurons could`;
  });
  byId("spikes-text").textContent = `Columns are the ${steps} time steps, the number is the share of neurons and steps ` +
    `with a spike; brightest: ${percent(0)(most)} of the channels. In all layers, ${totals.join("; ")}.`;
}

// ---- what they hold ----

function drawMemory() {
  const totals = live.set.models.map(({ state }) => sum(state.map((term) => term.bytes)));
  byId("memory").replaceChildren(...live.set.models.map((model, i) => {
    const bar = html("div", { class: "bar", "aria-hidden": "true" }, model.state.map((term, k) => {
      const piece = html("i", { class: `t${k}`, title: `${term.name}: ${bytes(term.bytes)}` });
      piece.style.width = `${(100 * term.bytes) / Math.max(...totals)}%`;
      return piece;
    }));
    return html("div", { class: `s${i}` }, html("h3", {}, swatch(i), `${model.label}: ${bytes(totals[i])}`), bar,
      html("ul", { class: "keys" }, model.state.map((term, k) => html("li", { class: "key" }, html("i", { class: `t${k}` }),
        html("span", {}, symbols(term.name), ", ", formula(term.formula), `: ${bytes(term.bytes)}`)))));
  }), html("p", { class: "gain" }, `${live.set.models[1].label} holds ${percent(0)(totals[1] / totals[0])} of what ` +
    `${live.set.models[0].label} holds.`));
}

// ---- the page ----

/** Fill a group of radio buttons with [[value, text], ...]; the arrow keys walk through them. */
function choices(group, entries, chosen, react) {
  byId(group).hidden = entries.length < 2;
  byId(group).replaceChildren(...entries.map(([value, text]) => html("label", {},
    html("input", { type: "radio", name: group, checked: value === chosen, change: () => react(value) }), text)));
}

function draw() {
  for (const id of ["answer", "looks", "fires", "holds"]) byId(id).hidden = false;
  drawAnswer();
  drawAttention();
  drawSpikes();
  document.body.dataset.ready = "true";
}

/** Show the picture, the camera or the pad, and stop what was on. */
function show(what) {
  if (what !== "video") stopCamera();
  for (const id of ["video", "board"]) byId(id).hidden = id !== what;
  for (const [id, kind, on, off] of [["camera", "video", "Stop the camera", "Use the camera"], ["draw", "board", "Clear", "Draw"]]) {
    byId(id).setAttribute("aria-pressed", String(kind === what));
    byId(id).textContent = kind === what ? on : off;
  }
  for (const button of byId("samples").children) button.setAttribute("aria-pressed", "false");
}

/** Do what takes a picture, and say in a line what went wrong. */
async function attempt(action) {
  try {
    say(live.set?.about ?? "");
    await action();
  } catch (error) {
    say(error.message, true);
  }
}

async function showSample(sample) {
  show("picture");
  byId("samples").children[live.set.samples.indexOf(sample)].setAttribute("aria-pressed", "true");
  await look({ levels: await readSample(sample, live.set), name: "A sample", label: sample.class });
}

async function showFile(file) {
  if (!file) return;
  const levels = await readFile(file, live.set);
  show("picture");
  await look({ levels, name: file.name });
}

async function showCamera() {
  if (camera.stream) return show("picture");
  await startCamera();
  show("video");
  const video = byId("video");
  for (const stream = camera.stream; camera.stream === stream;) {
    const { videoWidth: width, videoHeight: height } = video;
    if (width) await look({ levels: takePicture(video, width, height, live.set), name: "The camera", moving: true });
    await new Promise((done) => { requestAnimationFrame(done); });
  }
}

async function showPad() {
  show("board");
  clearPad();
  byId("pad").focus();
  await drawn();
}

const drawn = () => look({ levels: levelsOf(centreOf(byId("pad"), 256, 256, { ...live.set, crop_share: 1 }), 1),
  name: "Your drawing", moving: true });

/** Load the models of a data set and show its first sample. */
async function chooseSet(set) {
  show("picture");
  live.set = set;
  Object.assign(live, { shown: null, layer: "average", part: set.models[0].layers.at(-1).part,
    token: Math.floor(set.grid[0] / 2) * set.grid[1] + Math.floor(set.grid[1] / 2) });
  const size = sum(set.models.map((model) => (model.session ? 0 : model.bytes)));
  for (const model of set.models) {
    say(`Loading the models (${bytes(size)}) …`);
    model.session ??= await ort.InferenceSession.create(await load(`models/${model.file}`), { executionProviders: ["wasm"] });
  }
  byId("draw").hidden = set.channels !== 1;
  byId("samples").replaceChildren(...set.samples.map((sample) => html("button", { type: "button", "aria-pressed": "false",
    "aria-label": `Sample: ${className(sample.class)}`, click: () => attempt(() => showSample(sample)) },
  html("img", { src: sample.file, alt: "", class: "sharp" }))));
  const layers = set.models[0].attention.map((_, i) => [i, `Layer ${i + 1}`]);
  choices("layers", [["average", "Average"], ...layers], "average", (layer) => { live.layer = layer; drawAttention(); });
  const parts = [...new Set(set.models.flatMap((model) => model.layers.map(({ part }) => part)))];
  choices("parts", parts.map((part) => [part, part]), live.part, (part) => { live.part = part; drawSpikes(); });
  makeMaps();
  drawMemory();
  say(set.about);
  await showSample(set.samples[0]);
}

async function start() {
  themeButton();
  if (location.protocol === "file:") {
    throw new Error("A browser runs models from a web server alone: python -m http.server -d site, then open " +
      "localhost:8000/demo/");
  }
  const manifest = JSON.parse(new TextDecoder().decode(await load("manifest.json")));
  byId("made").textContent = `lrfdyn ${manifest.version}. The models are in integers: the same bits here as in Python. ` +
    `Times are of this browser, one thread of WebAssembly (${manifest.runtime}, MIT License), the median of up to ${RUNS} runs, ` +
    "with all that the page shows computed along.";
  if (!manifest.runtime) {
    throw new Error("The runtime (onnxruntime-web) was not there when this page was built, so that no model can run.");
  }
  ort = await import("./runtime/ort.wasm.min.mjs");
  Object.assign(ort.env.wasm, { numThreads: 1, proxy: true });
  choices("sets", manifest.sets.map((set) => [set, set.title]), manifest.sets[0], (set) => attempt(() => chooseSet(set)));
  byId("file").addEventListener("change", (event) => attempt(() => showFile(event.target.files[0])));
  byId("camera").addEventListener("click", () => attempt(showCamera));
  byId("draw").addEventListener("click", () => attempt(showPad));
  makePad(drawn);
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    attempt(() => showFile(event.dataTransfer.files[0]));
  });
  addEventListener("paste", (event) => attempt(() => showFile(event.clipboardData.files[0])));
  await chooseSet(manifest.sets[0]);
}

document.body.dataset.errors = String(pageErrors);
attempt(start).then(() => { document.body.dataset.ready = "true"; });
