// Vercel's AI SDK against a server at BASE_URL, by both of its ways in: `node --test ai-sdk.test.js`.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, atRest, baseURL } from "./server.js";

globalThis.AI_SDK_LOG_WARNINGS = false;
const compatible = createOpenAICompatible({
  name: "wicore", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const plain = createOpenAICompatible({ name: "plain", baseURL });
const City = z.object({ name: z.enum(["Paris", "Rome"]), people: z.number().int().min(0).max(9) });
const prompt = "The capital of France is";
const ask = (model, more) => ({ model, prompt, maxOutputTokens: 200, temperature: 0, maxRetries: 0, ...more });
const paint = (colors) =>
  tool({
    description: "Paint the wall.",
    inputSchema: z.object({ color: z.enum(["red", "blue"]) }),
    execute: async ({ color }) => {
      colors.push(color);
      return { painted: color };
    },
  });

for (const [name, model] of [
  ["openai-compatible", compatible(MODEL)],
  ["openai chat", createOpenAI({ baseURL, apiKey: "none" }).chat(MODEL)],
]) {
  test(`${name}: generateText and streamText say the same`, async () => {
    const whole = await generateText(ask(model, { maxOutputTokens: 24 }));
    const streamed = streamText(ask(model, { maxOutputTokens: 24 }));
    let text = "";
    for await (const part of streamed.textStream) text += part;
    assert.ok(text.length > 0);
    assert.equal(text, whole.text);
    const usage = await streamed.usage;
    assert.equal(usage.outputTokens, whole.usage.outputTokens);
    assert.ok(usage.inputTokens > 0 && usage.totalTokens === usage.inputTokens + usage.outputTokens);
    assert.equal(await streamed.finishReason, whole.finishReason);
  });

  test(`${name}: system text, turns of one role in a row, parts of text, stop`, async () => {
    const messages = [
      { role: "user", content: [{ type: "text", text: "One." }, { type: "text", text: "Two." }] },
      { role: "assistant", content: "Three." },
      { role: "user", content: "Four." },
      { role: "user", content: "Five." },
    ];
    const answer = await generateText({
      model, messages, system: "Be short.", maxOutputTokens: 24, stopSequences: ["e"], maxRetries: 0, seed: 1,
    });
    assert.ok(!answer.text.includes("e"));
  });

  test(`${name}: objects of a schema, whole and streamed`, async () => {
    City.parse((await generateObject(ask(model, { schema: City }))).object);
    City.parse((await generateText(ask(model, { output: Output.object({ schema: City }) }))).output);
    const streamed = streamObject(ask(model, { schema: City }));
    let parts = 0;
    for await (const _ of streamed.partialObjectStream) parts += 1;
    assert.ok(parts > 1);
    City.parse(await streamed.object);
    const chosen = await generateText(ask(model, { output: Output.choice({ options: ["wet", "dry"] }) }));
    assert.ok(["wet", "dry"].includes(chosen.output));
    const list = await generateText(ask(model, { output: Output.array({ element: City }), maxOutputTokens: 600, temperature: 1, seed: 1 }));
    if (list.finishReason === "stop") z.array(City).parse(list.output);
  });

  test(`${name}: tools, two steps`, async () => {
    const colors = [];
    const answer = await generateText(
      ask(model, {
        tools: { paint: paint(colors), wait: tool({ inputSchema: z.object({}), execute: async () => "waited" }) },
        toolChoice: { type: "tool", toolName: "paint" },
        stopWhen: stepCountIs(2),
        maxOutputTokens: 300,
      }),
    );
    assert.equal(answer.steps.length, 2);
    assert.ok(answer.steps.every((step) => step.finishReason === "tool-calls"));
    assert.ok(colors.length >= 2 && colors.every((color) => ["red", "blue"].includes(color)));
  });

  test(`${name}: tools, streamed`, async () => {
    const colors = [];
    const streamed = streamText(
      ask(model, { tools: { paint: paint(colors) }, toolChoice: "required", maxOutputTokens: 300 }),
    );
    const kinds = [];
    for await (const part of streamed.fullStream) kinds.push(part.type);
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result", "finish"])
      assert.ok(kinds.includes(kind), `${kind} is missing in ${kinds}`);
    assert.ok(!kinds.includes("error") && colors.length >= 1);
  });

  test(`${name}: tools beside a schema of the answer`, async () => {
    const answer = await generateText(
      ask(model, { tools: { paint: paint([]) }, output: Output.object({ schema: City }), maxOutputTokens: 300 }),
    );
    if (answer.finishReason === "stop") City.parse(answer.output);
  });

  test(`${name}: an abort ends the work`, async () => {
    const controller = new AbortController();
    const streamed = streamText(
      ask(model, { maxOutputTokens: 10_000, temperature: 1, abortSignal: controller.signal, onError() {} }),
    );
    for await (const part of streamed.fullStream) if (part.type === "text-delta") controller.abort();
    await atRest();
  });

  test(`${name}: errors have their status`, async () => {
    await assert.rejects(generateText(ask(model, { temperature: -1 })), (error) => {
      assert.ok(APICallError.isInstance(error), String(error));
      assert.equal(error.statusCode, 400);
      assert.ok(error.message.includes("temperature") && !error.isRetryable);
      return true;
    });
  });
}

test("openai-compatible without structured outputs asks for any JSON object", async () => {
  const answer = await generateText(
    ask(plain(MODEL), { output: Output.json(), maxOutputTokens: 400, temperature: 1, seed: 1 }),
  ).then((found) => found.finishReason === "length" || typeof found.output === "object", (error) => error.text?.startsWith("{"));
  assert.ok(answer);
});

test("openai-compatible completions", async () => {
  const { text } = await generateText(ask(plain.completionModel(MODEL), { maxOutputTokens: 8 }));
  assert.ok(text.length > 0);
});
