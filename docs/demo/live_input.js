"use strict";
// Pictures for the models: from samples, files, the camera and the drawing pad, as levels from 0 to 255.

const byId = (id) => document.getElementById(id);

/** Return a canvas of this size and its context, which is read often. */
function canvasFor(width, height) {
  const context = html("canvas", { width, height }).getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  return context;
}

/** Return the square that the models take of a picture, RGBA: the shorter side is scaled, the centre is taken. */
function centreOf(source, width, height, { size, crop_share: share }) {
  const scale = Math.round(size / share) / Math.min(width, height);
  const wanted = [width, height].map((side) => Math.max(size, Math.round(side * scale)));
  // In halves first: browsers look at few pixels when they make a picture much smaller at once.
  while (Math.min(width / wanted[0], height / wanted[1]) > 2) {
    [width, height] = [Math.ceil(width / 2), Math.ceil(height / 2)];
    const half = canvasFor(width, height);
    half.drawImage(source, 0, 0, width, height);
    source = half.canvas;
  }
  const context = canvasFor(size, size);
  const [left, top] = wanted.map((side) => Math.floor((side - size) / 2));
  context.drawImage(source, -left, -top, ...wanted);
  return context.getImageData(0, 0, size, size).data;
}

/** Return levels [C, H, W] of RGBA; grey is weighted as Pillow does it. */
function levelsOf(pixels, channels) {
  const count = pixels.length / 4;
  return Uint8Array.from({ length: channels * count }, (_, i) => {
    const at = 4 * (i % count);
    if (channels === 3) return pixels[at + Math.floor(i / count)];
    return (19595 * pixels[at] + 38470 * pixels[at + 1] + 7471 * pixels[at + 2] + 32768) >> 16;
  });
}

/** Return grey levels as the digits have them: light on black. Paper, a light border, is turned round. */
function asInk(levels, size) {
  const border = levels.filter((_, i) => [0, size - 1].some((side) => i % size === side || Math.floor(i / size) === side));
  const light = border.reduce((sum, level) => sum + level, 0) / border.length > 127;
  const turned = light ? levels.map((level) => 255 - level) : levels;
  const [low, high] = [Math.min(...turned), Math.max(...turned)];
  return turned.map((level) => (high > low ? Math.round((255 * (level - low)) / (high - low)) : 0));
}

/** Return the levels of a picture from outside, which a data set `set` takes. */
function takePicture(source, width, height, set) {
  const levels = levelsOf(centreOf(source, width, height, set), set.channels);
  return set.channels === 1 ? asInk(levels, set.size) : levels;
}

async function readFile(file, set) {
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch (error) {
    throw new Error(`${file.name || "This"} is not a picture that the browser can read.`);
  }
  const levels = takePicture(picture, picture.width, picture.height, set);
  picture.close();
  return levels;
}

/** Return the levels of a sample, which has the size of the models: no pixel is changed. */
async function readSample(sample, set) {
  const image = html("img", { src: sample.file });
  await image.decode();
  return levelsOf(centreOf(image, image.naturalWidth, image.naturalHeight, { ...set, crop_share: 1 }), set.channels);
}

// ---- the camera ----

const camera = { stream: null };

async function startCamera() {
  if (!navigator.mediaDevices?.getUserMedia) throw new Error("No camera: the browser gives it to pages over https alone.");
  try {
    camera.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch (error) {
    const refused = error.name === "NotAllowedError";
    throw new Error(refused ? "No camera: the browser was not allowed to use it." : "No camera was found.");
  }
  const video = byId("video");
  video.srcObject = camera.stream;
  await video.play();
}

function stopCamera() {
  camera.stream?.getTracks().forEach((track) => track.stop());
  camera.stream = null;
  byId("video").srcObject = null;
}

// ---- the drawing pad ----

const pen = { x: 128, y: 128, down: false };

/** Draw a line to (x, y), or only move there, and mark the pen. */
function movePen(context, x, y, drawing) {
  if (drawing) {
    Object.assign(context, { lineWidth: 44, lineCap: "round", strokeStyle: "#fff" });
    context.beginPath();
    context.moveTo(pen.x, pen.y);
    context.lineTo(x, y);
    context.stroke();
  }
  Object.assign(pen, { x, y });
  Object.assign(byId("pen").style, { left: `${x / 2.56}%`, top: `${y / 2.56}%` });
  byId("pen").classList.toggle("down", pen.down);
}

function clearPad() {
  const context = byId("pad").getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#000";
  context.fillRect(0, 0, 256, 256);
  pen.down = false;
  movePen(context, 128, 128, false);
}

/** Make the pad draw by pointer and keys; `drawn` is called after every change. */
function makePad(drawn) {
  const pad = byId("pad");
  const context = pad.getContext("2d", { willReadFrequently: true });
  const place = (event) => {
    const area = pad.getBoundingClientRect();
    return [(256 * (event.clientX - area.left)) / area.width, (256 * (event.clientY - area.top)) / area.height];
  };
  pad.addEventListener("pointerdown", (event) => {
    pad.setPointerCapture(event.pointerId);
    movePen(context, ...place(event), false);
    movePen(context, ...place(event), true);
    drawn();
  });
  pad.addEventListener("pointermove", (event) => {
    if (!pad.hasPointerCapture(event.pointerId)) return;
    movePen(context, ...place(event), true);
    drawn();
  });
  pad.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-16, 0], ArrowRight: [16, 0], ArrowUp: [0, -16], ArrowDown: [0, 16], " ": [0, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    if (event.key === " ") pen.down = !pen.down;
    const [x, y] = [pen.x + step[0], pen.y + step[1]].map((value) => Math.max(0, Math.min(256, value)));
    movePen(context, x, y, pen.down);
    drawn();
  });
}
