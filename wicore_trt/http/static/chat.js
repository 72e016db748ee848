// The chat view. Text is shown as text, whatever it holds. A model without chat template continues what stands there.
import { html, useEffect, useRef, useState } from "/page/vendor/htm-preact-3.1.1.js";
import { events } from "/page/api.js";

const DEFAULTS = { system: "", temperature: "1", top_p: "0.95", max_tokens: "512", seed: "" };

const MOST = 16, LARGEST = 20 << 20, SIDE = 1792;  // images of a conversation, bytes of a file, pixels that are sent

// A file as a data: URL. Large ones are made smaller: a model sees 896 pixels, and each turn sends all images again.
async function readImage(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} has more than 20 MiB.`);
  if (file.size <= 1 << 20) {
    return new Promise((done, failed) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.onerror = () => failed(new Error(`${file.name} cannot be read.`));
      reader.readAsDataURL(file);
    });
  }
  const image = await createImageBitmap(file).catch(() => { throw new Error(`${file.name} is no image that this browser reads.`); });
  const scale = Math.min(1, SIDE / Math.max(image.width, image.height)), canvas = document.createElement("canvas");
  canvas.width = Math.max(1, image.width * scale);
  canvas.height = Math.max(1, image.height * scale);
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

const shows = (turn) => turn.content || turn.images?.length;

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
  const said = turns.filter(shows).map(({ role, content, images }) => ({ role, content: !images?.length ? content :
    [...images.map((url) => ({ type: "image_url", image_url: { url } })), ...(content ? [{ type: "text", text: content }] : [])] }));
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

const Pictures = ({ urls, drop }) => urls?.length > 0 && html`<ul class="pictures">${urls.map((url, i) => html`<li>
  <img src=${url} alt=${`Image ${i + 1}`} />${drop && html`<button type="button" aria-label=${`Remove image ${i + 1}`}
    onClick=${() => drop(i)}>×</button>`}</li>`)}</ul>`;

const WHO = { user: "You", assistant: "Model" };

function Turn({ turn, last, busy, retry, tell }) {
  return html`<li class=${`turn ${turn.role}`} aria-busy=${turn.state === "streaming"}>
    <h2>${WHO[turn.role]}</h2>
    <${Pictures} urls=${turn.images} />
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
  const [images, setImages] = useState([]), [fault, setFault] = useState("");
  const sees = chat && Boolean(model?.images);
  const running = useRef(null), box = useRef(null), end = useRef(null);

  useEffect(() => () => running.current?.abort(), []);
  useEffect(() => { end.current?.scrollIntoView({ block: "nearest" }); }, [turns]);

  const attach = async (files) => {
    const given = [...files].filter((file) => file.type.startsWith("image/"));
    if (!given.length) return;
    try {
      if (!sees) throw new Error("This model reads text alone, no images.");
      const there = turns.reduce((count, turn) => count + (turn.images?.length || 0), images.length);
      if (there + given.length > MOST) throw new Error(`A conversation shows at most ${MOST} images.`);
      const urls = await Promise.all(given.map(readImage));
      setImages((before) => [...before, ...urls]);
      setFault("");
      tell(`${urls.length === 1 ? "An image is" : `${urls.length} images are`} attached.`);
      box.current?.focus();
    } catch (raised) { setFault(raised.message); }
  };
  useEffect(() => {  // a file that is dropped beside the box must not replace the page
    const over = (event) => event.preventDefault();
    const drop = (event) => { event.preventDefault(); if (box.current?.offsetParent) attach(event.dataTransfer.files); };
    addEventListener("dragover", over);
    addEventListener("drop", drop);
    return () => { removeEventListener("dragover", over); removeEventListener("drop", drop); };
  });
  const paste = (event) => { if (event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); } };

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
  const ready = model && (draft.trim() || images.length);
  const send = () => {
    if (busy || !ready) return;
    const before = [...turns.filter(shows), { role: "user", content: draft.trim() ? draft : "", images }];
    setDraft("");
    setImages([]);
    setFault("");
    answer(before);
  };
  const stop = () => { running.current?.abort(); box.current?.focus(); };
  const clear = () => { running.current?.abort(); running.current = null; setBusy(false); setTurns([]); setImages([]); setFault(""); tell("Cleared."); box.current?.focus(); };
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
        onPaste=${paste} aria-describedby="keys" placeholder=${chat ? "" : "The capital of France is"}></textarea>
      <${Pictures} urls=${images} drop=${(i) => setImages(images.filter((_, j) => j !== i))} />
      ${fault && html`<p class="error" role="alert">${fault}</p>`}
      <div><span id="keys">Enter sends, Shift+Enter breaks the line, Esc stops.${sees &&
        ` Drop, paste or attach images: up to 20 MiB each, ${MOST} in a conversation.`}</span>
        ${sees && html`<label class="attach">Attach<input type="file" class="hidden" accept="image/png,image/jpeg,image/webp,image/bmp,image/gif"
          multiple onChange=${(e) => { attach(e.target.files); e.target.value = ""; }} /></label>`}
        <button type="button" class="clear" onClick=${clear} disabled=${!turns.length}>Clear</button>
        ${busy ? html`<button type="button" class="stop" onClick=${stop}>Stop</button>`
          : html`<button type="submit" class="send" disabled=${!ready}>Send</button>`}</div>
    </form>`;
}
