"use strict";
// Draws the snapshots that the program sends. Whatever it says is put in as text, never as markup.

const KEPT = 120_000, MOST_ROWS = 400, MOST_HELD = 5, SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
const emptyPast = () => ({ rate: [], latency: new Map() });
// What the charts show: the last two minutes, and the time since the dashboard was opened.
const past = emptyPast();
let whole = emptyPast();
let last = null;

function make(tag, className, ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (value >= 1e4) return (value / 1e3).toFixed(1) + " k";
  if (value && Math.abs(value) < 0.1) return value.toPrecision(2);
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 1 : 0);
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return (value * 1e6).toFixed(0) + " µs";
  if (value < 1) return (value * 1e3).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0) + " ms";
  return value.toFixed(2) + " s";
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return (unit && value < 100 ? value.toFixed(1) : Math.round(value)) + " " + units[unit];
}

// A figure in the unit that its name ends with.
function figure(name, value) {
  return (name.endsWith("_seconds") ? seconds : name.endsWith("_bytes") ? bytes : number)(value);
}

function lasted(value) {
  const s = Math.floor(value), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}

function mood(state) {
  if (state === "running") return "good";
  return state === "quarantined" || state === "given up" ? "bad" : "warn";
}

// The children of an element, by key: made when new, updated in place, in order, removed when gone.
function keyed(parent, items, key, create, update) {
  const known = parent.known ?? (parent.known = new Map());
  const seen = new Set();
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    if (seen.has(name)) continue;
    seen.add(name);
    let element = known.get(name);
    if (!element) known.set(name, element = create(item));
    update(element, item);
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  for (const [name, element] of known) {
    if (!seen.has(name)) { element.remove(); known.delete(name); }
  }
}

function cells(row, values) {
  values.forEach((value, place) => put(row.cells[place], value));
}

function row(classes) {
  return make("tr", "", ...classes.map((name) => make("td", name)));
}

function totals(snapshot) {
  const sum = (name) => snapshot.actors.reduce((all, actor) => all + (actor[name] ?? 0), 0);
  const tiles = [
    ["messages per second", number(snapshot.rate)],
    ["in flight", number(sum("running") + sum("deferred"))],
    ["queued", number(sum("mailbox_depth"))],
    ["restarts", number(sum("restarts"))],
    ["failed", number(snapshot.operations.reduce((all, operation) => all + operation.failed, 0))],
    ["dead letters", number(snapshot.dead_letters)],
    ["longest hold of the loop", seconds(snapshot.loop.longest || null)],
  ];
  keyed($("totals"), tiles, (tile) => tile[0],
    (tile) => make("div", "tile", make("b"), make("span", "", tile[0])),
    (element, tile) => put(element.firstChild, tile[1]));
  const loop = snapshot.loop;
  $("held").hidden = !loop.count;
  const times = loop.count === 1 ? "once" : `${loop.count} times`;
  put($("held"), `Tasks held the loop ${times}, ${seconds(loop.seconds)} in all; the longest time was ` +
    `${seconds(loop.longest)}${loop.longest_at ? `, by ${loop.longest_at}` : ""}. No other task ran meanwhile.`);
}

function devices(snapshot) {
  keyed($("devices"), snapshot.devices, (device) => device.path,
    (device) => {
      const list = make("dl");
      for (const name of ["generation", "losses", "last recovery", "next recovery", "in flight", "completed", "memory", "served by"])
        list.append(make("dt", "", name), make("dd"));
      return make("div", "device", make("h3", "", make("span", "", device.path), make("span", "state")),
        make("div", "bar", make("i")), list, make("dl", "held"));
    },
    (element, device) => {
      const state = element.querySelector(".state");
      put(state, device.state);
      state.className = "state " + mood(device.state);
      const memory = device.memory;
      element.querySelector("i").style.width = memory && memory.limit ? `${100 * memory.used / memory.limit}%` : "0";
      const since = device.served === null ? `in generation ${device.generation}` : `in ${lasted(device.served)}`;
      const nowhere = device.isolation === "process" ? "no process now" : `process ${snapshot.pid}, ${device.isolation}`;
      const values = [
        String(device.generation), String(device.losses), seconds(device.recovery_time),
        (device.recovery_text ?? "–").replace(/^restart /, "").replace(/^first/, "not measured yet; first"), number(device.in_flight),
        `${number(device.completed)} ${since}`, memory ? `${bytes(memory.used)} of ${bytes(memory.limit)}` : "–",
        device.pid === null ? nowhere : `process ${device.pid}`,
      ];
      element.querySelectorAll("dl:first-of-type dd").forEach((entry, place) => put(entry, values[place]));
      held(element.querySelector(".held"), device);
    });
  note($("devices"), snapshot.devices, "No device is open.");
}

// Who holds the memory of a device: actors by the arrays that they have made, and libraries by their workspace.
function held(element, device) {
  const arrays = device.actors.map((actor) => ["arrays of " + (actor.path || "no actor"), actor.used]);
  const workspace = device.libraries.filter((library) => library.workspace)
    .map((library) => ["workspace of " + library.library.split(":").pop(), library.workspace]);
  keyed(element, [...arrays.slice(0, MOST_HELD), ...workspace], (one) => one[0],
    (one) => make("div", "", make("dt", "", one[0]), make("dd")),
    (row, one) => put(row.lastChild, bytes(one[1])));
}

function tree(snapshot) {
  const shown = snapshot.actors.slice(0, MOST_ROWS);
  keyed($("tree").tBodies[0], shown, (actor) => actor.path,
    (actor) => {
      const element = row(["", "", "n", "n wide", "n", "n wide", "n wide", "n wide", "n wide", "n"]);
      const depth = actor.path.split("/").length - 1;
      element.cells[0].append(make("span", "indent", "  ".repeat(Math.max(depth - 1, 0)) + (depth ? "└ " : "")),
        make("span", "", actor.path.split("/").pop()), make("span", "kind", "  " + actor.actor_class));
      element.cells[0].title = actor.path;
      element.cells[1].append(make("span", "state"));
      if (last) element.classList.add("flash");
      return element;
    },
    (element, actor) => {
      const state = element.cells[1].firstChild;
      put(state, actor.state);
      state.className = "state " + mood(actor.state);
      state.title = actor.last_error ?? "";
      [number(actor.rate), seconds(actor.p50), seconds(actor.p99), number(actor.mailbox_depth),
        number(actor.running + actor.deferred), number(actor.handled), number(actor.failed), number(actor.restarts),
      ].forEach((value, place) => put(element.cells[place + 2], value));
      if (element.restarts !== undefined && element.restarts !== actor.restarts) {
        element.classList.remove("flash");
        void element.offsetWidth;  // so that the animation begins anew
        element.classList.add("flash");
      }
      element.restarts = actor.restarts;
      element.cells[9].classList.toggle("warn", actor.restarts > 0);
      element.cells[8].classList.toggle("bad", actor.failed > 0);
    });
  const more = snapshot.actors.length - shown.length;
  $("more-actors").hidden = !more;
  put($("more-actors"), `${more} more actors are not shown.`);
}

const nameOf = (operation) => `${operation.path} ${operation.message_type}`;

function operations(snapshot) {
  keyed($("operations").tBodies[0], snapshot.operations, nameOf,
    (operation) => {
      const element = row(["", "wide kind", "n", "n", "n", "n wide", "n", "n wide"]);
      element.cells[0].title = operation.path;
      return element;
    },
    (element, operation) => {
      cells(element, [operation.message_type, operation.path, number(operation.rate), seconds(operation.p50),
        seconds(operation.p99), number(operation.completed), number(operation.failed), number(operation.cancelled)]);
      element.cells[6].classList.toggle("bad", operation.failed > 0);
    });
}

function failures(snapshot) {
  const found = [...snapshot.failures].reverse();
  keyed($("failures"), found, (failure) => `${failure.path} ${failure.first} ${failure.error}`,
    () => make("details", "", make("summary", "", make("time"), make("span")), make("pre")),
    (element, failure) => {
      const [when, what] = element.firstChild.children;
      const clock = (time) => new Date(time * 1000).toLocaleTimeString();
      const times = failure.count > 1 ? ` (${failure.count} times since ${clock(failure.first)})` : "";
      const over = failure.message_type ? ` over ${failure.message_type}` : "";
      put(when, clock(failure.time));
      put(what, `${failure.path}${over}: ${failure.error}${times}`);
      put(element.lastChild, failure.traceback);
    });
  note($("failures"), found, "None.");
}

function readings(snapshot) {
  const found = snapshot.readings ?? [];
  $("own").hidden = !found.length;
  const name = (one) => [one.name, ...one.labels.filter((label) => label[1]).map((label) => label.join("="))].join(" ");
  keyed($("readings").tBodies[0], found, (one) => `${one.path} ${name(one)}`, () => row(["", "wide", "n", "n"]),
    (element, one) => {
      const count = one.counts.reduce((all, some) => all + some, 0);
      cells(element, [name(one), one.path, one.kind === "histogram" ? number(count) : figure(one.name, one.value),
        count ? figure(one.name, one.value === null ? null : one.value / count) : ""]);
    });
}

function processes(snapshot) {
  keyed($("processes").tBodies[0], snapshot.processes, (one) => one.pid, () => row(["", "n", "n", "n", "n"]),
    (element, one) => cells(element, [one.path, String(one.pid), bytes(one.memory), seconds(one.processor_seconds),
      `${(100 * one.load).toFixed(0)} %`]));
  $("of-all-processes").hidden = !snapshot.processes.length;
}

// What stands where there is nothing to list.
function note(parent, found, text) {
  const old = parent.querySelector(":scope > .note");
  if (found.length) old?.remove();
  else if (!old) parent.append(make("p", "note", text));
}

function draw(svg, lines, span, format) {
  const width = svg.clientWidth || 400, height = svg.clientHeight || 120, left = 58, bottom = height - 16, top = 8;
  const end = last.time * 1000, points = lines.flatMap((line) => line.points);
  const most = Math.max(...points.map((point) => point[1]), 0) || 1;
  const x = (time) => left + (width - left - 4) * (1 - (end - time) / span);
  const y = (value) => bottom - (bottom - top) * value / most;
  const parts = [];
  const add = (tag, attributes, text) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text) element.textContent = text;
    parts.push(element);
  };
  for (const share of [0, 0.5, 1]) {
    add("line", { class: "grid", x1: left, x2: width - 4, y1: y(most * share), y2: y(most * share) });
    add("text", { x: left - 6, y: y(most * share) + 4, "text-anchor": "end" }, format(most * share));
  }
  add("text", { x: left, y: height - 3 }, `${span === KEPT ? "2 min" : lasted(span / 1000)} ago`);
  add("text", { x: width - 4, y: height - 3, "text-anchor": "end" }, "now");
  for (const line of lines)
    add("polyline", { class: "line " + line.name, points: line.points.map(([t, v]) => `${x(t).toFixed(1)},${y(v).toFixed(1)}`).join(" ") });
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...parts);
}

function charts(snapshot) {
  const now = snapshot.time * 1000, since = now - KEPT;
  const drop = (points) => { while (points.length && points[0][0] < since) points.shift(); };
  past.rate.push([now, snapshot.rate]);
  drop(past.rate);
  for (const operation of snapshot.operations) {
    const name = nameOf(operation);
    if (!past.latency.has(name)) past.latency.set(name, { p50: [], p99: [] });
    const kept = past.latency.get(name);
    for (const which of ["p50", "p99"]) if (operation[which] !== null) kept[which].push([now, operation[which]]);
  }
  for (const [name, kept] of past.latency) {
    drop(kept.p50);
    drop(kept.p99);
    if (!kept.p50.length && !kept.p99.length) past.latency.delete(name);
  }
  redraw();
}

// The points of a chart: older ones of the whole time, and then those of the last two minutes.
function points(find) {
  const recent = find(past) ?? [], from = past.rate.length ? past.rate[0][0] : Infinity;
  return $("span").value === "recent" ? recent : [...(find(whole) ?? []).filter(([time]) => time < from), ...recent];
}

function redraw() {
  const names = new Set([...past.latency.keys(), ...($("span").value === "recent" ? [] : whole.latency.keys())]);
  keyed($("operation"), names, (name) => name, (name) => make("option", "", name), () => {});
  const chosen = $("operation").value, rates = points((one) => one.rate);
  const begin = $("span").value === "recent" || !rates.length ? Infinity : rates[0][0];
  const span = Math.max(KEPT, last.time * 1000 - begin);
  draw($("chart-rate"), [{ name: "rate", points: rates }], span, number);
  const lines = ["p50", "p99"].map((name) => ({ name, points: points((one) => one.latency.get(chosen)?.[name]) }));
  draw($("chart-latency"), lines, span, seconds);
}

// The program has kept what was there before this page.
async function fetchPast() {
  const told = await (await fetch("past")).json();
  const read = (lines) => ({ rate: lines.rate, latency: new Map(Object.entries(lines.latency)) });
  const recent = read(told.recent), before = ([time]) => !past.rate.length || time < past.rate[0][0];
  whole = read(told.whole);
  past.rate.unshift(...recent.rate.filter(before));
  for (const [name, kept] of recent.latency) {
    const known = past.latency.get(name) ?? { p50: [], p99: [] };
    past.latency.set(name, known);
    for (const which of ["p50", "p99"]) {
      const begin = known[which].length ? known[which][0][0] : Infinity;
      known[which].unshift(...kept[which].filter(([time]) => time < begin));
    }
  }
  if (last) redraw();
}

function show(snapshot) {
  const first = last === null;
  if (first) document.title = `${snapshot.system} – trio_accel`;
  put($("system"), snapshot.system);
  put($("about"), `process ${snapshot.pid}, up for ${lasted(snapshot.uptime)}`);
  totals(snapshot);
  devices(snapshot);
  tree(snapshot);
  processes(snapshot);
  operations(snapshot);
  readings(snapshot);
  failures(snapshot);
  last = snapshot;
  charts(snapshot);
}

function link(state, text) {
  $("link").dataset.state = state;
  put($("link"), text);
}

const first = $("first").textContent;
if (first) show(JSON.parse(first));
const source = new EventSource("events");
fetchPast().catch(() => {});
setInterval(() => { if ($("span").value !== "recent") fetchPast().catch(() => {}); }, 60_000);
source.onmessage = (event) => { link("live", "live"); show(JSON.parse(event.data)); };
source.onerror = () => link(source.readyState === EventSource.CLOSED ? "lost" : "wait",
  source.readyState === EventSource.CLOSED ? "refused: too many pages are open" : "the program does not answer");
$("span").addEventListener("change", () => fetchPast().catch(() => {}));
for (const [element, event] of [[$("operation"), "change"], [$("span"), "change"], [window, "resize"]])
  element.addEventListener(event, () => { if (last) redraw(); });
