/* Building blocks: elements are made with text, never from markup, so a name can be nothing but a name. */
const $ = (id) => document.getElementById(id);

function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (key === "on") for (const [k, f] of Object.entries(value)) node.addEventListener(k, f);
    else if (key === "data") for (const [k, v] of Object.entries(value)) node.dataset[k] = v;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== "") node.append(child);
  }
  return node;
}

const css = (name) =>
  getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name)
    .trim();
const finite = (x) => typeof x === "number" && Number.isFinite(x);

function digits(value, most) {
  if (!finite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) return value.toExponential(2);
  return String(Number(value.toPrecision(most || 4)));
}

/* Seconds in words, as report/tables.py words them: 1.2 s, 123.4 ms, 56.7 µs. */
function duration(seconds) {
  if (!finite(seconds)) return "–";
  const size = Math.abs(seconds);
  const [factor, unit] = size >= 1 || size === 0 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${digits(seconds * factor)} ${unit}`;
}

function unitFor(seconds) {
  return seconds >= 10 ? [1, "s"] : seconds >= 1e-2 ? [1e3, "ms"] : [1e6, "µs"];
}

function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${digits(value)} ${unit}`;
    value /= 1024;
  }
  return `${digits(value)} TiB`;
}

function clock(seconds) {
  const s = Math.round(seconds);
  const two = (x) => String(x).padStart(2, "0");
  const h = Math.floor(s / 3600),
    m = Math.floor(s / 60) % 60;
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

function cellOf(cell, column, first) {
  const data = finite(cell.value) ? { value: cell.value } : undefined;
  const props = { class: column.numeric ? "num" : undefined, data, title: first ? cell.text : undefined };
  return first ? el("th", { scope: "row", ...props }, cell.text) : el("td", props, cell.text);
}

function tableOf(table, id) {
  const head = table.columns.map((c) =>
    el(
      "th",
      { scope: "col", class: c.numeric ? "num" : undefined },
      c.title,
      c.unit ? el("small", {}, c.unit) : null,
    ),
  );
  const body = table.rows.map((row) =>
    el(
      "tr",
      {},
      row.map((cell, i) => cellOf(cell, table.columns[i], i === 0)),
    ),
  );
  return el(
    "div",
    {},
    el("p", { class: "caption", id: `${id}-caption` }, table.caption),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": `${id}-caption` },
      el(
        "table",
        { class: table.total ? "total" : undefined, id, "aria-labelledby": `${id}-caption` },
        el("thead", {}, el("tr", {}, head)),
        el("tbody", {}, body),
      ),
    ),
  );
}

const chip = (color) =>
  el("span", { class: "chip", style: { background: `var(--${color})` }, "aria-hidden": "true" });
const keyOf = (pairs) =>
  el(
    "ul",
    { class: "key" },
    pairs.map(([key, name]) => el("li", {}, chip(key), name)),
  );
const CAUSES = [
  "compute",
  "wait",
  "transfer",
  "bubble",
  "reduce",
  "optimizer",
  "input",
  "overhead",
  "left_out",
];
const causeColor = (cause) => (CAUSES.includes(cause) ? cause : "overhead");

function fill(id, title, lead, ...parts) {
  const section = $(id);
  section.hidden = false;
  const heading = `${id}-title`;
  section.setAttribute("aria-labelledby", heading);
  section.replaceChildren(
    el("h2", { id: heading }, title),
    lead ? el("p", { class: "lead" }, lead) : "",
    ...parts.flat().filter(Boolean),
  );
}

function empty(id) {
  $(id).hidden = true;
  $(id).replaceChildren();
}

function showTip(text, x, y) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = !text;
  if (!text) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18}px`;
}

function tipped(node, text) {
  node.addEventListener("pointermove", (e) => showTip(text, e.clientX, e.clientY));
  node.addEventListener("pointerleave", () => showTip(""));
  return node;
}
