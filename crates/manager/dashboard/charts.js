"use strict";
// Charts as SVG, made by hand: no library, so that the page works without a network.

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// The area between two lines of points; a gap in the readings is a gap in the area.
function area(points, x, low, high) {
  let path = "";
  let run = [];
  const close = () => {
    if (run.length > 1) {
      const there = run.map((p) => `${x(p).toFixed(1)} ${high(p).toFixed(1)}`).join("L");
      const back = run.slice().reverse().map((p) => `${x(p).toFixed(1)} ${low(p).toFixed(1)}`).join("L");
      path += `M${there}L${back}Z`;
    }
    run = [];
  };
  for (const point of points) {
    if (point.sm_activity_pct === undefined) close(); else run.push(point);
  }
  close();
  return path;
}

// The moment that is read by key in each chart: a chart that is drawn anew shows it again.
const moments = new Map();
let redrawing = false;

// Draws; a chart that loses the focus only because another takes its place is still read.
function redraw(draw) {
  redrawing = true;
  draw();
  redrawing = false;
}

// What a GPU went through: the service's part of SM activity, what offline work adds, and when it was
// not Healthy. The arrow keys and the pointer read single moments.
function gpuChart(points, name, served) {
  const [width, height, foot] = [300, 84, 14];
  const figure = document.createElement("figure");
  figure.className = "chart";
  const caption = document.createElement("figcaption");
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height + foot}`, role: "img", tabindex: "0", "data-focus": name });
  figure.append(svg, caption);
  if (points.length < 2) {
    caption.textContent = "no history yet";
    svg.setAttribute("aria-label", `${name}: no history yet`);
    return figure;
  }
  const first = points[0].at_us;
  const span = Math.max(points[points.length - 1].at_us - first, 1);
  const x = (p) => ((p.at_us - first) / span) * width;
  const y = (pct) => height - (Math.min(Math.max(pct, 0), 100) / 100) * height;
  const total = (p) => p.sm_activity_pct ?? 0;
  const online = (p) => (!served ? 0 : p.offline ? Math.min(p.online_sm_activity_pct ?? 0, total(p)) : total(p));
  for (const pct of [0, 50, 100]) {
    svg.append(shape("line", { class: "grid", x1: 0, x2: width, y1: y(pct), y2: y(pct) }));
  }
  let from = null;
  points.forEach((p, i) => {
    const held = p.health !== "Healthy";
    if (held && from === null) from = p;
    if (from !== null && (!held || i === points.length - 1)) {
      svg.append(shape("rect", { class: "a-held", x: x(from), y: 0, width: Math.max(x(p) - x(from), 1), height }));
      from = null;
    }
  });
  svg.append(shape("path", { class: "a-online", d: area(points, x, () => y(0), (p) => y(online(p))) }));
  svg.append(shape("path", { class: "a-offline", d: area(points, x, (p) => y(online(p)), (p) => y(total(p))) }));
  svg.append(shape("text", { x: 2, y: 10 }, "100 %"));
  svg.append(shape("text", { x: 0, y: height + 11 }, `${Math.round(span / 1e6)} s ago`));
  svg.append(shape("text", { x: width, y: height + 11, "text-anchor": "end" }, "now"));
  const cursor = shape("line", { class: "cursor", y1: 0, y2: height, visibility: "hidden" });
  svg.append(cursor);
  const mean = (f) => points.reduce((sum, p) => sum + f(p), 0) / points.length;
  const whole = `SM activity ${mean(total).toFixed(0)} % on average, services ${mean(online).toFixed(0)} %`;
  svg.setAttribute("aria-label", `${name}: ${whole}`);
  caption.textContent = whole;
  let at = points.length - 1;
  const read = (index) => {
    at = Math.min(Math.max(index, 0), points.length - 1);
    const p = points[at];
    cursor.setAttribute("x1", x(p));
    cursor.setAttribute("x2", x(p));
    cursor.setAttribute("visibility", "visible");
    caption.textContent = `${clock(p.at_us)}: SM ${total(p).toFixed(0)} %, services ${online(p).toFixed(0)} %, ${p.health}`;
  };
  const rest = () => {
    cursor.setAttribute("visibility", "hidden");
    caption.textContent = whole;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = first + ((event.clientX - box.left) / box.width) * span;
    read(points.findIndex((p) => p.at_us >= wanted));
  });
  svg.addEventListener("pointerleave", rest);
  svg.addEventListener("blur", () => {
    if (redrawing) return;
    moments.delete(name);
    rest();
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    read(at + step);
    moments.set(name, points[at].at_us);
  });
  if (moments.has(name)) {
    // What is too old to be drawn is read at the left edge.
    const still = points.findIndex((p) => p.at_us >= moments.get(name));
    read(still < 0 ? points.length - 1 : still);
  }
  return figure;
}

// Events on a line of time: one mark each, coloured by how bad it is.
function eventStrip(events, now_us, tone) {
  const [width, height] = [900, 34];
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const oldest = events.length ? Math.min(...events.map((e) => e.at_us)) : now_us - 60e6;
  const span = Math.max(now_us - oldest, 60e6);
  svg.setAttribute("aria-label", `${events.length} events within the last ${Math.round(span / 1e6)} seconds; the list below has them`);
  svg.append(shape("line", { class: "grid", x1: 0, x2: width, y1: 18, y2: 18 }));
  for (const event of events) {
    const x = width - 6 - ((now_us - event.at_us) / span) * (width - 12);
    const mark = shape("circle", { cx: x, cy: 18, r: 5, class: tone(event), fill: "currentColor" });
    mark.append(shape("title", {}, `${clock(event.at_us)} ${event.text}`));
    svg.append(mark);
  }
  svg.append(shape("text", { x: 0, y: 33 }, `${Math.round(span / 1e6)} s ago`));
  svg.append(shape("text", { x: width, y: 33, "text-anchor": "end" }, "now"));
  return svg;
}

function clock(at_us) {
  return new Date(at_us / 1e3).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}
