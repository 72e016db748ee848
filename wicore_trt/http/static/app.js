// The page: two views, the theme, and the key where the server wants one.
import { html, render, useEffect, useRef, useState } from "/page/vendor/htm-preact-3.1.1.js";
import { key, setKey } from "/page/api.js";
import { Chat } from "/page/chat.js";
import { Status, useReadings } from "/page/status.js";

const VIEWS = { status: "Status", chat: "Chat" };
const dark = matchMedia("(prefers-color-scheme: dark)");
const shownTheme = () => document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
const view = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "status");

function useTheme() {
  const [theme, setTheme] = useState(shownTheme());
  useEffect(() => {
    const follow = () => setTheme(shownTheme());
    dark.addEventListener("change", follow);
    follow(); // the system may have changed between the first drawing and this effect
    return () => dark.removeEventListener("change", follow);
  }, []);
  const toggle = () => {
    const next = shownTheme() === "dark" ? "light" : "dark"; // of what is seen, which the state may be a drawing behind
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("wicore-theme", next); } catch { /* storage is off */ }
    setTheme(next);
  };
  return [theme, toggle];
}

function KeyForm({ wrong, take }) {
  const box = useRef(null);
  useEffect(() => box.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    if (box.current.value.trim()) take(box.current.value.trim());
  };
  return html`<main><form class="key" onSubmit=${submit}><h1>API key</h1>
    <p id="why" role=${wrong ? "alert" : undefined} class=${wrong ? "error" : undefined}>${wrong ? "The server does not take this key." : "This server needs an API key. This tab keeps it until you close it."}</p>
    <label>Key <input type="password" name="key" autocomplete="off" ref=${box} aria-describedby="why" /></label>
    <button type="submit">Use key</button></form></main>`;
}

function App() {
  const [theme, toggle] = useTheme();
  const [shown, setShown] = useState(view());
  const [locked, setLocked] = useState(false), [wrong, setWrong] = useState(false);
  useEffect(() => {
    const change = () => setShown(view());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  const refused = () => { setWrong(key() !== ""); setKey(""); setLocked(true); };
  const take = (value) => { setKey(value); setLocked(false); };
  const forget = () => { setKey(""); setWrong(false); setLocked(true); };
  const found = useReadings(refused, locked);
  const state = found.error ? "unreachable" : found.status?.state || "…";
  return html`<header>
      <a class="skip" href="#${shown}" onClick=${() => document.querySelector("main")?.focus()}>To the content</a>
      <strong>WiCore-TRT</strong>
      <nav aria-label="Views">${Object.entries(VIEWS).map(([name, title]) =>
        html`<a href="#${name}" aria-current=${name === shown ? "page" : undefined}>${title}</a>`)}</nav>
      <span class=${`state ${state}`} role="status">${locked ? "locked" : state}</span>
      ${key() && !locked && html`<button type="button" class="forget" onClick=${forget}>Forget key</button>`}
      <button type="button" class="theme" onClick=${toggle} aria-label="Dark theme" aria-pressed=${theme === "dark"}>${theme === "dark" ? "☾" : "☀"}</button>
    </header>
    ${locked && html`<${KeyForm} wrong=${wrong} take=${take} />`}
    <main tabindex="-1" hidden=${locked}>
      <div hidden=${shown !== "status"}><${Status} found=${found} theme=${theme} /></div>
      <div hidden=${shown !== "chat"} class="chat"><${Chat} model=${found.status?.model} refused=${refused} /></div>
    </main>`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
