// The server under test, and what it says of itself.
export const root = process.env.BASE_URL;
export const baseURL = `${root}/v1`;
export const MODEL = (await (await fetch(`${baseURL}/models`)).json()).data[0].id;

/** Resolves when no request is open, and fails when one stays so. */
export async function atRest(limitMs = 30_000) {
  const until = Date.now() + limitMs;
  for (;;) {
    const { requests_open } = await (await fetch(`${root}/status`)).json();
    const { requests_running, requests_waiting } = await (await fetch(`${baseURL}/stats`)).json();
    if (!requests_open && !requests_running && !requests_waiting) return;
    if (Date.now() > until) throw new Error(`still open: ${requests_open} ${requests_running} ${requests_waiting}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
