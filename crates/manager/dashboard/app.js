"use strict";
// Asks the API every second and shows what it says. Only /v1 is used, so anybody can build another.

const EVERY_MS = 1000;
const HISTORY_EVERY_MS = 2000;
const SPAN_S = 300;
const KINDS = ["eviction", "fault", "alert", "health", "job", "service", "plan", "operator"];
const shown = new Set(["eviction", "fault", "alert", "health", "service", "operator"]);
const $ = (id) => document.getElementById(id);

// The token comes with the address once and is then kept for this tab.
function takeToken() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  if (!fragment.has("token")) return;
  sessionStorage.setItem("muxflow-token", fragment.get("token"));
  history.replaceState(null, "", location.pathname);
}
takeToken();
window.addEventListener("hashchange", takeToken);

class SignIn extends Error {}

async function api(path) {
  const token = sessionStorage.getItem("muxflow-token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(`/v1${path}`, { headers });
  if (answer.status === 401) throw new SignIn();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// ---- small builders ----

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const number = (value, digits = 0, unit = "") =>
  value === undefined || value === null ? "–" : `${value.toFixed(digits)}${unit}`;
const short = (gpu) => names.get(gpu) ?? gpu.slice(0, 12);
const names = new Map();

function since(us) {
  const s = Math.max(Math.round(us / 1e6), 0);
  if (s < 100) return `${s} s`;
  if (s < 6000) return `${Math.round(s / 60)} min`;
  return `${Math.round(s / 3600)} h`;
}

// Replaces what is inside, but only when it differs: whoever reads is not disturbed. What had the focus
// has it afterwards too.
const drawn = new WeakMap();
function put(box, key, make) {
  const text = JSON.stringify(key);
  if (drawn.get(box) === text) return;
  drawn.set(box, text);
  const focus = box.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  redraw(() => box.replaceChildren(...[make()].flat()));
  if (focus === undefined) return;
  [...box.querySelectorAll("[data-focus]")].find((node) => node.dataset.focus === focus)?.focus({ preventScroll: true });
}

function table(heads, rows) {
  const head = element("tr", {}, ...heads.map(([name, kind]) => element("th", { scope: "col", class: kind ?? "" }, name)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell, i) =>
    element("td", { "data-label": heads[i][0], class: heads[i][1] ?? "" }, cell))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

const empty = (...children) => element("p", { class: "empty" }, ...children);
const code = (text) => element("code", {}, text);

function meter(share, tone) {
  const inner = element("span");
  inner.style.width = `${Math.min(Math.max(share, 0), 1) * 100}%`;
  return element("span", { class: `meter ${tone}`, "aria-hidden": "true" }, inner);
}

// ---- sections ----

const TONES = { Healthy: "good", Unhealthy: "warn", Overlimit: "bad", Disabled: "bad", Init: "soft" };

function tile(name, value, more) {
  return element("div", { class: "tile" }, element("dt", {}, name),
    element("dd", {}, value, more ? element("span", { class: "more" }, more) : null));
}

function glance(summary) {
  const health = summary.gpus_by_health ?? {};
  const open = ["submitted", "profiling", "queued"].reduce((sum, s) => sum + (summary.jobs[s] ?? 0), 0);
  const running = (summary.jobs.running ?? 0) + (summary.jobs.checkpointing ?? 0);
  const states = Object.entries(health).map(([state, count]) => `${count} ${state}`).join(", ");
  return [
    tile("GPUs", `${summary.gpus}`, states || "none found"),
    tile("Shared now", `${summary.gpus_shared}`, `of ${summary.gpus} GPUs have a job`),
    tile("GPU utilisation", number(summary.gpu_util_pct, 0, " %"), `without sharing ${number(summary.gpu_util_without_pct, 0, " %")}`),
    tile("SM activity", number(summary.sm_activity_pct, 0, " %"), `services alone ${number(summary.sm_activity_without_pct, 0, " %")}`),
    tile("Oversold GPU", number(summary.oversold_gpu, 2), "of a GPU that jobs got beside services"),
    tile("Jobs", `${running} run`, `${open} wait, ${summary.jobs.done ?? 0} done`),
    tile("Evictions", `${summary.evictions}`, "to protect a service"),
    tile("Errors on GPUs", `${summary.faults}`, "answered since the start"),
  ];
}

function gpuCard(gpu, points) {
  const reading = gpu.reading ?? {};
  const head = element("div", { class: "row" },
    element("h3", {}, `GPU ${gpu.index} · ${gpu.gpu_type}`),
    element("span", { class: `badge ${TONES[gpu.health] ?? "soft"}` }, gpu.health));
  const service = gpu.online
    ? element("p", {}, "service ", element("b", {}, gpu.online.service), gpu.online.latency_us ? `, p99 ${number(gpu.online.latency_us / 1e3, 0, " ms")}` : "")
    : element("p", {}, "no service");
  const job = gpu.offline
    ? element("p", {}, "job ", element("b", {}, gpu.offline.job), `, gate ${number(gpu.budget * 100, 0, " %")} open`)
    : element("p", {}, gpu.placeable ? `free for a job: ${number(gpu.share_pct, 0, " %")} of the SMs` : "no job may come now");
  const memory = reading.memory_used_bytes === undefined ? "" : `${(reading.memory_used_bytes / 2 ** 30).toFixed(1)} of ${(gpu.memory_bytes / 2 ** 30).toFixed(0)} GiB`;
  const facts = [memory, reading.sm_clock_mhz && `${reading.sm_clock_mhz} MHz`, reading.power_w && `${reading.power_w.toFixed(0)} W`].filter(Boolean).join(" · ");
  const strangers = gpu.outside_mps.length
    ? element("p", { class: "warn" }, `processes outside MPS: ${gpu.outside_mps.join(", ")}. ${gpu.outside_mps_remedy ?? ""}`) : null;
  return element("article", { class: "card" }, head, service, job, element("p", {}, facts || "no reading yet"), strangers,
    gpuChart(points, `GPU ${gpu.index}`, gpu.online !== undefined));
}

function serviceRow(view) {
  const { latency, declared } = view;
  const ready = view.replicas.filter((replica) => replica.state === "ready").length;
  const share = declared.slo_ms && latency.p99_ms ? latency.p99_ms / declared.slo_ms : null;
  const tone = share === null ? "" : share > 1 ? "bad" : share > 0.9 ? "warn" : "";
  const against = element("span", {}, number(latency.p99_ms, 1, " ms"),
    declared.slo_ms ? ` of ${number(declared.slo_ms, 0, " ms")}` : "", share === null ? "" : meter(share, tone));
  const state = view.waiting_for ?? (view.to_restart ? `restarting, ${view.to_restart} to go` : ready < view.wanted_replicas ? "starting" : "serving");
  return [element("b", {}, declared.name), view.address, `${ready} of ${view.wanted_replicas}`,
    number(latency.rate_per_s, 1), number(latency.p50_ms, 1, " ms"), against, `${view.failed_total} of ${view.requests_total}`, state];
}

const SERVICE_HEADS = [["Service"], ["Front"], ["Replicas"], ["Requests/s", "num"], ["p50", "num"], ["p99 against SLO"], ["Failed", "num"], ["State"]];

function services(list) {
  if (!list.length) {
    return empty("No service is declared. Write one down as JSON and give it to ", code("muxflow service declare FILE"),
      "; services that run already keep running, and ", code("muxflow up"), " says how to bring them under MPS.");
  }
  return table(SERVICE_HEADS, list.map(serviceRow));
}

function pairings(list) {
  if (!list.length) {
    return empty("No GPU is shared now. A job comes as soon as one is queued and a GPU is Healthy: ", code("muxflow submit -- python train.py"));
  }
  const speed = (value) => value === undefined ? "not known yet" : element("span", {}, number(value, 2), meter(value, ""));
  return table([["GPU"], ["Service"], ["Job"], ["SM share", "num"], ["Predicted speed"], ["Seen speed"], ["Since", "num"]],
    list.map((p) => [short(p.gpu), p.service ?? "none", p.job, number(p.share_pct, 0, " %"), speed(p.predicted_speed), speed(p.seen_speed), clock(p.since_us)]));
}

const HOLDERS = ["profiling", "running", "checkpointing"];
const WAITERS = ["submitted", "queued"];
const LISTED = 200;

// How many jobs there are beyond those of a list that was cut.
function beyond(list, states, counts) {
  const all = states.reduce((sum, state) => sum + (counts[state] ?? 0), 0);
  return list.next === undefined || list.next === null ? 0 : Math.max(all - list.items.length, 1);
}

function jobs(list, more) {
  if (!list.length) {
    return empty("The queue is empty. Submit a job: ", code("muxflow submit -- python train.py"));
  }
  const all = code(`muxflow jobs --state open -n ${Math.max(10000, list.length + more)}`);
  const rest = more ? empty(`… and ${more} more; `, all, " lists them all.") : null;
  return [jobTable(list), rest].filter(Boolean);
}

function jobTable(list) {
  return table([["Job"], ["Name"], ["User"], ["State"], ["GPU"], ["Why"], ["Waited", "num"]],
    list.map((job) => [job.id, job.name ?? job.workload, job.user, job.cancelling ? "cancelling" : job.state,
      job.gpu ? short(job.gpu) : "–", job.reason || "–", since(job.waited_us)]));
}

const tone = (event) => ({ fault: "bad", eviction: "warn", alert: "bad", health: /Overlimit|Disabled/.test(event.text) ? "warn" : "soft" })[event.kind] ?? "soft";
const happened = [];
let after = 0;

async function readEvents() {
  for (let page = 0; page < 20; page += 1) {
    const list = await api(`/events?after=${after}&limit=500`);
    happened.push(...list.items);
    after = list.next;
    if (!list.more) break;
  }
  happened.splice(0, Math.max(happened.length - 2000, 0));
}

function showEvents() {
  const wanted = happened.filter((event) => shown.has(event.kind));
  const now = Date.now() * 1e3;
  put($("strip"), [wanted.length, Math.floor(now / 5e6)], () => eventStrip(wanted, now, tone));
  put($("event-list"), [wanted.length, wanted.at(-1)?.seq], () => wanted.length
    ? wanted.slice(-40).reverse().map((event) => element("li", {}, element("span", { class: "soft" }, clock(event.at_us)),
      element("span", { class: tone(event) }, event.kind), element("span", {}, `${event.gpu ? `${short(event.gpu)}: ` : ""}${event.text}`)))
    : element("li", {}, "Nothing of this kind has happened."));
}

function makeKinds() {
  for (const kind of KINDS) {
    const box = element("input", { type: "checkbox", id: `kind-${kind}` });
    box.checked = shown.has(kind);
    box.addEventListener("change", () => {
      if (box.checked) shown.add(kind); else shown.delete(kind);
      showEvents();
    });
    $("kinds").append(element("label", { for: `kind-${kind}` }, box, ` ${kind}`));
  }
}

// ---- the loop ----

const past = new Map();
let pastAt = 0;

async function readHistory(gpus) {
  if (Date.now() - pastAt < HISTORY_EVERY_MS) return;
  pastAt = Date.now();
  for (const gpu of gpus.slice(0, 64)) {
    const history = await api(`/gpus/${encodeURIComponent(gpu.id)}/history?span_s=${SPAN_S}`);
    const every = Math.max(Math.ceil(history.points.length / 150), 1);
    past.set(gpu.id, history.points.filter((_, i) => i % every === 0));
  }
}

function say(text, bad) {
  $("state").textContent = text;
  $("state").classList.toggle("bad", bad);
}

async function turn() {
  const health = await api("/health");
  // Apart, so that a long queue does not push what runs out of sight.
  const list = (states) => api(`/jobs?state=${states.join(",")}&limit=${LISTED}`);
  const [summary, gpus, pairs, holding, waiting, served] = await Promise.all([
    api("/summary"), api("/gpus"), api("/pairings"), list(HOLDERS), list(WAITERS), api("/services")]);
  await Promise.all([readEvents(), readHistory(gpus.items)]);
  gpus.items.forEach((gpu) => names.set(gpu.id, `GPU ${gpu.index}`));
  $("sign-in").hidden = true;
  const mode = [health.paused && "paused: offline work is held back", health.shadow && "shadow mode: nothing is carried out"].filter(Boolean);
  say(mode.length ? mode.join(", ") : `up for ${since(health.uptime_s * 1e6)}, as ${health.user}`, false);
  put($("tiles"), summary, () => glance(summary));
  const box = $("gpu-list");
  put(box, [gpus.items, pastAt], () => gpus.items.length
    ? gpus.items.map((gpu) => gpuCard(gpu, past.get(gpu.id) ?? []))
    : empty("No GPU was found. ", code("muxflow doctor"), " says why; without one, try ", code("muxflow demo"), "."));
  put($("service-list"), served.items, () => services(served.items));
  put($("pairing-list"), pairs.items, () => pairings(pairs.items));
  const open = [...holding.items, ...waiting.items];
  const more = beyond(holding, HOLDERS, summary.jobs) + beyond(waiting, WAITERS, summary.jobs);
  put($("job-list"), [open, more], () => jobs(open, more));
  showEvents();
}

async function run() {
  makeKinds();
  for (;;) {
    try {
      await turn();
      document.body.dataset.ready = "yes";
    } catch (error) {
      if (error instanceof SignIn) {
        $("sign-in").hidden = false;
        say("signed out", true);
      } else {
        say("the manager does not answer; trying again", true);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("muxflow-token", $("token").value);
});
run();
