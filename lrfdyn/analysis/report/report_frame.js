// What every page has: sections, tables that scroll and sort, the button for the theme, the command and the footer.

const results = JSON.parse(document.getElementById("results").textContent);
const page = document.getElementById("main");

function section(id, title, lead) {
  const node = html("section", { id, "aria-label": title }, html("h2", {}, title, anchor(id, title)),
    lead ? html("p", { class: "soft" }, lead) : null);
  page.append(node);
  return node;
}

/** Return `table` in a box that scrolls sideways, and says so where the table is wider than it. */
function scrolling(label, table) {
  const look = () => {
    const hidden = box.scrollWidth - box.clientWidth;
    frame.classList.toggle("wide", hidden > 1);
    frame.classList.toggle("more", hidden - box.scrollLeft > 1);
  };
  const box = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label, scroll: look }, table);
  const frame = html("div", { class: "frame" }, html("div", { class: "edge" }, box),
    html("p", { class: "cue", "aria-hidden": "true" }, "Scroll sideways for more columns →"));
  for (const node of [box, table]) onResize(node, look);
  return frame;
}

const heading = (text, name = null) => html("th", { scope: "col", class: name }, text);
const plain = (value) =>
  (value !== null && typeof value === "object" ? JSON.stringify(value) : String(value ?? "–"));

const folded = (title, ...content) => html("details", {}, html("summary", {}, title), ...content);

/** Sort key of a cell: its number where it has one. */
const sortValue = (cell) => (cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value));

/** Return a table whose columns sort; `heads` are texts or nodes and `rows` lists of cells. */
function grid(label, heads, rows) {
  const body = html("tbody", {}, rows.map((cells) => html("tr", {}, cells)));
  const original = [...body.rows];
  const headers = heads.map((head, column) => {
    const header = html("th", { scope: "col", "aria-sort": "none" },
      html("button", { type: "button", class: "sort", title: "Sort by this column", click: () => {
        const next = { none: "descending", descending: "ascending", ascending: "none" }[header.getAttribute("aria-sort")];
        for (const other of headers) {
          other.setAttribute("aria-sort", other === header ? next : "none");
          other.querySelector(".arrow").textContent =
            other !== header || next === "none" ? "↕" : next === "ascending" ? "↑" : "↓";
        }
        const sign = next === "ascending" ? 1 : -1;
        const order = (a, b) => {
          const [one, two] = [sortValue(a.cells[column]), sortValue(b.cells[column])];
          if (typeof one === "string" || typeof two === "string") return sign * String(one).localeCompare(String(two));
          if (Number.isNaN(one) || Number.isNaN(two)) return Number(Number.isNaN(one)) - Number(Number.isNaN(two));
          return sign * (one - two);
        };
        body.append(...(next === "none" ? original : [...original].sort(order)));
      } }, head, html("span", { class: "arrow", "aria-hidden": "true" }, "↕")));
    return header;
  });
  return scrolling(label, html("table", { class: "pinned" }, html("thead", {}, html("tr", {}, headers)), body));
}

/** Return a cell with the number that it sorts by. */
const numberCell = (value, text, extra = {}) =>
  html("td", { "data-value": isNumber(value) ? value : NaN, ...extra }, text);

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

/** Show the lead, the facts ([[name, value], ...]) and the command under the title. */
function introduce(facts) {
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

/** Make the page of its parts, one after the other. */
function build(parts) {
  for (const part of parts) {
    // One part that fails must not take the rest of the page with it, but must be counted.
    try { part(); } catch (error) { reportError(error); }
  }
  document.body.dataset.errors = String(pageErrors);
}
