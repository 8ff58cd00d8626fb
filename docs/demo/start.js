"use strict";
// First of all: count errors, so that a broken page says so, and take the theme of the documentation, if one was chosen.
var pageErrors = 0;
function countError() {
  pageErrors += 1;
  if (document.body) document.body.dataset.errors = String(pageErrors);
}
window.addEventListener("error", countError);
window.addEventListener("unhandledrejection", countError);
(() => {
  let theme = new URLSearchParams(location.search).get("theme");
  try {
    const site = Object.keys(localStorage).find((key) => key.endsWith(".__palette"));
    const scheme = site && JSON.parse(localStorage.getItem(site)).color?.scheme;
    theme ??= localStorage.getItem("lrfdyn-theme") ?? { slate: "dark", default: "light" }[scheme];
  } catch (error) { /* storage is blocked, or holds something else */ }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
