// The report from top to bottom: its facts and the order of its parts.

function intro() {
  const { machine = {} } = results;
  const processor = [machine.cpu ?? "–", plural(machine.cores, "core"), plural(machine.threads, "thread")];
  const facts = [["Machine", [machine.gpu, ...processor].filter(Boolean).join(", ")],
    ["Software", `Python ${machine.python ?? "–"}, PyTorch ${machine.torch ?? "–"}`],
    ["Time", (results.train_seconds ? `training ${duration(results.train_seconds)}, ` : "") +
      `analysis ${duration(results.wall_seconds)}`],
    ["Made", String(results.created ?? "–").replace("T", " ")]].slice(results.machine ? 0 : 3);
  introduce(facts);
}

build([
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
]);
