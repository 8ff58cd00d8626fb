// The page of a recording from top to bottom.

build([
  themeButton, () => introduce(results.facts),
  () => playerFigure(section("recording", "The recording")),
  () => scoresFigure(section("says", "What the network says")),
  () => firingFigure(section("fires", "How its layers fire")),
  closing,
]);
