/* Seconds by cause as bars: lost time either side of zero, and predicted over measured. */
function drawLost(doc) {
  if (!doc.lost) return empty("lost");
  const { table, causes, sentence } = doc.lost;
  const sums = table.rows.map((row) => {
    const values = row.slice(1, -1).map((c) => c.value || 0);
    return [
      values.filter((v) => v < 0).reduce((a, b) => a + b, 0),
      values.filter((v) => v > 0).reduce((a, b) => a + b, 0),
    ];
  });
  const left = -Math.min(0, ...sums.map((s) => s[0])),
    right = Math.max(1e-12, ...sums.map((s) => s[1]));
  const at = (s) => `${(100 * (s + left)) / (left + right)}%`;
  const rows = table.rows.map((row, i) => {
    let up = 0,
      down = 0;
    const parts = causes.map(([key, name], k) => {
      const v = row[k + 1].value || 0;
      if (!v) return null;
      const from = v > 0 ? up : down + v;
      if (v > 0) up += v;
      else down += v;
      const node = el("i", {
        style: {
          left: at(from),
          width: `${(100 * Math.abs(v)) / (left + right)}%`,
          background: `var(--${causeColor(key)})`,
        },
      });
      return tipped(
        node,
        `${row[0].text}: ${name}\n${duration(v)} a step${v < 0 ? ", less than alone" : ""}`,
      );
    });
    const last = i === table.rows.length - 1;
    return [
      el("span", { class: last ? "name whole" : "name", title: row[0].text }, row[0].text),
      el("div", { class: "stack" }, parts, el("i", { class: "zero", style: { left: at(0) } })),
      el("span", { class: last ? "value whole" : "value" }, duration(row[row.length - 1].value)),
    ];
  });
  const MOST = 40;
  const shown = rows.length > MOST ? [...rows.slice(0, MOST - 1), rows[rows.length - 1]] : rows;
  fill(
    "lost",
    "Lost time",
    "What a step takes beyond what the same samples take on each device alone, by cause. The last row is the whole job.",
    keyOf(causes.map(([key, name]) => [causeColor(key), name])),
    el(
      "div",
      {
        class: "bars",
        role: "img",
        "aria-label": "Lost seconds by device and cause; the table below holds the same figures",
      },
      shown,
    ),
    rows.length > MOST
      ? el("p", { class: "hint" }, `${rows.length - MOST} more devices are in the table`)
      : null,
    el("p", { class: "sentence", id: "gap", data: { value: doc.lost.gap_s } }, sentence),
    tableOf(table, "lost-table"),
  );
}

function drawBeside(doc) {
  if (!doc.beside) return empty("beside");
  const devices = [...new Set(doc.beside.pairs.map((p) => p.device))];
  const total = (device, field) =>
    doc.beside.pairs.filter((p) => p.device === device).reduce((sum, p) => sum + Math.max(0, p[field]), 0);
  const most = Math.max(
    1e-12,
    ...devices.map((d) => Math.max(total(d, "predicted_s"), total(d, "measured_s"))),
  );
  const bar = (device, field, name) => {
    let from = 0;
    return el(
      "div",
      { class: "stack thin" },
      doc.beside.pairs
        .filter((p) => p.device === device && p[field] > 0)
        .map((p) => {
          const node = el("i", {
            style: {
              left: `${(100 * from) / most}%`,
              width: `${(100 * p[field]) / most}%`,
              background: `var(--${causeColor(p.cause)})`,
              opacity: field === "predicted_s" ? ".6" : "1",
            },
          });
          from += p[field];
          return tipped(node, `${device}: ${p.cause}, ${name}\n${duration(p[field])} a step`);
        }),
    );
  };
  const rows = devices
    .slice(0, 40)
    .map((device) => [
      el("span", { class: "name", title: device }, device),
      el(
        "div",
        { class: "two" },
        bar(device, "predicted_s", "predicted"),
        bar(device, "measured_s", "measured"),
      ),
      el("span", { class: "value" }, duration(total(device, "measured_s"))),
    ]);
  const causes = [...new Set(doc.beside.pairs.map((p) => p.cause))].map((c) => [causeColor(c), c]);
  const table = tableOf(doc.beside.table, "beside-table");
  fill(
    "beside",
    "Predicted beside measured",
    "Each device's step: predicted above (paler), measured below. Values are measured seconds in these causes.",
    keyOf(causes),
    el(
      "div",
      {
        class: "bars",
        role: "img",
        "aria-label": "Predicted and measured seconds by device and cause; the table holds the same figures",
      },
      rows,
    ),
    el("p", { class: "sentence" }, doc.beside.sentence),
    doc.beside.table.rows.length > 45
      ? el("details", {}, el("summary", {}, `All ${devices.length} devices`), table)
      : table,
  );
}
