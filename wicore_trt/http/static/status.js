// The status view: what the server tells of itself each second, as numbers and as charts over five minutes.
import { html, useEffect, useRef, useState } from "/page/vendor/htm-preact-3.1.1.js";
import { get } from "/page/api.js";
import { Chart } from "/page/charts.js";
import { moment, restarted } from "/page/measure.js";

const EVERY_MS = 1000, KEEP = 300;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let i = 0;
  for (; count >= 1024 && i < UNITS.length - 1; i++) count /= 1024;
  return `${i && count < 100 ? count.toFixed(1) : Math.round(count)} ${UNITS[i]}`;
}

const whole = (x) => Math.round(x).toLocaleString("en");
const short = (x) => (x >= 100 || Number.isInteger(x) ? whole(x) : x.toPrecision(2));
const ms = (x) => `${short(x)} ms`, percent = (x) => `${Math.round(x)} %`, perSecond = (x) => short(x);
const or = (x, show) => (x == null ? "–" : show(x));

// Reads /status and /v1/stats each second while the tab is visible. `refused` is called where a key is needed.
export function useReadings(refused, paused) {
  const [found, setFound] = useState({ status: null, stats: null, error: "", times: [], moments: [] });
  const kept = useRef({ readings: [], times: [], moments: [] });
  useEffect(() => {
    if (paused) return undefined;
    let over = false, timer = 0;
    const read = async () => {
      clearTimeout(timer);
      if (document.hidden) return;
      let status = null, stats = null, error = "";
      try {
        status = await get("/status");
        if (status.model) stats = await get("/v1/stats");
      } catch (raised) {
        if (over) return;
        if (raised.status === 401) { refused(); return; }
        error = raised.message;
      }
      if (over) return;
      if (stats) keep(kept.current, stats);
      setFound({ status, stats, error, times: kept.current.times, moments: kept.current.moments });
      timer = setTimeout(read, EVERY_MS);
    };
    const shown = () => { if (!document.hidden) read(); };
    document.addEventListener("visibilitychange", shown);
    read();
    return () => { over = true; clearTimeout(timer); document.removeEventListener("visibilitychange", shown); };
  }, [paused]);
  return found;
}

function keep(kept, stats) {
  const last = kept.readings[kept.readings.length - 1];
  if (last && restarted(last, stats)) kept.readings = [];
  kept.readings = [...kept.readings, stats].slice(-30);
  kept.moments = [...kept.moments, moment(kept.readings)].slice(-KEEP);
  kept.times = [...kept.times, Date.now() / 1000].slice(-KEEP);
}

const Number_ = ({ name, label, value }) =>
  html`<div class="number"><dt>${label}</dt><dd data-name=${name}>${value}</dd></div>`;

export function Status({ found, theme }) {
  const { status, stats, error, times, moments } = found;
  const now = moments[moments.length - 1];
  const model = status?.model;
  const row = (pick) => moments.map((m) => { const x = pick(m); return x === undefined ? null : x; });
  const tiers = now ? now.tiers.map((t) => t.name) : [];
  const tier = (name, what) => row((m) => m.tiers.find((t) => t.name === name)?.[what]);
  const chart = (title, lines, rows, show, most) =>
    html`<${Chart} ...${{ title, lines, rows, show, most, times, theme }} />`;
  return html`
    <h1>Status</h1>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${!status && !error && html`<p>Asking the server …</p>`}
    ${status && html`<dl class="numbers">
      <${Number_} name="state" label="State" value=${status.state} />
      <${Number_} name="model" label="Model" value=${model ? model.model_id : "loading"} />
      <${Number_} name="running" label="Running" value=${or(stats?.requests_running, whole)} />
      <${Number_} name="waiting" label="Waiting" value=${or(stats?.requests_waiting, whole)} />
      <${Number_} name="rate" label="Tokens per second" value=${or(now?.generated, perSecond)} />
      <${Number_} name="first" label="TTFT p50" value=${or(now?.first[0], ms)} />
      <${Number_} name="gap" label="Inter-token p50" value=${or(now?.gap[0], ms)} />
      <${Number_} name="generated" label="Tokens generated" value=${or(stats?.generated_tokens, whole)} />
      <${Number_} name="prompt" label="Prompt tokens" value=${or(stats?.prompt_tokens, whole)} />
      <${Number_} name="hit" label="of them from the cache" value=${stats?.prompt_tokens ? percent(100 * stats.cached_prompt_tokens / stats.prompt_tokens) : "–"} />
      <${Number_} name="finished" label="Sequences ended" value=${stats ? whole(Object.values(stats.requests_finished).reduce((a, b) => a + b, 0)) : "–"} />
      <${Number_} name="preemptions" label="Preemptions" value=${or(stats?.preemptions, whole)} />
    </dl>`}
    ${tiers.length > 0 && html`<section aria-label="KV cache tiers"><h2>KV cache</h2><ul class="tiers">${now.tiers.map((t) => html`
      <li data-tier=${t.name}><span>${t.name}</span>
        <meter min="0" max="100" value=${t.fill || 0} aria-label=${`${t.name} tier, share in use`}></meter>
        <span>${bytes(t.used)} of ${bytes(t.capacity)}, ${whole(t.hits)} prompt tokens saved</span></li>`)}</ul></section>`}
    ${stats && !stats.latency && html`<p class="note">Latencies and cache tiers are shown to operators' keys. These are the numbers of your own requests.</p>`}
    ${now && html`<section class="charts" aria-label="Charts of the last five minutes">
      ${chart("Requests", ["running", "waiting"], [row((m) => m.running), row((m) => m.waiting)], short)}
      ${chart("Tokens per second", ["generated", "prompt"], [row((m) => m.generated), row((m) => m.prompt)], perSecond)}
      ${chart("Time to first token", ["p50", "p95", "p99"], [0, 1, 2].map((i) => row((m) => m.first[i])), ms)}
      ${chart("Time between tokens", ["p50", "p95", "p99"], [0, 1, 2].map((i) => row((m) => m.gap[i])), ms)}
      ${tiers.length > 0 && chart("KV tiers in use", tiers, tiers.map((name) => tier(name, "fill")), percent, 100)}
      ${chart("Prompt tokens from the cache", ["all", ...tiers], [row((m) => m.hit), ...tiers.map((name) => tier(name, "hit"))], percent, 100)}
    </section>`}
    ${model && html`<p class="note">WiCore-TRT ${status.version}: ${model.backend}, ${model.kernels}, ${model.dtype}${model.quantization ? `, ${model.quantization}` : ""}, KV ${model.kv_dtype}, context of ${whole(model.max_context_tokens)} tokens. Shares and percentiles are of the last ten seconds.</p>`}`;
}
