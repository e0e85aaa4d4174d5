/* Loss and step time by uPlot. */
let charts = [];
const STEPS = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((x) => x * 10 ** power));

function drawCurves(doc, compared) {
  charts.forEach((c) => c.destroy());
  charts = [];
  const curves = doc.curves;
  if (!curves.step.length) return empty("curves");
  const each = curves.every > 1 ? ` Each point is the mean of ${curves.every} steps.` : "";
  const holders = ["loss-chart", "seconds-chart"].map((id) => el("div", { class: "chart", id }));
  fill(
    "curves",
    "Loss and step time",
    `Training loss, mean over the global batch, and seconds of each step, measured.${each} Drag across a chart to look closer, double-click to go back.`,
    el("div", { class: "charts" }, holders),
    curveTable(curves),
  );
  const others = compared ? compared.curves : null;
  const loss = joined(curves, others, "loss", doc.name, compared);
  for (const [name, value] of curves.references)
    loss.lines.push({ label: name, dash: [5, 4], values: loss.x.map(() => value) });
  plot(holders[0], "loss", loss, (v) => digits(v, 5));
  const [factor, unit] = unitFor(
    Math.max(
      ...curves.step_s
        .slice()
        .sort((a, b) => a - b)
        .slice(0, Math.ceil(curves.step_s.length * 0.9)),
    ),
  );
  const time = joined(curves, others, "step_s", doc.name, compared);
  time.lines.forEach((l) => {
    l.values = l.values.map((v) => (finite(v) ? v * factor : null));
  });
  if (curves.predicted_s)
    ["lower bound", "predicted", "upper bound"].forEach((label, i) =>
      time.lines.push({
        label,
        color: i === 1 ? "d1" : "faint",
        dash: i === 1 ? [5, 4] : [2, 4],
        values: time.x.map(() => curves.predicted_s[i] * factor),
      }),
    );
  plot(holders[1], `step, ${unit}`, time, (v) => digits(v, 4));
}

/* Both runs on one axis of steps; a step that one of them lacks is a gap. */
function joined(ours, theirs, field, name, compared) {
  if (!theirs)
    return {
      x: ours.step,
      lines: [{ label: field === "loss" ? "training" : "measured", values: ours[field] }],
    };
  const x = [...new Set([...ours.step, ...theirs.step])].sort((a, b) => a - b);
  const spread = (curves) => {
    const at = new Map(curves.step.map((s, i) => [s, curves[field][i]]));
    return x.map((s) => {
      const v = at.get(s);
      return finite(v) ? v : null;
    });
  };
  return {
    x,
    lines: [
      { label: name, values: spread(ours) },
      { label: compared.name, values: spread(theirs) },
    ],
  };
}

function plot(holder, title, data, text) {
  const colors = ["d0", "d2", "d1", "d3", "d4", "d5", "d6", "d7"];
  const axis = {
    stroke: css("soft"),
    grid: { stroke: css("line"), width: 1 },
    ticks: { stroke: css("line"), width: 1 },
    font: `11px ${css("sans")}`,
  };
  const series = data.lines.map((l, i) => ({
    label: l.label.slice(0, 60),
    stroke: css(l.color || colors[i % 8]),
    width: l.dash ? 1 : 1.75,
    dash: l.dash,
    spanGaps: true,
    points: { show: data.x.length < 40 && !l.dash, size: 4 },
    value: (_, v) => (v === null || v === undefined ? "–" : text(v)),
  }));
  const width = () => Math.max(240, holder.clientWidth);
  const chart = new uPlot(
    {
      width: width(),
      height: 260,
      series: [{ label: "step" }, ...series],
      scales: { x: { time: false } },
      axes: [
        { ...axis, incrs: STEPS },
        {
          ...axis,
          size: 56,
          label: title,
          labelSize: 18,
          labelFont: `11px ${css("sans")}`,
          values: (_, ticks) => ticks.map((t) => digits(t)),
        },
      ],
    },
    [data.x, ...data.lines.map((l) => l.values)],
    holder,
  );
  chart.root.querySelector("canvas").setAttribute("role", "img");
  chart.root
    .querySelector("canvas")
    .setAttribute("aria-label", `${title} over steps; the figures are in the table below`);
  chart.fit = () => chart.setSize({ width: width(), height: 260 });
  charts.push(chart);
}

function curveTable(curves) {
  const MOST = 20,
    count = curves.step.length,
    stride = Math.max(1, Math.ceil(count / MOST)),
    rows = [];
  for (let i = 0; i < count; i += stride) rows.push(i);
  if (rows[rows.length - 1] !== count - 1) rows.push(count - 1);
  const table = {
    caption: `${rows.length} of ${count} points`,
    columns: [
      { title: "step" },
      { title: "loss", unit: "mean over the global batch", numeric: true },
      { title: "step", unit: "s", numeric: true },
    ],
    rows: rows.map((i) => [
      { text: String(curves.step[i]) },
      { text: finite(curves.loss[i]) ? curves.loss[i].toFixed(4) : "not finite", value: curves.loss[i] },
      { text: digits(curves.step_s[i]), value: curves.step_s[i] },
    ]),
  };
  return el("details", {}, el("summary", {}, "Figures"), tableOf(table, "curve-table"));
}
