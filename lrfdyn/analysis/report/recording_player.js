// The player: events as they arrive, the frame that they are counted in, and the clock that the whole page follows.

const { recording, exit } = results;
const { ends, sensor } = recording;  // microseconds at which every frame is complete; height and width
const LAST = ends.length - 1;
const wholeTime = ends[LAST];
const clock = { time: wholeTime, step: LAST, playing: false };
const followers = [];  // called with the step when it changes

const PALETTE = { ...results.colours, night: [13, 16, 24] };
const FADE = 32;  // shades of the trail
const trail = Math.max(1, Math.min(1e5, wholeTime / 10));  // microseconds that an event stays in view
const SPEEDS = [1 / 300, 1 / 100, 1 / 30, 1 / 10, 1 / 3, 1, 3, 10, 30];
const USUAL_SECONDS = 8;  // that playing takes, by the speed that is chosen at first

const milliseconds = (micro) => {
  const shown = micro / 1000;
  return wholeTime < 1e4 ? shown.toFixed(2) : wholeTime < 1e7 ? String(Math.round(shown)) : (shown / 1000).toFixed(1);
};
const timeUnit = wholeTime < 1e7 ? "ms" : "s";
const speedName = (speed) => (speed === 1 ? "as it was" : speed < 1 ? `${count(1 / speed)} times slower`
  : `${speed} times faster`);
const stepAt = (time) => {
  const found = ends.findIndex((end) => time <= end);
  return found < 0 ? LAST : found;
};

/** Return the numbers of an array {type, data}, which is packed as base64 of zlib. */
async function unpacked({ type, data }) {
  const bytesOf = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytesOf]).stream().pipeThrough(new DecompressionStream("deflate"));
  const kinds = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float64: Float64Array };
  return new kinds[type](await new Response(stream).arrayBuffer());
}

/** Return the colour as the number that a pixel of a canvas holds, `shares` of the two colours added to the night. */
function pixel(darker, brighter) {
  const part = (i) => Math.min(255, PALETTE.night[i] + darker * (PALETTE.darker[i] - PALETTE.night[i]) +
    brighter * (PALETTE.brighter[i] - PALETTE.night[i]));
  return (255 << 24 | part(2) << 16 | part(1) << 8 | part(0)) >>> 0;
}

/** Return a canvas of so many pixels, and what shows an array of them in it. */
function picture(height, width, label) {
  const canvas = html("canvas", { width, height, role: "img", "aria-label": label,
    class: Math.max(height, width) <= 160 ? "sharp" : null });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  return { canvas, pixels, show: () => context.putImageData(image, 0, 0) };
}

/** Return a function that paints the events of the last moments before a time, the newest brightest. */
function eventPainter({ pixels, show }, { t, x, y, p }) {
  const shades = [0, 1].map((brighter) => Array.from({ length: FADE + 1 }, (_, i) =>
    pixel((1 - brighter) * (i / FADE) ** 1.5, brighter * (i / FADE) ** 1.5)));
  const until = (time) => {
    let [low, high] = [0, t.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (t[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return (time) => {
    pixels.fill(pixel(0, 0));
    const last = until(time);
    for (let i = until(time - trail); i < last; i += 1) {
      const left = 1 - (time - t[i]) / trail;
      pixels[y[i] * sensor[1] + x[i]] = shades[p[i]][Math.ceil(left * FADE)];
    }
    show();
    return last;
  };
}

/** Return a function that paints a frame, and lets the pointer read its counts. */
function framePainter({ canvas, pixels, show }, values) {
  const { size, scale } = results.frames;
  const cells = size * size;
  const most = values.reduce((a, b) => Math.max(a, b), 1);
  const at = (channel, cell) => values[(clock.step * 2 + channel) * cells + cell];
  const point = (event) => {
    const area = canvas.getBoundingClientRect();
    const place = (client, start, side) => Math.max(0, Math.min(size - 1, Math.floor(((client - start) / side) * size)));
    const [row, column] = [place(event.clientY, area.top, area.height), place(event.clientX, area.left, area.width)];
    showTip(event.clientX, event.clientY, `Frame ${clock.step + 1}: row ${row}, column ${column}`,
      ["darker", "brighter"].map((name, channel) => [null, name, short(at(channel, row * size + column) * scale)]));
  };
  fill(canvas, { pointermove: point, pointerdown: point, pointerleave: hideTip }, []);
  return () => {
    const share = (channel, cell) => Math.sqrt(at(channel, cell) / most);
    for (let cell = 0; cell < cells; cell += 1) pixels[cell] = pixel(share(0, cell), share(1, cell));
    fill(canvas, { "aria-label": `Frame ${clock.step + 1}, as the network takes it` }, []);
    show();
  };
}

const colourKey = (name) => html("span", { class: "key" },
  html("i", { style: `background: rgb(${PALETTE[name].join(",")})`, "aria-hidden": "true" }), name);
const icon = (path) => svg("svg", { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true" },
  svg("path", { d: path, fill: "currentColor" }));

/** Return the bar with play button, slider, frames and speed; `go(time, step)` moves the page. */
function controls(go) {
  const button = html("button", { type: "button", id: "play", click: () => play(!clock.playing) });
  const slider = html("input", { type: "range", id: "time", min: 0, max: wholeTime, step: "any", "aria-label": "Time",
    input: () => { play(false); go(Number(slider.value)); } });
  const read = html("output", { for: "time" });
  const nearest = SPEEDS.reduce((best, speed) => {
    const far = (one) => Math.abs(Math.log(wholeTime / 1e6 / one / USUAL_SECONDS));
    return far(speed) < far(best) ? speed : best;
  });
  const speed = html("select", { "aria-label": "Speed" }, SPEEDS.map((value) =>
    html("option", { value, selected: value === nearest }, speedName(value))));
  const parts = ends.map((end, i) => html("span", { style: `flex-grow: ${Math.max(end - (ends[i - 1] ?? 0), wholeTime / 500)}`,
    class: exit && exit.step === i ? "exit" : null, title: `Frame ${i + 1}`, click: () => { play(false); go(end, i); } }));
  const play = (on) => {
    if (on && clock.time >= wholeTime) go(0);
    clock.playing = on;
    button.replaceChildren(icon(on ? "M3 2h4v12H3zM9 2h4v12H9z" : "M3 1.5v13l11-6.5z"));
    button.setAttribute("aria-label", on ? "Pause" : "Play");
    if (on) requestAnimationFrame((now) => tick(now, now));
  };
  const tick = (before, now) => {
    if (!clock.playing) return;
    go(Math.min(wholeTime, clock.time + (now - before) * 1000 * Number(speed.value)));
    if (clock.time >= wholeTime) play(false);
    else requestAnimationFrame((next) => tick(now, next));
  };
  const stepBy = (by) => {
    const step = Math.max(0, Math.min(LAST, clock.step + by));
    play(false);
    go(ends[step], step);
  };
  addEventListener("keydown", (event) => {
    const held = event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented;
    const within = (part) => event.target !== slider && event.target.closest?.(part);
    const act = { " ": () => play(!clock.playing), ArrowRight: () => stepBy(1), ArrowLeft: () => stepBy(-1) }[event.key];
    if (held || !act || within(event.key === " " ? "button, select, input, summary, a" : "select, input, .scroll")) return;
    event.preventDefault();
    act();
  });
  const follow = () => {
    slider.value = clock.time;
    const time = `${milliseconds(clock.time)} of ${milliseconds(wholeTime)} ${timeUnit}`;
    read.textContent = time;
    slider.setAttribute("aria-valuetext", `${time}, frame ${clock.step + 1} of ${LAST + 1}`);
    parts.forEach((part, i) => part.classList.toggle("now", i === clock.step));
  };
  const bar = html("div", { class: "controls", role: "group", "aria-label": "Player" }, button,
    html("div", { class: "line" }, slider, html("div", { class: "parts", "aria-hidden": "true" }, parts)), read, speed);
  return { bar, play, follow };
}

/** Append the panes of events, frame and scores to `parent`, and the bar that moves them behind it. */
async function playerFigure(parent) {
  const camera = picture(...sensor, "Events of the camera");
  const taken = picture(results.frames.size, results.frames.size, "Frame");
  const names = [html("h3", {}), html("h3", {})];
  const bars = html("div", { class: "plot" });
  const every = recording.shown < recording.count ? ` One event of ${count(recording.count / recording.shown)} is drawn.` : "";
  parent.append(html("figure", { id: "player" },
    html("div", { class: "panes" },
      html("div", {}, html("h3", {}, "Events"), camera.canvas, html("p", { class: "keys" }, colourKey("brighter"), colourKey("darker"))),
      html("div", {}, names[0], taken.canvas, html("p", { class: "keys" }, recording.taken)),
      html("div", { class: "wide" }, names[1], bars)),
    html("figcaption", {}, `Events: those of the last ${milliseconds(trail)} ${timeUnit}, the newest brightest.${every} ` +
      "Frame: the one in which they are counted and that the network takes when it is complete, how often every pixel " +
      "became brighter or darker; the colour is the square root. Scores: what the network says then. " +
      "Space plays and pauses, ← and → go one frame back or on.")));
  const { bar, play, follow } = controls(go);
  parent.after(bar);
  const drawBars = () => {
    const focused = [...bars.querySelectorAll("[tabindex]")].indexOf(document.activeElement);
    bars.replaceChildren(scoreBars(Math.max(240, bars.clientWidth), clock.step));
    bars.querySelectorAll("[tabindex]")[focused]?.focus();
  };
  let paint = () => {};
  let paintFrame = () => {};
  function go(time, step = stepAt(time)) {
    clock.time = time;
    paint(time);
    if (step !== clock.step) {
      clock.step = step;
      for (const react of followers) react(step);
    }
    follow();
  }
  followers.push((step) => {
    names[0].textContent = `Frame ${step + 1} of ${LAST + 1}`;
    names[1].replaceChildren(`Scores after frame ${step + 1}`,
      exit && step > exit.step ? html("small", {}, `stopped at ${exit.step + 1}`) : "");
    drawBars();
    paintFrame();
  });
  for (const react of followers) react(clock.step);
  onResize(bars, drawBars);
  clock.go = go;
  play(false);
  const [t, x, y, p, values] = await Promise.all([...["t", "x", "y", "p"].map((name) => recording.events[name]),
    results.frames].map(unpacked));
  const times = new Float64Array(t.length);
  t.forEach((passed, i) => { times[i] = passed + (i ? times[i - 1] : 0); });
  paint = eventPainter(camera, { t: times, x, y, p });
  paintFrame = framePainter(taken, values);
  paintFrame();
  go(clock.time);
  document.body.dataset.ready = "true";
  // Nothing moves by itself for those who asked for that; the page then shows the end, where all has been said.
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play(true);
}
