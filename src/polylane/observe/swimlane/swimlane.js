"use strict";
// Swimlanes on canvases that share one time axis: zoom with the wheel, pinch or keys, move by dragging, point at a box.
// A panel is {canvas, data}; data is what polylane.observe.swimlane.html.lane_data returns.
function createSwimlanes(panels, details, onview) {
const LANE = 26, THIN = 7, GAP = 8, TOP = 26, BOTTOM = 4, MARK = 3;
const FONT = 'px system-ui, -apple-system, "Segoe UI", sans-serif';
const extent = Math.max(...panels.map(panel => panel.data.extent)) || 1, view = { from: 0, to: extent };
const WAITING = 2;  // a state, as are 0 computing and 1 moving
let queued = false;

// --- the boxes of a row as columns; reach[i] is the latest end of boxes 0..i, for the search below ---

const FIELDS = ["start", "end", "kind", "stage", "microbatch", "value", "peer", "gradient", "bytes",
  "time",  // for which the bytes were under way at most, 0 where that is not known
  "state", "whom", "moving", "waiting"];  // seconds in collectives inside a pass
function unpack(flat) {
  const count = flat.length / FIELDS.length, row = { count, reach: new Float64Array(count) };
  FIELDS.forEach((name, f) => { row[name] = Float64Array.from({ length: count }, (_, i) => flat[i * FIELDS.length + f]); });
  let latest = -Infinity;
  for (let i = 0; i < count; i++) row.reach[i] = latest = Math.max(latest, row.end[i]);
  return row;
}
for (const panel of panels) {
  panel.rows = [];
  panel.bottom = TOP;
  panel.data.lanes.forEach(lane => {
    const rank = lane.rank;
    panel.rows.push({ ...unpack(lane.main), rank, label: lane.label, stages: lane.stages, y: panel.bottom, height: LANE });
    panel.bottom += LANE;
    if (lane.thin.length) {
      panel.rows.push({ ...unpack(lane.thin), rank, label: "", y: panel.bottom + 1, height: THIN });
      panel.bottom += THIN + 1;
    }
    panel.bottom += GAP;
  });
}
function firstReaching(row, time) {
  let low = 0, high = row.count;
  while (low < high) { const middle = (low + high) >> 1; if (row.reach[middle] > time) high = middle; else low = middle + 1; }
  return low;
}

// --- words ---

function number(value, digits) {
  return Math.abs(value - Math.round(value)) < 1e-9 || Math.abs(value) >= 10 ** (digits - 1)
    ? String(Math.round(value)) : String(Number(value.toPrecision(digits)));
}
function scaled(size, unit) {
  if (unit !== "seconds") return [unit, 1];
  return size >= 1 ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
}
function duration(value, unit, digits = 4) {
  const [name, scale] = scaled(value, unit);
  return number(value * scale, digits) + " " + (value === 1 && name === "ticks" ? "tick" : name);
}
function size(count) {
  let at = 0;
  while (count >= 999.5 && at < 4) { count /= 1000; at++; }
  return count.toFixed(at === 0 || count >= 99.95 ? 0 : 1) + " " + ["B", "kB", "MB", "GB", "TB"][at];
}
function describe(data, row, i) {
  const kind = data.kinds[row.kind[i]].name, travels = row.peer[i] >= 0 || kind === "reduce", unit = data.unit;
  const lines = [kind + " · rank " + row.rank + " · stage " + row.stage[i]];
  if (row.microbatch[i] >= 0) lines[0] += " · microbatch " + row.microbatch[i];
  if (row.state[i] === WAITING) lines.unshift("waits for rank " + row.whom[i]);
  if (row.value[i] >= 0) lines.push((row.gradient[i] ? "gradient of " : "") + data.values[row.value[i]]);
  if (row.peer[i] >= 0) lines.push("peer: rank " + row.peer[i]);
  lines.push("start " + duration(row.start[i], unit, 8));
  lines.push("duration " + duration(row.end[i] - row.start[i], unit));
  if (row.moving[i] > 0) lines.push("of it in collectives: " + duration(row.moving[i], unit));
  if (row.waiting[i] > 0) lines.push("of it waiting for rank " + row.whom[i] + ": " + duration(row.waiting[i], unit));
  if (row.bytes[i] > 0) lines.push((travels ? "" : "sent in collectives: ") + size(row.bytes[i]));
  if (row.time[i] > 0) lines[lines.length - 1] += " in at most " + duration(row.time[i], unit);
  if (row.time[i] > 0 && unit === "seconds")
    lines[lines.length - 1] += " (" + size(row.bytes[i] / row.time[i]) + "/s or more)";
  return lines.join("\n");
}

// --- drawing ---

function axis(panel) {
  const unit = panel.data.unit, span = view.to - view.from, [name, scale] = scaled(span, unit);
  const least = span * scale / Math.max(panel.plot / 90, 1), power = 10 ** Math.floor(Math.log10(least));
  let step = [1, 2, 5, 10].map(digit => digit * power).find(size => size >= least * (1 - 1e-9));
  if (unit === "ticks") step = Math.max(step, 1);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), marks = [];
  for (let i = Math.ceil(view.from * scale / step - 1e-9); i * step <= view.to * scale * (1 + 1e-9); i++)
    marks.push([i * step / scale, (i * step).toFixed(digits)]);
  return [name, marks];
}

// a letter for the chunk of a pass, on a rank that has several
function chunk(row, i) {
  const several = row.stages && row.stages.length > 1 && row.stages.length <= 26;
  return several ? String.fromCharCode(97 + row.stages.indexOf(row.stage[i])) : "";
}

// The styles of a box from the bottom up, each with its fraction of the height.
function layers(panel, row, i) {
  const { kinds, collective, waiting } = panel.data, long = row.end[i] - row.start[i];
  if (row.state[i] === WAITING) return [[waiting, 1]];
  if (!(row.moving[i] + row.waiting[i] > 0) || !long) return [[row.kind[i], 1]];
  const parts = [[row.kind[i], 1 - (row.moving[i] + row.waiting[i]) / long],
    [collective, row.moving[i] / long], [waiting, row.waiting[i] / long]];
  return parts.filter(part => part[1] > 0);
}

function hatch(ctx, colour) {
  const tile = document.createElement("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = 6;
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (const at of [-6, 0, 6]) { pen.moveTo(at - 1, 7); pen.lineTo(at + 7, -1); }
  pen.stroke();
  return ctx.createPattern(tile, "repeat");
}

function drawRow(panel, row, bins) {
  const { ctx, data, left, plot, fills } = panel, kinds = data.kinds.length, perTime = plot / (view.to - view.from);
  let narrow = false;
  for (let i = firstReaching(row, view.from); i < row.count && row.start[i] < view.to; i++) {
    const from = (Math.max(row.start[i], view.from) - view.from) * perTime;
    const to = (Math.min(row.end[i], view.to) - view.from) * perTime;
    if (data.kinds[row.kind[i]].name === "step" && row.end[i] === row.start[i]) {
      // an update that takes no time: a mark, over the end of the pass before it
      ctx.fillStyle = fills[row.kind[i]];
      ctx.fillRect(left + from - MARK, row.y, MARK, row.height);
    } else if ((row.end[i] - row.start[i]) * perTime >= 1.5) {
      const seam = to - from > 4 ? 1 : 0;
      let below = row.y + row.height;
      for (const [kind, part] of layers(panel, row, i)) {
        below -= part * row.height;
        ctx.fillStyle = fills[kind];
        ctx.fillRect(left + from, below, to - from - seam, part * row.height);
      }
      const passes = row.peer[i] < 0 && row.state[i] === 0;
      const fits = words => Math.min(12, (to - from - seam - 1) / Math.max(1, words.length) / 0.6);
      let label = passes && row.microbatch[i] >= 0 ? String(row.microbatch[i]) + chunk(row, i) : "";
      if (fits(label) < 6.5) label = label.replace(/[a-z]$/, "");
      const letters = fits(label);
      if (label && row.height === LANE && letters >= 6.5) {
        ctx.fillStyle = data.kinds[row.kind[i]].ink;
        ctx.font = letters + FONT;
        ctx.fillText(label, left + (from + to - seam) / 2, row.y + LANE / 2 + 4);
      }
    } else {
      if (!narrow) { bins.fill(0); narrow = true; }
      for (let at = Math.floor(from); at < Math.min(to, plot); at++)
        for (const [kind, part] of layers(panel, row, i))
          bins[at * kinds + kind] += part * (Math.min(to, at + 1) - Math.max(from, at));
    }
  }
  if (narrow) drawTogether(panel, row, bins, kinds);
}

// Boxes narrower than a pixel and a half: every pixel column is filled in proportion to the time they take.
function drawTogether(panel, row, bins, kinds) {
  for (let at = 0; at < Math.ceil(panel.plot); at++) {
    let whole = 0, below = row.y + row.height;
    for (let kind = 0; kind < kinds; kind++) whole += bins[at * kinds + kind];
    for (let kind = 0; kind < kinds && whole > 0; kind++) {
      const tall = bins[at * kinds + kind] / Math.max(1, whole) * row.height;
      if (!tall) continue;
      panel.ctx.fillStyle = panel.fills[kind];
      panel.ctx.fillRect(panel.left + at, below - tall, 1, tall);
      below -= tall;
    }
  }
}

function drawPanel(panel) {
  const canvas = panel.canvas, ctx = panel.ctx = canvas.getContext("2d"), data = panel.data;
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
  const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1, height = panel.bottom + BOTTOM;
  if (!width) return;  // not shown
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.font = 12 + FONT;
  // Below each other, all panels have their lanes at the same place; on a phone the labels are short.
  const name = label => width < 560 ? label.replace("rank ", "r").replace(/ · stage .*/, "") : label;
  const labels = panels.flatMap(one => one.data.lanes.map(lane => name(lane.label)));
  panel.left = 12 + Math.max(0, ...labels.map(label => ctx.measureText(label).width));
  panel.plot = Math.max(width - panel.left - 14, 50);
  panel.fills = data.kinds.map(kind => kind.fill);
  panel.fills[data.waiting] = hatch(ctx, colour("--hatch") || data.kinds[data.waiting].fill);
  const { left, plot } = panel, toX = time => left + (time - view.from) * plot / (view.to - view.from);
  ctx.textAlign = "right";
  for (const row of panel.rows.filter(one => one.height === LANE)) {
    ctx.fillStyle = colour("--idle");
    ctx.fillRect(left, row.y, Math.max(0, Math.min(plot, toX(data.extent) - left)), LANE);
    ctx.fillStyle = colour("--ink");
    ctx.fillText(name(row.label), left - 8, row.y + LANE / 2 + 4);
  }
  const [unit, marks] = axis(panel);
  ctx.fillStyle = colour("--faint");
  ctx.fillText(unit, left - 8, 14);
  ctx.textAlign = "center";
  for (const [time, label] of marks) {
    ctx.globalAlpha = 1;
    ctx.fillText(label, toX(time), 14);
    ctx.globalAlpha = 0.3;
    ctx.fillRect(toX(time), 20, 1, panel.bottom - 20);
  }
  ctx.globalAlpha = 1;
  const bins = new Float32Array((Math.ceil(plot) + 1) * data.kinds.length);
  ctx.save();
  ctx.beginPath();
  ctx.rect(left - MARK, 0, plot + MARK, height);
  ctx.clip();
  for (const row of panel.rows) drawRow(panel, row, bins);
  ctx.restore();
}
function draw() {
  queued = false;
  panels.forEach(drawPanel);
  if (onview) onview({ ...view });
}
function redraw() { if (!queued) { queued = true; requestAnimationFrame(draw); } }

// --- moving about: all panels together ---

function show(from, to) {
  const size = Math.min(Math.max(to - from, extent / 1e6), extent);
  view.from = Math.min(Math.max(from, 0), extent - size);
  view.to = view.from + size;
  redraw();
}
function zoom(panel, factor, x) {
  const size = view.to - view.from, share = Math.min(Math.max((x - panel.left) / panel.plot, 0), 1);
  const at = view.from + size * share, next = Math.min(Math.max(size * factor, extent / 1e6), extent);
  show(at - next * share, at - next * share + next);
}
function move(panel, pixels) {
  const time = pixels * (view.to - view.from) / panel.plot;
  show(view.from + time, view.to + time);
}
function listen(panel) {
  const canvas = panel.canvas, middle = () => panel.left + panel.plot / 2;
  canvas.addEventListener("wheel", event => {
    if (event.offsetX < panel.left) return;  // over the labels the wheel scrolls the page
    event.preventDefault();
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) move(panel, sideways);
    else zoom(panel, Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.offsetX);
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => canvas.setPointerCapture(event.pointerId));
  canvas.addEventListener("pointermove", event => {
    if (event.buttons & 1) move(panel, -event.movementX);
    hover(panel, event);
  });
  canvas.addEventListener("pointerleave", () => { details.style.display = "none"; });
  canvas.addEventListener("dblclick", () => show(0, extent));
  canvas.addEventListener("keydown", event => {
    const act = {
      "+": () => zoom(panel, 0.7, middle()), "=": () => zoom(panel, 0.7, middle()), "-": () => zoom(panel, 1.4, middle()),
      "ArrowLeft": () => move(panel, -panel.plot / 8), "ArrowRight": () => move(panel, panel.plot / 8),
      "0": () => show(0, extent),
    }[event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  });
}
function hover(panel, event) {
  const row = panel.rows.find(one => event.offsetY >= one.y && event.offsetY < one.y + one.height);
  const pixel = (view.to - view.from) / panel.plot, time = view.from + (event.offsetX - panel.left) * pixel;
  let found = -1;  // of boxes that overlap, the one drawn last
  if (row && event.offsetX >= panel.left)
    for (let i = firstReaching(row, time - pixel); i < row.count && row.start[i] <= time + pixel; i++)
      if (row.start[i] <= time && row.end[i] > time || found < 0) found = i;
  details.style.display = found < 0 ? "none" : "block";
  if (found < 0) return;
  details.textContent = describe(panel.data, row, found);
  details.style.left = Math.min(event.clientX + 14, window.innerWidth - details.offsetWidth - 8) + "px";
  details.style.top = Math.min(event.clientY + 14, window.innerHeight - details.offsetHeight - 8) + "px";
}

panels.forEach(listen);
const scheme = matchMedia("(prefers-color-scheme: dark)");
window.addEventListener("resize", redraw);
window.addEventListener("beforeprint", draw);
scheme.addEventListener("change", redraw);
draw();
return {
  show, redraw, view,
  stop() {
    window.removeEventListener("resize", redraw);
    window.removeEventListener("beforeprint", draw);
    scheme.removeEventListener("change", redraw);
  },
};
}
