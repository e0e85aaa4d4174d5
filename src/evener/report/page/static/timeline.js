/* The timeline: one lane a device on a canvas; only what is in view is drawn, what shares a pixel once. */
const NS = 1e9,
  LANE = 42,
  BAR = 19,
  THIN = 7,
  AXIS = 24;
let view = null;

const KINDS = {
  F: "forward",
  B: "backward",
  I: "backward, input part",
  W: "backward, weight part",
  SEND_F: "send activations",
  RECV_F: "receive activations",
  SEND_B: "send gradients",
  RECV_B: "receive gradients",
};

function actionName(action) {
  if (action === "STEP") return "optimiser step";
  if (action === "INPUT") return "reading samples";
  const m = /^(\d*)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|F|B|I|W)(\d*)$/.exec(action);
  if (!m) return action;
  if (m[2] === "REDUCE_GRAD") return `sum of gradients${m[1] ? `, stage ${m[1]}` : ""}`;
  return `${KINDS[m[2]]}, stage ${m[1]}, micro-batch ${m[3]}`;
}

/* Per lane the places of its spans in order of start, and where each step begins and ends. */
function indexed(trace, order) {
  const lanes = order.map(() => []);
  const place = trace.devices.map((d) => order.indexOf(d));
  const steps = new Map();
  for (let i = 0; i < trace.start_ns.length; i++) {
    lanes[place[trace.device[i]]].push(i);
    const from = trace.start_ns[i],
      to = from + trace.length_ns[i],
      s = steps.get(trace.step[i]);
    if (!s) steps.set(trace.step[i], { from, to });
    else {
      if (from < s.from) s.from = from;
      if (to > s.to) s.to = to;
    }
  }
  return { trace, lanes, steps };
}

function drawTimeline(doc) {
  if (!doc.timeline) {
    view = null;
    return empty("timeline");
  }
  const traces = doc.timeline.traces;
  const main = traces.find((t) => t.source === "measured") || traces[0];
  const other = traces.find((t) => t !== main && t.source === "predicted");
  const named = new Set(traces.flatMap((t) => t.devices));
  const order = [
    ...doc.plan.devices.filter((d) => named.has(d)),
    ...[...named].filter((d) => !doc.plan.devices.includes(d)),
  ];
  const steps = main.steps.filter((s) => s >= 0);
  view = {
    doc,
    order,
    main: indexed(main, order),
    other: other ? indexed(other, order) : null,
    from: 0,
    to: 1,
    lane: 0,
    picked: -1,
  };
  view.end = Math.max(1, ...[...view.main.steps.values()].map((s) => s.to));
  const canvas = el("canvas", {
    id: "lanes",
    tabindex: "0",
    role: "application",
    "aria-roledescription": "timeline",
    "aria-describedby": "timeline-hint",
    "aria-label": `Timeline of ${order.length} devices, ${main.start_ns.length} ${main.source} spans`,
  });
  const select = el(
    "select",
    { id: "step", "aria-label": "Step", on: { change: () => showStep(Number(select.value)) } },
    main.steps.map((s) => el("option", { value: s }, s < 0 ? "held-out evaluation" : `step ${s}`)),
  );
  const tool = (text, label, act) =>
    el("button", { type: "button", "aria-label": label, title: label, on: { click: act } }, text);
  const what =
    other && main.source === "measured"
      ? "thick bars measured, thin bars below predicted"
      : `${main.source} spans`;
  fill(
    "timeline",
    "Timeline of a step",
    `Who did what when: ${what}, one lane a device.`,
    keyOf(
      doc.timeline.causes
        .filter((_, i) => traces.some((t) => t.cause.includes(i)))
        .map(([key, name]) => [causeColor(key), name]),
    ),
    el(
      "div",
      { class: "tools" },
      tool("‹", "Step before", () => nextStep(-1)),
      select,
      tool("›", "Step after", () => nextStep(1)),
      tool("+", "Zoom in", () => zoom(0.5)),
      tool("−", "Zoom out", () => zoom(2)),
      tool("All steps", "Show the whole trace", () => look(0, view.end)),
      el("span", { id: "window", class: "sub" }),
    ),
    el("div", { class: "lanes" }, canvas),
    el(
      "p",
      { class: "hint", id: "timeline-hint" },
      "Drag to move, Ctrl + wheel or a pinch to zoom, double-click to look closer. Keys: arrows choose a span, + and − zoom, 0 shows all, [ and ] change the step.",
    ),
    el("p", { class: "picked", id: "picked", "aria-live": "polite" }),
    el("div", { id: "step-table" }),
    doc.timeline.notes.map((n) => el("p", { class: "hint" }, n)),
  );
  view.canvas = canvas;
  listen(canvas);
  showStep(steps.length ? steps[steps.length - 1] : main.steps[0]);
}

function showStep(step) {
  const s = view.main.steps.get(step);
  if (!s) return;
  $("step").value = String(step);
  const margin = (s.to - s.from) * 0.015 || 1;
  look(s.from - margin, s.to + margin);
  $("step-table").replaceChildren(tableOf(stepTable(step), "step-figures"));
}

function nextStep(by) {
  const steps = view.main.trace.steps;
  showStep(steps[Math.max(0, Math.min(steps.length - 1, steps.indexOf(Number($("step").value)) + by))]);
}

/* Seconds by device and cause of one step, summed from the spans that are drawn. */
function stepTable(step) {
  const { trace, lanes, steps } = view.main;
  const causes = view.doc.timeline.causes;
  const sums = lanes.map((lane) => {
    const by = causes.map(() => 0);
    for (const i of lane) if (trace.step[i] === step) by[trace.cause[i]] += trace.length_ns[i];
    return by;
  });
  const used = causes.map((_, c) => c).filter((c) => sums.some((by) => by[c] > 0));
  const whole = steps.get(step),
    length = whole.to - whole.from;
  const [factor, unit] = unitFor(length / NS);
  const cell = (ns) => ({ text: ((ns / NS) * factor).toFixed(2), value: ns / NS });
  return {
    caption: `${step < 0 ? "Held-out evaluation" : `Step ${step}`}, ${trace.source}: ${duration(length / NS)} from the first span to the end of the last`,
    columns: [
      { title: "device" },
      ...used.map((c) => ({ title: causes[c][1], unit, numeric: true })),
      { title: "all", unit, numeric: true },
      { title: "busy", unit: "compute and optimizer of the step", numeric: true },
    ],
    rows: view.order
      .map((d, k) => [d, sums[k]])
      .filter(([, by]) => by.some((x) => x > 0))
      .map(([d, by]) => {
        const busy =
          causes.reduce((sum, [key], c) => sum + (key === "compute" || key === "optimizer" ? by[c] : 0), 0) /
          length;
        return [
          { text: d },
          ...used.map((c) => cell(by[c])),
          cell(by.reduce((a, b) => a + b, 0)),
          { text: `${(100 * busy).toFixed(1)} %`, value: busy },
        ];
      }),
  };
}

function look(from, to) {
  const least = 1000,
    span = Math.max(least, Math.min(to - from, view.end * 1.1 + least));
  const middle = (from + to) / 2;
  view.from = Math.max(-0.05 * view.end - least, Math.min(middle - span / 2, view.end * 1.05 - span + least));
  view.to = view.from + span;
  requestDraw();
}

function zoom(factor, at) {
  const x = at === undefined ? (view.from + view.to) / 2 : at;
  look(x - (x - view.from) * factor, x + (view.to - x) * factor);
}

function requestDraw() {
  if (!view || view.queued) return;
  view.queued = true;
  requestAnimationFrame(() => {
    if (view) {
      view.queued = false;
      paint();
    }
  });
}

/* The first of `lane` that ends after `time`; spans of a lane follow each other. */
function firstAfter(index, lane, time) {
  const { trace, lanes } = index,
    list = lanes[lane];
  let low = 0,
    high = list.length;
  while (low < high) {
    const mid = (low + high) >> 1,
      i = list[mid];
    if (trace.start_ns[i] + trace.length_ns[i] <= time) low = mid + 1;
    else high = mid;
  }
  return low;
}

function paint() {
  const { canvas, order } = view,
    ratio = devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth,
    height = AXIS + order.length * LANE + 6;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  const colors = view.doc.timeline.causes.map(([key]) => css(causeColor(key)));
  const ink = { soft: css("soft"), line: css("line"), text: css("ink"), sans: css("sans") };
  view.scale = width / (view.to - view.from);
  axis(g, width, height, ink);
  g.textBaseline = "middle";
  order.forEach((name, k) => {
    const y = AXIS + k * LANE;
    g.fillStyle = ink.line;
    g.fillRect(0, y, width, 1);
    g.fillStyle = ink.soft;
    g.font = `11px ${ink.sans}`;
    g.fillText(name, 6, y + 8, width - 12);
    lanePaint(g, view.main, k, 0, y + 14, BAR, width, colors, ink);
  });
  predictedPaint(g, width, colors, ink);
  $("window").textContent = `${duration((view.to - view.from) / NS)} in view`;
}

function lanePaint(g, index, k, shift, y, tall, width, colors, ink) {
  const { trace, lanes } = index,
    list = lanes[k],
    scale = view.scale;
  let drawn = -1;
  for (let n = firstAfter(index, k, view.from - shift); n < list.length; n++) {
    const i = list[n],
      from = (trace.start_ns[i] + shift - view.from) * scale;
    if (from > width) break;
    const to = from + trace.length_ns[i] * scale;
    if (to - from < 0.5 && to <= drawn) continue;
    const x = Math.max(0, from),
      w = Math.max(to - x, 0.5);
    g.fillStyle = colors[trace.cause[i]];
    g.fillRect(x, y, Math.min(w, width - x), tall);
    drawn = Math.ceil(to);
    if (tall === BAR && w > 4) {
      g.fillStyle = "rgba(255,255,255,.35)";
      g.fillRect(x, y, 1, tall);
      const name = trace.actions[trace.action[i]];
      if (w > 14 + name.length * 7) {
        g.fillStyle = "#fff";
        g.font = `600 11px ${ink.sans}`;
        g.fillText(name, x + 6, y + tall / 2 + 1);
      }
    }
    if (i === view.picked && index === view.main) {
      g.strokeStyle = ink.text;
      g.lineWidth = 2;
      g.strokeRect(x, y, Math.max(3, w), tall);
    }
  }
}

/* The predicted step under every measured one in view, if they are few enough to tell apart. */
function predictedPaint(g, width, colors, ink) {
  if (!view.other) return;
  const only = view.other.steps.values().next().value;
  const seen = [...view.main.steps.entries()].filter(
    ([n, s]) => n >= 0 && s.to > view.from && s.from < view.to,
  );
  if (seen.length > 30) return;
  g.globalAlpha = 0.75;
  for (const [, s] of seen)
    view.order.forEach((_, k) =>
      lanePaint(
        g,
        view.other,
        k,
        s.from - only.from,
        AXIS + k * LANE + 15 + BAR,
        THIN - 2,
        width,
        colors,
        ink,
      ),
    );
  g.globalAlpha = 1;
}

function axis(g, width, height, ink) {
  const origin = (view.main.steps.get(Number($("step").value)) || { from: 0 }).from;
  const rough = ((view.to - view.from) / width) * 110,
    power = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 5, 10].map((m) => m * power).find((x) => x >= rough);
  g.font = `11px ${ink.sans}`;
  g.textBaseline = "middle";
  for (let t = origin + Math.ceil((view.from - origin) / gap) * gap; t < view.to; t += gap) {
    const x = (t - view.from) * view.scale;
    g.fillStyle = ink.line;
    g.fillRect(x, AXIS - 6, 1, height);
    g.fillStyle = ink.soft;
    g.fillText(duration((Math.round((t - origin) / gap) * gap) / NS), x + 4, 10);
  }
}

function describe(index, i, k) {
  const { trace, steps } = index,
    action = trace.actions[trace.action[i]],
    cause = view.doc.timeline.causes[trace.cause[i]][1];
  const begin = (trace.start_ns[i] - steps.get(trace.step[i]).from) / NS;
  return `${action}: ${actionName(action)}\n${cause}, ${view.order[k]}, ${trace.step[i] < 0 ? "held-out" : `step ${trace.step[i]}`}\n${duration(trace.length_ns[i] / NS)}, from ${duration(begin)} into the step (${trace.source})`;
}

function spanAt(x, y) {
  const k = Math.floor((y - AXIS) / LANE);
  if (k < 0 || k >= view.order.length) return null;
  const time = view.from + x / view.scale,
    near = 2 / view.scale,
    list = view.main.lanes[k];
  const n = firstAfter(view.main, k, time - near),
    i = list[n];
  return i !== undefined && view.main.trace.start_ns[i] <= time + near ? { i, k, n } : null;
}

function pick(k, n) {
  const i = view.main.lanes[k][n];
  if (i === undefined) return;
  view.lane = k;
  view.picked = i;
  const { start_ns, length_ns } = view.main.trace,
    from = start_ns[i],
    to = from + length_ns[i];
  if (from < view.from || to > view.to) {
    const half = (view.to - view.from) / 2;
    look((from + to) / 2 - half, (from + to) / 2 + half);
  }
  $("picked").textContent = describe(view.main, i, k).replaceAll("\n", "; ");
  requestDraw();
}

function move(by) {
  const list = view.main.lanes[view.lane],
    now = list.indexOf(view.picked);
  pick(
    view.lane,
    now < 0 ? firstAfter(view.main, view.lane, view.from) : Math.max(0, Math.min(list.length - 1, now + by)),
  );
}

function listen(canvas) {
  let drag = null;
  const where = (e) => {
    const box = canvas.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  };
  const touches = new Map();
  canvas.addEventListener("pointerdown", (e) => {
    drag = { x: e.clientX, from: view.from, to: view.to, moved: false };
    touches.set(e.pointerId, e.clientX);
    canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener("pointermove", (e) => {
    if (drag && touches.size === 2) {
      const before = Math.abs([...touches.values()][0] - [...touches.values()][1]);
      touches.set(e.pointerId, e.clientX);
      const after = Math.abs([...touches.values()][0] - [...touches.values()][1]);
      if (after > 8 && before > 8) zoom(before / after);
      drag.moved = true;
    } else if (drag) {
      const by = (e.clientX - drag.x) / view.scale;
      drag.moved = drag.moved || Math.abs(e.clientX - drag.x) > 3;
      if (drag.moved) look(drag.from - by, drag.to - by);
      showTip("");
    } else {
      const hit = spanAt(...where(e));
      showTip(hit ? describe(view.main, hit.i, hit.k) : "", e.clientX, e.clientY);
    }
  });
  const end = (e) => {
    const hit = drag && !drag.moved && e.type === "pointerup" ? spanAt(...where(e)) : null;
    touches.delete(e.pointerId);
    drag = null;
    if (hit) pick(hit.k, hit.n);
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("pointerleave", () => showTip(""));
  canvas.addEventListener("dblclick", (e) => zoom(0.3, view.from + where(e)[0] / view.scale));
  canvas.addEventListener(
    "wheel",
    (e) => {
      if (e.ctrlKey || e.metaKey) {
        e.preventDefault();
        zoom(Math.exp(e.deltaY / 200), view.from + where(e)[0] / view.scale);
      } else if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
        e.preventDefault();
        look(view.from + e.deltaX / view.scale, view.to + e.deltaX / view.scale);
      }
    },
    { passive: false },
  );
  canvas.addEventListener("keydown", (e) => {
    const keys = {
      ArrowRight: () => move(1),
      ArrowLeft: () => move(-1),
      "+": () => zoom(0.5),
      "=": () => zoom(0.5),
      "-": () => zoom(2),
      0: () => look(0, view.end),
      "[": () => nextStep(-1),
      "]": () => nextStep(1),
      ArrowDown: () => {
        view.lane = Math.min(view.order.length - 1, view.lane + 1);
        view.picked = -1;
        move(0);
      },
      ArrowUp: () => {
        view.lane = Math.max(0, view.lane - 1);
        view.picked = -1;
        move(0);
      },
    };
    if (keys[e.key] && !e.ctrlKey && !e.metaKey) {
      e.preventDefault();
      keys[e.key]();
    }
  });
}
