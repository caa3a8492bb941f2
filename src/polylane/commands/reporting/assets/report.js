"use strict";
// The page of a run, or of two beside each other, from the data that polylane.commands.reporting.page_data collects.
// Every word of the data goes into the page as text, none as markup.
(() => {
const page = document.getElementById("page"), details = document.getElementById("details");
const NAMES = ["A", "B"], DASHES = [[], [6, 4]];
const state = { step: null, view: null, log: false, plots: [], lanes: null, range: null };
let shown = null, data = null;

// --- elements and words ---

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== ""));
  return node;
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const percent = share => (share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0) + " %";
function count(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(4, Math.floor(Math.log10(size || 1)) + 1) });
}
function bytes(size) {
  let at = 0;
  while (size >= 999.5 && at < 5) { size /= 1000; at++; }
  return size.toFixed(at === 0 || size >= 99.95 ? 0 : 1) + " " + ["B", "kB", "MB", "GB", "TB", "PB"][at];
}
function seconds(value) {
  if (value >= 100) return Math.round(value).toLocaleString("en") + " s";
  return value >= 1 ? value.toPrecision(3) + " s" : value >= 1e-3 ? (value * 1e3).toPrecision(3) + " ms"
    : value ? (value * 1e6).toPrecision(3) + " µs" : "0";
}
const several = () => data.runs.length > 1;
const tag = number => several() ? NAMES[number] + ": " : "";

// --- the head: what it was, how it went, what would change it ---

function head(run, number) {
  const words = { ended: "ended", failed: "failed", running: "running", stopped: "stopped" }[run.state];
  return el("section", { "aria-label": tag(number) + run.name },
    el("h1", {}, tag(number) + run.name, words ? el("span", { class: "state " + run.state }, words) : ""),
    el("p", { class: "plan" }, [run.recipe, run.plan].filter(Boolean).join(" · ")),
    run.verdict ? el("p", { class: "verdict" }, run.verdict) : "",
    run.changes.length ? [el("p", { class: "faint" }, "What would change it:"),
      el("ul", { class: "changes" }, run.changes.map(words => el("li", {}, words)))] : "",
    run.missing.length ? el("div", { class: "missing note" }, run.missing.map(words => el("p", {}, capital(words) + "."))) : "",
    el("dl", { class: "facts" }, run.facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}
const capital = words => words.charAt(0).toUpperCase() + words.slice(1);

function compareFacts() {
  const [first, second] = data.runs.map(run => new Map(run.facts));
  const names = [...new Set([...first.keys(), ...second.keys()])];
  return section("compared", "A and B", [
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["", "A", "B", "B / A"].map(words => el("th", { scope: "col" }, words)))),
      el("tbody", {}, names.map(name => {
        const values = [first.get(name), second.get(name)], numbers = values.map(value => Number(String(value).replaceAll(",", "")));
        const ratio = numbers.every(Number.isFinite) && numbers[0] ? (numbers[1] / numbers[0]).toPrecision(3) : "";
        return el("tr", {}, el("th", { scope: "row" }, name), values.map(value => el("td", {}, value ?? "–")), el("td", {}, ratio));
      }))))]);
}

const sections = [];
function section(id, title, children) {
  const content = children.flat(Infinity).filter(Boolean);
  if (!content.length) return "";
  sections.push([id, title]);
  return el("section", { id, "aria-labelledby": id + "-title" }, el("h2", { id: id + "-title" }, title), content);
}

// --- swimlanes: theory, prediction and measurement under one time axis ---

function legend(pictures) {
  const entries = new Map(pictures.flatMap(picture => picture.legend));
  if (entries.has("bubble")) { entries.delete("bubble"); entries.set("bubble", "bubble"); }  // last
  return el("ul", { class: "legend" }, [...entries].map(([name, fill]) => el("li", {},
    el("i", name === "waiting" ? { class: "hatched" } : { style: { background: name === "bubble" ? "var(--idle)" : fill } }), name)));
}
function lanes() {
  const run = data.runs[0], pictures = run.pictures;
  const chosen = pictures.find(picture => picture.key === state.step) || pictures[0];
  const rows = several()
    ? data.runs.map((one, number) => [NAMES[number] + ", measured", one.pictures[0]])
    : [["theory: the schedule alone", run.theory], ["predicted", run.predicted], ["measured", chosen]];
  const there = rows.filter(row => row[1]);
  if (!there.length) return "";
  const choice = !several() && pictures.length > 1 ? el("div", { class: "bar-tools", role: "group", "aria-label": "Measured step" },
    "Measured step:", pictures.map(picture => el("button", { type: "button", "aria-pressed": String(picture === chosen), onclick: () => {
      state.step = picture.key;
      render();
      document.querySelector("#lanes button[aria-pressed=true]").focus();
    } }, picture.key))) : "";
  const panels = there.map(([words, picture]) => {
    const canvas = el("canvas", { class: "lanes", tabindex: 0, role: "img", "aria-label": `Swimlanes, ${words}: ${picture.headline}. `
      + "Plus and minus zoom, arrows move, 0 shows everything; the figures are in the table." });
    return { canvas, data: picture.lanes, words, picture };
  });
  state.panels = panels;
  const shares = el("p", { class: "note" });
  return section("lanes", "A step", [choice, panels.map(panel => [
    el("h3", {}, panel.words + (panel.words === "measured" || several() ? " · " + panel.picture.title.replace(/^measured · /, "") : "")),
    el("p", { class: "note" }, [panel.picture.headline, panel.picture.left_out].filter(Boolean).join(" · ")), panel.canvas]),
    legend(there.map(row => row[1])),
    el("p", { class: "note keys" }, "Wheel: zoom. Drag, or shift and wheel: move. Double click: everything. Keys: + − ← → 0."), shares,
    there.filter(row => /measured/.test(row[0])).map(([words, picture]) => accountTable(several() ? words : "", picture))]);
}
function accountTable(caption, picture) {
  const extent = picture.lanes.extent || 1, unit = picture.lanes.unit;
  const duration = value => unit === "seconds" ? seconds(value) : count(value);
  const cell = time => duration(time) + " (" + percent(time / extent) + ")";
  const heads = ["", "computing", "moving bytes", "waiting", "bubble", ...(picture.sent.length ? ["sent"] : [])];
  const rows = picture.account.map(([label, computing, moving, bubble, waiting], rank) => {
    const waits = Object.entries(waiting).sort((a, b) => b[1] - a[1]), total = waits.reduce((sum, wait) => sum + wait[1], 0);
    const whom = waits.slice(0, 3).map(([peer, time]) => (waits.length > 1 ? duration(time) + " " : "") + "for rank " + peer).join(", ");
    const cells = [cell(computing), cell(moving), total ? cell(total) + " " + whom : "0", cell(bubble),
      ...(picture.sent.length ? [bytes(picture.sent[rank])] : [])];
    return el("tr", {}, el("th", { scope: "row" }, label), cells.map((words, at) => el("td", { "data-head": heads[at + 1] }, words)));
  });
  return el("details", { open: rows.length <= 8 }, el("summary", {}, `Where the step's time went, by rank${caption ? " (" + caption + ")" : ""}`),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Times by rank" }, el("table", { class: "cards" },
      el("thead", {}, el("tr", {}, heads.map(words => el("th", { scope: "col" }, words)))), el("tbody", {}, rows))));
}

// --- charts ---

const STEPS = [1, 2, 5].flatMap(digit => Array.from({ length: 10 }, (_, power) => digit * 10 ** power)).sort((a, b) => a - b);
const axis = extra => ({ stroke: colour("faint"), grid: { stroke: colour("line"), width: 0.5 }, ticks: { stroke: colour("line") }, ...extra });
function marks(events) {
  return { hooks: { draw: plot => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("bad");
    ctx.setLineDash([4, 4]);
    ctx.textAlign = "left";
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    for (const event of events) {
      const x = plot.valToPos(event.step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(event.mark, x + 3 * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
    }
    ctx.restore();
  } } };
}
// Draws lines = [{label, x, y, stroke, dash, fill, points, show(value)}] into a part of the page.
function chart(title, lines, options = {}) {
  const box = el("div", { class: "plot" }), last = lines[0].y.filter(value => value !== null);
  const summary = `${title}: ${lines.length} curve${lines.length > 1 ? "s" : ""}; the first goes from ${count(last[0])} to `
    + `${count(last[last.length - 1])} over steps ${lines[0].x[0]} to ${lines[0].x[lines[0].x.length - 1]}. Plus and minus zoom, arrows move, 0 shows everything.`;
  const part = el("div", { class: "chart", tabindex: 0, role: "img", "aria-label": summary, onkeydown: event => moveCharts(event) },
    el("h3", {}, title), box);
  state.plots.push({ box, make: () => {
    const table = uPlot.join(lines.map(line => [line.x, line.y]));
    return new uPlot({
      width: Math.max(260, box.clientWidth), height: options.height || 220, cursor: { sync: { key: "run" }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: () => state.range || fullRange() }, y: { distr: options.log ? 3 : 1, range: options.range } },
      axes: [axis({ size: 34, incrs: STEPS }), axis({ size: 64, values: (_, ticks) => ticks.map(tick => tick === null ? "" : (options.tick || count)(tick)) })],
      series: [{ label: "step", value: (_, step) => step === null ? "–" : String(step) }, ...lines.map(line => ({
        label: line.label, stroke: line.stroke, dash: line.dash, width: 1.5, fill: line.fill, spanGaps: true,
        points: { show: Boolean(line.points) || line.x.length < 3, size: 6, fill: line.stroke },
        value: (_, value, series, index) => value === null || value === undefined ? "–" : (line.show ? line.show(index, value) : (options.tick || count)(value)),
      }))],
      plugins: [marks(options.events || [])],
      hooks: { setSelect: [plot => { if (plot.select.width > 4) zoomTo(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")); }],
        ready: [plot => plot.over.addEventListener("dblclick", () => zoomTo(null))] },
    }, table, box);
  } });
  return part;
}
// The steps of all curves of all runs, which every chart shows.
function fullRange() {
  const steps = data.runs.flatMap(run => [run.shares, ...Object.values(run.charts).flatMap(Object.values)]).map(line => line.x).filter(Boolean);
  const [first, last] = [Math.min(...steps.map(x => x[0])), Math.max(...steps.map(x => x[x.length - 1]))];
  return first < last ? [first, last] : [first - 1, last + 1];
}
// All charts show the same steps.
function zoomTo(from, to) {
  const [first, last] = fullRange();
  const whole = from === null || to - from >= last - first;
  state.range = whole ? null : [Math.max(first, Math.min(from, to - 1e-9)), Math.min(last, to)];
  drawCharts();
}
function moveCharts(event) {
  const [from, to] = state.range || fullRange(), span = to - from, middle = (from + to) / 2;
  const act = { "+": 0.35, "=": 0.35, "-": 0.7 }[event.key], shift = { ArrowLeft: -span / 8, ArrowRight: span / 8 }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "0") zoomTo(null);
  else if (act) zoomTo(middle - span * act, middle + span * act);
  else if (shift && state.range) {
    const [first, last] = fullRange(), by = Math.max(first - from, Math.min(last - to, shift));
    zoomTo(from + by, to + by);
  } else return;
  event.preventDefault();
}
function drawCharts() {
  for (const part of state.plots) {
    part.plot?.destroy();
    part.plot = part.make();
  }
}

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933"];
// One chart for each group; two runs have the same colours, B dashed.
function curves(title, key, options = {}) {
  const lines = data.runs.flatMap((run, number) => Object.entries(run.charts[key] || {}).map(([label, line], at) => ({
    label: tag(number) + label, x: line.x, y: line.y, points: line.points, dash: DASHES[number],
    stroke: several() && Object.keys(run.charts[key]).length === 1 ? colour(number ? "b" : "a") : COLOURS[at % COLOURS.length] })));
  if (!lines.length) return "";
  return chart(title, lines, { events: data.runs.flatMap(run => run.events), ...options });
}

const SHARES = ["computing", "moving", "communicating", "waiting", "bubble"];
function shares(run, number) {
  if (!run.shares.x) return "";
  const { x, columns, observed } = run.shares, sums = x.map(() => 0), lines = [];
  for (const name of SHARES.filter(name => columns[name])) {
    columns[name].forEach((share, at) => { sums[at] += share; });
    lines.unshift({ label: name, x, y: [...sums], stroke: colour(name), fill: colour(name), show: index => index === null ? "–" : percent(columns[name][index]) });
  }
  return chart(`${tag(number)}shares of the steps' time, mean over workers (${observed} observed steps)`, lines,
    { range: () => [0, 1], tick: percent, events: run.events });
}

// --- bars ---

function bars(title, rows, note) {
  if (!rows.length) return "";
  const most = Math.max(...rows.map(row => Math.max(row.value, row.mark || 0))) || 1;
  return el("div", {}, el("h3", {}, title), note ? el("p", { class: "note" }, note) : "",
    el("div", { class: "bars" }, rows.flatMap(row => [el("span", {}, row.name),
      el("span", { class: "track", "aria-hidden": "true" },
        el("i", { style: { width: 100 * row.value / most + "%", background: row.fill || "var(--a)" } }),
        row.mark ? el("span", { class: "mark", style: { left: `calc(${100 * row.mark / most}% - 2px)` } }) : ""),
      el("span", {}, row.words)])));
}
function memory(run, number) {
  const { measured = [], predicted = [] } = run.memory;
  const rows = Array.from({ length: Math.max(measured.length, predicted.length) }, (_, rank) => ({
    name: "rank " + rank, value: measured[rank] || 0, mark: predicted[rank] || 0,
    words: [measured[rank] ? bytes(measured[rank]) : "", predicted[rank] ? "predicted " + bytes(predicted[rank]) : ""].filter(Boolean).join(", ") }));
  const most = 24, note = "Peak of each worker; the mark is the prediction."
    + (rows.length > most ? ` The ${most} with the highest peak of ${rows.length}.` : "");
  return bars(tag(number) + "memory", rows.length > most ? rows.sort((a, b) => b.value - a.value).slice(0, most) : rows, rows.length ? note : "");
}
const waits = (run, number) => bars(tag(number) + "who was waited for", run.waits.map(([rank, share]) => ({
  name: "rank " + rank, value: share, words: percent(share), fill: "var(--waiting)" })), run.waits.length ? "Share of all workers' time, over the run." : "");
const traffic = (run, number) => bars(tag(number) + "bytes of a step, by kind", run.traffic.map(([kind, size]) => ({ name: kind, value: size, words: bytes(size) })));
function goodput(run, number) {
  const { wall, causes } = run.goodput;
  return causes ? bars(`${tag(number)}wall time: ${seconds(wall)}`, causes.filter(cause => cause[1] >= 0.005 * wall).map(([cause, time]) => ({
    name: cause, value: time, words: `${seconds(time)} (${percent(time / wall)})`, fill: cause === "computing" ? "var(--computing)" : "var(--waiting)" }))) : "";
}

// --- noise and batches ---

function batches(run, number) {
  const { rows = [], note, scale, low, high, batch, step } = run.batches;
  if (note) return el("p", {}, tag(number) + capital(note) + ".");
  if (!rows.length) return "";
  const range = (at, row) => Math.abs(row[at + 1] - row[at + 2]) > 1e-9 ? ` (${count(Math.min(row[at + 1], row[at + 2]))}–${count(Math.max(row[at + 1], row[at + 2]))})` : "";
  return el("div", {}, el("h3", {}, `${tag(number)}other batches, by the noise scale at step ${step}: ${count(scale)} samples (95%: ${count(low)} to ${count(high)})`),
    el("p", { class: "note" }, "Steps, and samples, that make as much progress as one step and its samples do now: a larger batch needs fewer steps and more samples."),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Batches" }, el("table", {},
      el("thead", {}, el("tr", {}, ["batch", "steps", "samples, relative"].map(words => el("th", { scope: "col" }, words)))),
      el("tbody", {}, rows.map(row => el("tr", {}, el("th", { scope: "row" }, count(row[0]) + (row[0] === batch ? " (now)" : "")),
        el("td", {}, count(row[1]) + range(1, row)), el("td", {}, count(row[4]) + range(4, row))))))));
}

// --- the plan ---

function stagePicture(run, number) {
  if (!run.stages.length) return "";
  const items = run.stages.flatMap((stage, at) => {
    const ranks = stage.ranks || [], modules = stage.modules || [], next = (stage.sends || []).map(link => `${bytes(link.bytes)} to stage ${link.to}`);
    const box = el("div", { class: "stage" }, el("b", {}, "stage " + stage.stage),
      el("div", { class: "ranks" }, ranks.slice(0, 16).map(rank => el("span", {}, "rank " + rank)), ranks.length > 16 ? `and ${ranks.length - 16} more` : ""),
      stage.mesh && stage.mesh !== "1" ? el("div", {}, stage.mesh) : "", stage.parameters ? el("div", {}, count(stage.parameters) + " parameters") : "",
      modules.length ? el("div", { class: "modules" }, modules.slice(0, 8).join(", ") + (modules.length > 8 ? ` and ${modules.length - 8} more` : "")) : "");
    return at + 1 < run.stages.length ? [box, el("div", { class: "link" }, next.length ? next.map(words => el("div", {}, words)) : "")] : [box];
  });
  return el("div", {}, several() ? el("h3", {}, NAMES[number]) : "", el("div", { class: "stages" }, items));
}
function planText(run, number) {
  if (!run.plan_text && !run.plan) return "";
  const text = run.plan_text || run.plan, button = el("button", { type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; }
    catch { getSelection().selectAllChildren(block); button.textContent = "selected: copy it"; }
  } }, "copy");
  const block = el("pre", { tabindex: 0, "aria-label": "plan.yaml" }, text);
  return el("div", {}, el("div", { class: "bar-tools" }, el("h3", {}, tag(number) + "plan.yaml"), button), block);
}
function environment(run, number) {
  const rows = Object.entries(run.environment);
  return rows.length ? el("div", { class: "scroll" }, several() ? el("h3", {}, NAMES[number]) : "", el("table", {}, el("tbody", {},
    rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "words" }, value)))))) : "";
}

// --- all of it ---

const each = make => data.runs.map(make);
function grid(children) {
  const parts = children.flat().filter(Boolean);
  return parts.length ? el("div", { class: several() ? "grid pairs" : "grid" }, parts) : "";
}
function render() {
  const scroll = [scrollX, scrollY];
  for (const part of state.plots) part.plot?.destroy();
  state.lanes?.stop();
  state.plots = []; state.panels = null; state.lanes = null; sections.length = 0;
  const values = data.runs.flatMap(run => Object.values(run.charts.loss || {}).flatMap(line => line.y));
  const canLog = values.length > 0 && values.every(value => value > 0), thinned = data.runs.map(run => run.downsampled).filter(Boolean);
  const logButton = canLog ? el("div", { class: "bar-tools" }, el("button", { type: "button", "aria-pressed": String(state.log), id: "log",
    onclick: () => { state.log = !state.log; render(); document.getElementById("log").focus(); } }, "logarithmic loss")) : "";
  const events = data.runs.flatMap((run, number) => run.events.map(event => el("li", {}, `${tag(number)}${event.mark} ${event.text}`)));
  const body = [
    several() ? compareFacts() : "",
    lanes(),
    section("time", "Where the time went", [grid([each(shares), each(waits), each(goodput)])]),
    section("learning", "Loss and metrics", [logButton, grid([curves("loss", "loss", { log: state.log && canLog }), curves("metrics", "metrics"),
      curves("learning rate", "learning_rate"), curves("norm of the gradients", "gradient_norm"),
      curves("loss scale", "loss_scale")]),
      events.length ? el("ul", { class: "changes note" }, events) : "", thinned.length ? el("p", { class: "note" }, thinned[0]) : ""]),
    section("speed", "Speed", [grid([curves("samples/s", "throughput"), curves("tokens/s", "tokens"),
      curves("shares", "rates", { tick: percent })])]),
    section("noise", "Noise and batch", [grid([curves("noise scale, samples", "noise"), each(batches)])]),
    section("memory", "Memory and bytes", [grid([each(memory), each(traffic)])]),
    section("plan", "Plan", [each(stagePicture), each(planText)]),
    section("environment", "Environment", [each(environment)]),
  ];
  const links = el("nav", { "aria-label": "Parts of the report" }, sections.map(([id, title]) => el("a", { href: "#" + id }, title)));
  page.replaceChildren(links, el("div", { class: "heads" }, each(head)), ...body.filter(Boolean));
  if (state.panels) {
    state.lanes = createSwimlanes(state.panels, details, view => { state.view = view; });
    if (state.view) state.lanes.show(state.view.from, state.view.to);
  }
  drawCharts();
  scrollTo(...scroll);
  document.documentElement.dataset.ready = "yes";
}

let width = innerWidth, queued = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(queued);
  queued = setTimeout(() => data && drawCharts(), 120);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => data && render());
addEventListener("beforeprint", () => {
  for (const part of page.querySelectorAll("details")) part.open = true;
  if (data) drawCharts();
});

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
function take(text) {
  if (text === shown) return;
  shown = text;
  data = JSON.parse(text);
  render();
}
// A page of `polylane report --serve` asks its own server again.
async function follow(seconds) {
  try {
    const answer = await fetch("data", { cache: "no-store" });
    if (answer.ok) take(await answer.text());
  } catch { /* the server has ended: the page stays as it is */ return; }
  setTimeout(follow, seconds * 1000, seconds);
}
if (typeof DecompressionStream === "undefined") page.textContent = "This page needs a browser of 2023 or later.";
else unpack(document.getElementById("data").textContent).then(text => {
  take(text);
  if (data.poll) setTimeout(follow, data.poll * 1000, data.poll);
});
})();
