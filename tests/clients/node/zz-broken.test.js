// Streams whose engine is killed, by both clients: an error with the server's reason, no silent end. SERVER_PID is the
// supervisor's. `node --test zz-broken.test.js`; the last of all, as the server loads its model again.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { afterEach, test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";
import OpenAI from "openai";
import { MODEL, baseURL, ready } from "./server.js";

const kill = () => {
  const [pid] = execFileSync("pgrep", ["-P", process.env.SERVER_PID, "-f", "wicore_trt.process.engine"]).toString().split("\n");
  process.kill(Number(pid), "SIGKILL");
};
afterEach(ready);

test("openai throws an APIError", async () => {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const messages = [{ role: "user", content: "Hello" }];
  const stream = await client.chat.completions.create({
    model: MODEL, messages, stream: true, max_completion_tokens: 20_000, ignore_eos: true,
  });
  let chunks = 0;
  await assert.rejects(
    async () => {
      for await (const _ of stream) if ((chunks += 1) === 3) kill();
    },
    (error) => error instanceof OpenAI.APIError && error.code === "engine_dead" && error.type === "unavailable_error",
  );
});

for (const [name, model] of [
  ["openai-compatible", createOpenAICompatible({ name: "wicore", baseURL })(MODEL)],
  ["openai chat", createOpenAI({ baseURL, apiKey: "none" }).chat(MODEL)],
])
  test(`${name}: the AI SDK's stream has an error part`, async () => {
    const prompt = "Count to a million: 1, 2, 3,";
    const found = streamText({ model, prompt, temperature: 0, maxOutputTokens: 20_000, maxRetries: 0, onError() {} });
    let texts = 0;
    const kinds = [];
    for await (const part of found.fullStream) {
      if (part.type === "text-delta" && (texts += 1) === 3) kill();
      if (part.type === "error") assert.match(String(part.error?.message ?? part.error), /engine stopped/);
      kinds.push(part.type);
    }
    assert.ok(kinds.includes("error"), String(kinds.slice(-3)));
  });
