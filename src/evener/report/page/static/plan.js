/* The plan as a picture: the global batch, pipelines of stages, and memory. */
const MOST_PIPELINES = 24;
const deviceColor = (doc, name) => `d${Math.max(0, doc.plan.devices.indexOf(name)) % 8}`;

function drawPlan(doc) {
  const plan = doc.plan;
  const rows = plan.pipelines.map((p, i) => pipelineRow(doc, p, i));
  const staged = plan.pipelines.some((p) => p.stages.length > 1);
  fill(
    "plan",
    "Plan",
    `${plan.headline}.${plan.why ? ` ${plan.why}` : ""}`,
    batchBar(doc),
    rows.slice(0, MOST_PIPELINES),
    rows.length > MOST_PIPELINES
      ? el(
          "details",
          {},
          el("summary", {}, `${rows.length - MOST_PIPELINES} more pipelines`),
          rows.slice(MOST_PIPELINES),
        )
      : null,
    staged
      ? el("p", { class: "hint" }, `A stage is as wide as its part of its pipeline by ${plan.weight_unit}.`)
      : null,
    memoryBars(doc),
    tableOf(plan.table, "devices"),
  );
}

function batchBar(doc) {
  const parts = doc.plan.pipelines
    .filter((p) => p.samples > 0)
    .map((p) => {
      const first = p.stages[0].holders[0].devices[0];
      const text = `${p.samples}`;
      const label =
        p.stages.length === 1 && p.stages[0].holders.length === 1
          ? p.stages[0].holders[0].devices.join(", ")
          : `pipeline of ${p.stages.length} stages`;
      const node = el(
        "span",
        { style: { "flex-grow": p.part, "flex-basis": 0, background: `var(--${deviceColor(doc, first)})` } },
        `${text} · ${label}`,
      );
      return tipped(node, `${label}\n${text} samples, ${(100 * p.part).toFixed(1)} % of the global batch`);
    });
  return el(
    "div",
    {
      class: "batch",
      role: "img",
      "aria-label": "Parts of the global batch by pipeline; the rows below say the same",
    },
    parts,
  );
}

function pipelineRow(doc, p, number) {
  const total = p.stages.reduce((sum, s) => sum + s.weight, 0) || 1;
  return el(
    "div",
    { class: p.stages.length > 1 || p.stages[0].holders.length > 1 ? "pipeline" : "pipeline flat" },
    el(
      "p",
      {},
      el("b", {}, `Pipeline ${number}`),
      `${p.samples} samples, ${(100 * p.part).toFixed(1)} %`,
      el("br"),
      `in micro-batches ${p.micro_batches || "none"}`,
    ),
    el(
      "div",
      { class: "stages" },
      p.stages.map((s) => stageBox(doc, s, s.weight / total)),
    ),
  );
}

function stageBox(doc, s, share) {
  const color = deviceColor(doc, s.holders[0].devices[0]);
  const box = el(
    "div",
    { class: "stage", style: { "flex-grow": Math.max(share, 0.12), "border-left-color": `var(--${color})` } },
    el("p", {}, el("b", {}, `Stage ${s.number}`), ` ${s.title}`),
    el("p", {}, s.facts.join(" · ")),
    el(
      "ul",
      {},
      s.holders.map((h) =>
        el(
          "li",
          {},
          chip(deviceColor(doc, h.devices[0])),
          el("span", {}, h.devices.join(" + ")),
          el("small", {}, `${h.samples} at once`),
        ),
      ),
    ),
  );
  return tipped(box, `layers: ${s.layers.slice(0, 40).join(", ")}${s.layers.length > 40 ? " …" : ""}`);
}

function memoryBars(doc) {
  const known = doc.plan.memory.filter((m) => finite(m.predicted) || finite(m.measured));
  if (!known.length) return null;
  const rows = known.map((m) => {
    const whole = Math.max(m.limit || 0, m.predicted || 0, m.measured || 0);
    const over = finite(m.limit) && Math.max(m.predicted || 0, m.measured || 0) > m.limit;
    const bar = (kind, value) =>
      finite(value)
        ? el("i", {
            class: kind,
            style: {
              width: `${(100 * value) / whole}%`,
              "min-width": "2px",
              background: over ? "var(--bad)" : `var(--${deviceColor(doc, m.device)})`,
            },
          })
        : null;
    const said = [];
    if (finite(m.predicted)) said.push(`${bytes(m.predicted)} predicted (${m.predicted_source})`);
    if (finite(m.measured)) said.push(`${bytes(m.measured)} used (${m.measured_source})`);
    if (finite(m.limit)) said.push(`of ${bytes(m.limit)} (${m.limit_source})`);
    return el(
      "div",
      { class: "hold" },
      el("span", {}, m.device),
      el(
        "div",
        { class: "track", "aria-hidden": "true" },
        bar("predicted", m.predicted),
        bar("measured", m.measured),
      ),
      el("small", {}, said.join(" · ")),
    );
  });
  return [
    el("h3", {}, "Memory at its peak"),
    el("div", { id: "memory" }, rows.slice(0, 64)),
    rows.length > 64 ? el("p", { class: "hint" }, `${rows.length - 64} more devices are in the table`) : null,
  ];
}
