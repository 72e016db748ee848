// The chat view. Text is shown as text, whatever it holds. A model without chat template continues what stands there.
import { html, useEffect, useRef, useState } from "/page/vendor/htm-preact-3.1.1.js";
import { events } from "/page/api.js";

const DEFAULTS = { system: "", temperature: "1", top_p: "0.95", max_tokens: "512", seed: "" };

// What a model without template continues: all that stands there, in order.
export function transcript(turns) {
  return turns.reduce((text, { content }) =>
    text + (text && !/\s$/.test(text) && !/^\s/.test(content) ? "\n" : "") + content, "");
}

// Path and body of the request for the next answer.
export function asked(turns, settings, chat) {
  const body = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  const said = turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
  if (!chat) return ["/v1/completions", { ...body, prompt: transcript(said) }];
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return ["/v1/chat/completions", { ...body, messages: [...system, ...said] }];
}

function counts({ usage, first, seconds }) {
  if (!usage) return "";
  const cached = usage.prompt_tokens_details?.cached_tokens || 0;
  const rate = usage.completion_tokens > 1 && seconds > first ? (usage.completion_tokens - 1) / (seconds - first) : 0;
  return `${usage.completion_tokens} tokens; prompt ${usage.prompt_tokens}, ${cached} of them from the cache` +
    (first ? `; first after ${first.toFixed(2)} s` : "") + (rate ? `, ${rate.toFixed(1)} tokens/s` : "");
}

async function copy(text) {
  if (navigator.clipboard) {
    try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed: the older way */ }
  }
  const area = document.createElement("textarea");  // plain HTTP from another machine has no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

const Field = ({ name, label, settings, set, ...rest }) => html`<label>${label}
  <input type="number" name=${name} value=${settings[name]} onInput=${(e) => set({ ...settings, [name]: e.target.value })} ...${rest} /></label>`;

function Settings({ settings, set, chat }) {
  const own = { settings, set };
  return html`<details class="settings"><summary>Settings</summary><div>
    <${Field} ...${own} name="temperature" label="Temperature" min="0" max="100" step="any" />
    <${Field} ...${own} name="top_p" label="Top p" min="0.01" max="1" step="any" />
    <${Field} ...${own} name="max_tokens" label="Most tokens" min="1" step="1" />
    <${Field} ...${own} name="seed" label="Seed" placeholder="random" min="0" step="1" />
    <label class="wide">System prompt <textarea name="system" rows="2" disabled=${!chat} value=${settings.system}
      placeholder=${chat ? "" : "needs a chat template"} onInput=${(e) => set({ ...settings, system: e.target.value })}></textarea></label>
  </div></details>`;
}

const WHO = { user: "You", assistant: "Model" };

function Turn({ turn, last, busy, retry, tell }) {
  return html`<li class=${`turn ${turn.role}`} aria-busy=${turn.state === "streaming"}>
    <h2>${WHO[turn.role]}</h2>
    <p class="text">${turn.content}</p>
    ${turn.error && html`<p class="error" role="alert">${turn.error}</p>`}
    ${turn.role === "assistant" && html`<p class="foot"><span class="counts">${turn.state === "stopped" ? "stopped; " : ""}${counts(turn)}</span>
      ${turn.content && html`<button type="button" onClick=${async () => tell((await copy(turn.content)) ? "Copied." : "Copying failed.")}>Copy</button>`}
      ${last && !busy && turn.state !== "done" && html`<button type="button" class="retry" onClick=${retry}>Retry</button>`}</p>`}
  </li>`;
}

export function Chat({ model, refused }) {
  const chat = model ? model.chat : true;
  const [turns, setTurns] = useState([]), [draft, setDraft] = useState(""), [said, tell] = useState("");
  const [settings, setSettings] = useState(DEFAULTS), [busy, setBusy] = useState(false);
  const running = useRef(null), box = useRef(null), end = useRef(null);

  useEffect(() => () => running.current?.abort(), []);
  useEffect(() => { end.current?.scrollIntoView({ block: "nearest" }); }, [turns]);

  const answer = async (before) => {
    const stop = new AbortController(), started = performance.now();
    const turn = { role: "assistant", content: "", state: "streaming", error: "" };
    let frame = 0;
    const own = () => running.current === stop;
    const show = () => { frame = 0; if (own()) setTurns([...before, { ...turn }]); };
    running.current = stop;
    setBusy(true);
    tell("Answering.");
    show();
    try {
      const [path, body] = asked(before, settings, chat);
      for await (const event of events(path, body, stop.signal)) {
        const choice = event.choices[0];
        const text = choice ? choice.delta?.content ?? choice.text ?? "" : "";
        turn.seconds = (performance.now() - started) / 1000;
        if (text) turn.first ??= turn.seconds;
        turn.content += text;
        if (event.usage) turn.usage = event.usage;
        frame = frame || requestAnimationFrame(show);
      }
      turn.state = "done";
    } catch (raised) {
      turn.state = stop.signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") turn.error = raised.message;
      if (raised.status === 401) refused();
    }
    cancelAnimationFrame(frame);
    if (!own()) return;
    show();
    running.current = null;
    setBusy(false);
    tell(turn.state === "done" ? `Answer finished: ${counts(turn)}.` : turn.state === "stopped" ? "Stopped." : "The answer failed.");
  };
  const send = () => {
    if (busy || !draft.trim() || !model) return;
    const before = [...turns.filter((turn) => turn.content), { role: "user", content: draft }];
    setDraft("");
    answer(before);
  };
  const stop = () => { running.current?.abort(); box.current?.focus(); };
  const clear = () => { running.current?.abort(); running.current = null; setBusy(false); setTurns([]); tell("Cleared."); box.current?.focus(); };
  const retry = () => { answer(turns.slice(0, -1)); box.current?.focus(); };
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "Escape" && busy) stop();
  };
  return html`<h1>Chat</h1>
    ${!chat && html`<p class="note" id="base">This model has no chat template, so it does not answer: it continues the text above and what you write.</p>`}
    <${Settings} settings=${settings} set=${setSettings} chat=${chat} />
    <ol class="turns" aria-label="Conversation">${turns.map((turn, i) => html`<${Turn} key=${i} turn=${turn} busy=${busy} tell=${tell}
      last=${i === turns.length - 1} retry=${retry} />`)}<li ref=${end} class="end" aria-hidden="true"></li></ol>
    <p class="hidden" role="status" aria-live="polite">${said}</p>
    <form class="ask" onSubmit=${(event) => { event.preventDefault(); send(); }}>
      <label for="ask">Message</label>
      <textarea id="ask" ref=${box} rows="3" value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${typed}
        aria-describedby="keys" placeholder=${chat ? "" : "The capital of France is"}></textarea>
      <div><span id="keys">Enter sends, Shift+Enter breaks the line, Esc stops.</span>
        <button type="button" class="clear" onClick=${clear} disabled=${!turns.length}>Clear</button>
        ${busy ? html`<button type="button" class="stop" onClick=${stop}>Stop</button>`
          : html`<button type="submit" class="send" disabled=${!model || !draft.trim()}>Send</button>`}</div>
    </form>`;
}
