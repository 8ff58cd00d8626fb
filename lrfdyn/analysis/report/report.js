// The page from top to bottom: its header, notes and footer, and the order of its parts.

function themeButton() {
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const current = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  const other = () => (current() === "dark" ? "light" : "dark");
  const label = () => {
    button.textContent = other() === "dark" ? "Dark theme" : "Light theme";
  };
  button.addEventListener("click", () => {
    const theme = other();
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("lrfdyn-theme", theme); } catch (error) { /* storage is blocked: not remembered */ }
    label();
  });
  dark.addEventListener("change", label);
  label();
}

async function copy(text, code, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch (error) {
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function intro() {
  const { machine = {} } = results;
  const processor = [machine.cpu ?? "–", plural(machine.cores, "core"), plural(machine.threads, "thread")];
  const facts = [["Machine", [machine.gpu, ...processor].filter(Boolean).join(", ")],
    ["Software", `Python ${machine.python ?? "–"}, PyTorch ${machine.torch ?? "–"}`],
    ["Time", (results.train_seconds ? `training ${duration(results.train_seconds)}, ` : "") +
      `analysis ${duration(results.wall_seconds)}`],
    ["Made", String(results.created ?? "–").replace("T", " ")]].slice(results.machine ? 0 : 3);
  const code = html("code", {}, results.command ?? "");
  const button = html("button", { type: "button", class: "quiet", "aria-label": "Copy the command",
    click: () => copy(code.textContent, code, button) }, "Copy");
  document.getElementById("intro").append(...[results.lead ? html("p", { class: "lead" }, prose(results.lead)) : "",
    html("ul", { class: "facts" }, facts.map(([name, value]) => html("li", {}, name, html("b", {}, value)))),
    results.command ? html("div", { class: "command" }, code, button) : ""].filter(Boolean));
}

function closing() {
  if ((results.notes ?? []).length) {
    const items = results.notes.map((note) => html("li", {}, prose(plain(note))));
    section("notes", "Notes").append(html("ul", { class: "notes" }, items));
  }
  document.getElementById("foot").append(
    html("p", {}, `Made by lrfdyn ${results.version ?? ""}. All numbers are in this file; it loads nothing.`),
    html("p", {}, "If you use this, please cite the paper: ", html("cite", {},
      "Neural Dynamics Self-Attention for Spiking Transformers"), "."));
}

function contents() {
  const items = [...document.querySelectorAll("main > section")].map((part) =>
    html("li", {}, html("a", { href: `#${part.id}` }, part.getAttribute("aria-label"))));
  const nav = document.getElementById("contents");
  nav.append(html("b", {}, "Contents"), html("ol", {}, items));
  nav.hidden = items.length < 2;
}

const PARTS = [
  themeButton, intro, summary,
  theoryFigures, checksTable,
  () => {
    // One model alone would be a lone dot.
    if (kinds.filter((kind) => isNumber(kind.accuracy_mean) && isNumber(kind.peak_inference_bytes)).length > 1) {
      accuracyFigure(section("accuracy", "Accuracy and memory"));
    }
  },
  () => {
    if ((results.runs ?? []).some((run) => (run.curve ?? []).length > 1)) curveFigure(section("learning", "Learning"));
  },
  () => {
    if (!kinds.some((kind) => kind.locality)) return;
    const parent = section("locality", "Where attention goes");
    const pair = html("div", { class: "pair" });
    parent.append(pair);
    distanceFigure(pair);
    shareFigure(pair);
    entropyFigure(parent);
    scoresFigure(parent);
    mapsFigure(parent);
  },
  () => {
    if (kinds.some((kind) => kind.receptive_field)) fieldFigures(section("fields", "What the model sees"));
  },
  energySection, firingSection, stateTable, details, closing, contents,
];

for (const part of PARTS) {
  // One part that fails must not take the rest of the page with it, but must be counted.
  try { part(); } catch (error) { reportError(error); }
}
document.body.dataset.errors = String(pageErrors);
