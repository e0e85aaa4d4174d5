/* Puts the page together from the document, and again in part when a live run sends parts of it. */
const given = JSON.parse($("data").textContent);
const doc = given.document,
  compared = given.comparison;

function drawHead() {
  const p = doc.progress,
    done = p.total ? p.done / p.total : null;
  const running = given.live && !doc.badges.some(([, text]) => text === "finished");
  const left = finite(p.left_s) ? `, ${clock(p.left_s)} left` : "";
  $("head").replaceChildren(
    el("h1", {}, doc.name),
    el("p", { class: "sub" }, doc.headline),
    el(
      "ul",
      { class: "badges" },
      doc.badges.map(([kind, text]) => el("li", { class: kind }, text)),
      given.live ? el("li", { id: "link" }, "connecting") : null,
    ),
    running && done !== null
      ? el(
          "div",
          { class: "progress" },
          el(
            "div",
            {
              role: "progressbar",
              "aria-valuemin": 0,
              "aria-valuemax": p.total,
              "aria-valuenow": p.done,
              "aria-label": "Steps done",
            },
            el("i", { style: { width: `${100 * Math.min(1, done)}%` } }),
          ),
          el("p", {}, `step ${p.done} of ${p.total}${left}`),
        )
      : "",
  );
  document.title =
    running && done !== null ? `${Math.floor(100 * done)} % · ${doc.name}` : `${doc.name} · evener`;
}

function drawStats() {
  $("stats").replaceChildren(
    ...doc.stats.map((s) =>
      el(
        "div",
        { class: "stat", id: `stat-${s.key}`, data: finite(s.value) ? { value: s.value } : {} },
        el("p", { class: "label" }, s.label),
        el("p", { class: "figure" }, s.text, s.unit ? el("span", { class: "unit" }, s.unit) : null),
        el("p", { class: "small" }, s.source),
        s.note ? el("p", { class: "small" }, s.note) : null,
      ),
    ),
  );
}

function drawSaid() {
  if (!doc.said.length) return empty("said");
  fill(
    "said",
    "Decisions",
    "What was decided and why, word for word, and what else must be known.",
    el(
      "ul",
      { class: "said" },
      doc.said.map((d) =>
        el(
          "li",
          {},
          el("span", { class: `kind ${["warning", "skipped"].includes(d.kind) ? d.kind : ""}` }, d.kind),
          el(
            "div",
            {},
            d.subject ? el("p", {}, el("b", {}, d.subject)) : null,
            el("p", {}, d.reason, " ", el("small", {}, d.source)),
          ),
        ),
      ),
    ),
  );
}

function drawCost() {
  if (!doc.cost && !doc.cost_note) return empty("cost");
  fill(
    "cost",
    "Cost",
    doc.cost_note ? `${doc.cost_note}.` : "",
    doc.cost ? tableOf(doc.cost, "cost-table") : null,
  );
}

function drawComparison() {
  if (!compared) return empty("comparison");
  fill(
    "comparison",
    `Beside ${compared.name}`,
    "The first run is that of this page.",
    compared.notes.map((n) => el("p", { class: "hint" }, n)),
    tableOf(compared.table, "comparison-table"),
    compared.lost ? [el("h3", {}, "Lost time"), tableOf(compared.lost, "comparison-lost")] : null,
  );
}

const draw = {
  head: drawHead,
  stats: drawStats,
  plan: () => drawPlan(doc),
  timeline: () => drawTimeline(doc),
  lost: () => drawLost(doc),
  beside: () => drawBeside(doc),
  curves: () => drawCurves(doc, compared),
  said: drawSaid,
  cost: drawCost,
  comparison: drawComparison,
  notes: () => $("notes").replaceChildren(...doc.notes.map((n) => el("li", {}, n))),
  text: () => {
    $("plain").textContent = doc.text;
    $("text").hidden = !doc.text;
  },
};
const DRAWN_BY = { name: "head", headline: "head", badges: "head", progress: "head", cost_note: "cost" };

function drawNav() {
  const names = [
    ["comparison", "Comparison"],
    ["plan", "Plan"],
    ["timeline", "Timeline"],
    ["lost", "Lost time"],
    ["beside", "Predicted"],
    ["curves", "Loss"],
    ["said", "Decisions"],
    ["cost", "Cost"],
    ["text", "Text"],
    ["sources", "Sources"],
  ];
  $("nav").replaceChildren(
    ...names.filter(([id]) => !$(id).hidden).map(([id, name]) => el("a", { href: `#${id}` }, name)),
  );
}

function redraw(parts) {
  for (const part of parts) draw[part]();
  drawNav();
}

redraw(Object.keys(draw));
addEventListener("resize", () => {
  requestDraw();
  charts.forEach((c) => c.fit());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  requestDraw();
  drawCurves(doc, compared);
});
const shut = new Set();
addEventListener("beforeprint", () => {
  document.querySelectorAll("details:not([open])").forEach((d) => {
    shut.add(d);
    d.open = true;
  });
});
addEventListener("afterprint", () => {
  shut.forEach((d) => {
    d.open = false;
  });
  shut.clear();
});
if (given.live) follow();
document.documentElement.dataset.drawn = "yes";
