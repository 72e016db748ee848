// The server under test, and what it says of itself.
export const root = process.env.BASE_URL;
export const baseURL = `${root}/v1`;
export const MODEL = (await (await fetch(`${baseURL}/models`)).json()).data[0].id;

/** Resolves when the server takes requests. */
export async function ready() {
  const end = Date.now() + 200_000;
  while (!(await fetch(`${root}/ready`)).ok) {
    if (Date.now() > end) throw new Error("the server is not ready again");
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

async function until(holds) {
  const end = Date.now() + 60_000;
  for (;;) {
    const { requests_running, requests_waiting } = await (await fetch(`${baseURL}/stats`)).json();
    if (holds(requests_running, requests_waiting)) return;
    if (Date.now() > end) throw new Error(`${requests_running} run and ${requests_waiting} wait`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** Resolves when the engine has nothing to do. */
export const atRest = () => until((running, waiting) => running + waiting === 0);

/** Resolves when a request is being computed. */
export const running = () => until((running) => running > 0);
