// The npm package `openai` against a server at BASE_URL: `node --test openai.test.js`.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { MODEL, atRest, baseURL, running } from "./server.js";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "The capital of France is" }];
const City = z.object({ name: z.enum(["Paris", "Rome"]), people: z.number().int().min(0).max(9) });
const paint = {
  type: "function",
  function: {
    name: "paint",
    description: "Paint the wall.",
    strict: true,
    parameters: z.toJSONSchema(z.object({ color: z.enum(["red", "blue"]) })),
  },
};
const ask = (more) => ({ model: MODEL, messages, max_completion_tokens: 24, temperature: 0, ...more });

test("models", async () => {
  const listed = [];
  for await (const model of client.models.list()) listed.push(model);
  assert.equal(listed.length, 1);
  assert.deepEqual(await client.models.retrieve(MODEL), listed[0]);
  assert.equal(listed[0].object, "model");
});

test("chat", async () => {
  const { data, response, request_id } = await client.chat.completions.create(ask()).withResponse();
  const [choice] = data.choices;
  assert.equal(data.object, "chat.completion");
  assert.ok(choice.message.content.length > 0 && ["stop", "length"].includes(choice.finish_reason));
  assert.equal(data.usage.total_tokens, data.usage.prompt_tokens + data.usage.completion_tokens);
  assert.ok(request_id && response.headers.get("x-request-id") === request_id);
});

test("a stream is the same text as the whole answer, and says its usage", async () => {
  const whole = await client.chat.completions.create(ask());
  const stream = await client.chat.completions.create(ask({ stream: true, stream_options: { include_usage: true } }));
  let text = "";
  const chunks = [];
  for await (const chunk of stream) {
    chunks.push(chunk);
    text += chunk.choices[0]?.delta.content ?? "";
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
  assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
  assert.equal(chunks.at(-2).choices[0].finish_reason, whole.choices[0].finish_reason);
});

test("the stream helper puts the same answer together", async () => {
  const whole = await client.chat.completions.create(ask());
  const runner = client.chat.completions.stream(ask());
  assert.equal(await runner.finalContent(), whole.choices[0].message.content);
});

test("several choices and logprobs", async () => {
  const answer = await client.chat.completions.create(
    ask({ n: 3, temperature: 1, seed: 7, logprobs: true, top_logprobs: 2 }),
  );
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2]);
  for (const { message, logprobs } of answer.choices) {
    const bytes = logprobs.content.flatMap((entry) => entry.bytes);
    assert.equal(Buffer.from(bytes).toString(), message.content);
    assert.ok(logprobs.content.every((entry) => entry.logprob <= 0 && entry.top_logprobs.length === 2));
  }
});

test("response_format json_schema is parsed by the zod helper", async () => {
  const answer = await client.chat.completions.parse(
    ask({ response_format: zodResponseFormat(City, "city"), max_completion_tokens: 200 }),
  );
  City.parse(answer.choices[0].message.parsed);
  const stream = client.chat.completions.stream(
    ask({ response_format: zodResponseFormat(City, "city"), max_completion_tokens: 200 }),
  );
  City.parse((await stream.finalChatCompletion()).choices[0].message.parsed);
});

test("response_format json_object is JSON", async () => {
  const answer = await client.chat.completions.create(
    ask({ response_format: { type: "json_object" }, max_completion_tokens: 300, seed: 3 }),
  );
  const [choice] = answer.choices;
  assert.ok(choice.message.content.trimStart().startsWith("{"));
  if (choice.finish_reason === "stop") JSON.parse(choice.message.content);
});

test("tools that must be called", async () => {
  for (const tool_choice of ["required", { type: "function", function: { name: "paint" } }]) {
    const answer = await client.chat.completions.create(
      ask({ tools: [paint], tool_choice, parallel_tool_calls: false, max_completion_tokens: 100 }),
    );
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    assert.equal(call.function.name, "paint");
    assert.ok(["red", "blue"].includes(JSON.parse(call.function.arguments).color));
  }
});

test("tools that may be called, streamed", async () => {
  const stream = await client.chat.completions.create(ask({ tools: [paint], stream: true }));
  const reasons = [];
  for await (const { choices } of stream) if (choices[0]?.finish_reason) reasons.push(choices[0].finish_reason);
  assert.equal(reasons.length, 1);
});

test("the tool runner calls the function and sends its result back", async () => {
  const colors = [];
  const runner = client.chat.completions.runTools(
    {
      ...ask({ tool_choice: { type: "function", function: { name: "paint" } }, parallel_tool_calls: false }),
      max_completion_tokens: 100,
      stream: true,
      tools: [
        {
          type: "function",
          function: {
            ...paint.function,
            parse: JSON.parse,
            function: ({ color }) => {
              colors.push(color);
              return "done, said the painter: \u00fc \ud83c\udfa8 <end_of_turn>";
            },
          },
        },
      ],
    },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.ok(colors.length >= 1 && colors.every((color) => ["red", "blue"].includes(color)), String(colors));
});

test("completions: a text, token ids, lists, echo, stop", async () => {
  const prompt = "Water boils at";
  const one = await client.completions.create({ model: MODEL, prompt, max_tokens: 6, temperature: 0, echo: true });
  assert.ok(one.choices[0].text.startsWith(prompt));
  const ids = [2, 9259, 1902];
  const two = await client.completions.create({ model: MODEL, prompt: [ids, ids], max_tokens: 4, temperature: 0 });
  assert.equal(two.choices[0].text, two.choices[1].text);
  assert.equal(two.usage.prompt_tokens, 6);
  const stopped = await client.completions.create({ model: MODEL, prompt, max_tokens: 40, temperature: 0, stop: " " });
  assert.ok(!stopped.choices[0].text.includes(" "));
  let text = "";
  const stream = await client.completions.create({ model: MODEL, prompt, max_tokens: 6, temperature: 0, stream: true });
  for await (const chunk of stream) text += chunk.choices[0].text;
  assert.equal(prompt + text, one.choices[0].text);
});

test("a stream that is aborted or left ends the work", async () => {
  const long = ask({ stream: true, max_completion_tokens: 20_000, ignore_eos: true, temperature: 1 });
  const first = await client.chat.completions.create(long);
  for await (const _ of first) first.controller.abort();
  await atRest();
  for await (const _ of await client.chat.completions.create(long)) break;
  await atRest();
  const controller = new AbortController();
  const waiting = client.chat.completions.create({ ...long, stream: false }, { signal: controller.signal });
  const rejected = assert.rejects(waiting, OpenAI.APIUserAbortError);
  await running();
  controller.abort();
  await rejected;
  await atRest();
  await assert.rejects(
    client.chat.completions.create({ ...long, stream: false }, { timeout: 500 }), OpenAI.APIConnectionTimeoutError,
  );
  await atRest();
});

test("errors are the client's classes and name the field", async () => {
  const bad = [
    [{ temperature: -1 }, OpenAI.BadRequestError, "temperature"],
    [{ response_format: { type: "json_schema", json_schema: { name: "x", schema: { not: {} } } } },
      OpenAI.BadRequestError, "response_format"],
    [{ messages: [] }, OpenAI.BadRequestError, "messages"],
    [{ temprature: 1 }, OpenAI.BadRequestError, "temprature"],
    [{ model: "gpt-5" }, OpenAI.NotFoundError, "model"],
    [{ max_completion_tokens: 3, min_tokens: 9 }, OpenAI.BadRequestError, "min_tokens"],
  ];
  for (const [more, kind, param] of bad)
    for (const stream of [false, true])
      await assert.rejects(client.chat.completions.create(ask({ ...more, stream })), (error) => {
        assert.ok(error instanceof kind, `${JSON.stringify(more)}: ${error}`);
        assert.equal(error.param, param);
        assert.ok(error.requestID && error.message.length > 10);
        return true;
      });
  await client.chat.completions.create(ask({ max_completion_tokens: 1 })); // nothing of it hurt the server
});

test("fields of clients that change nothing are taken", async () => {
  await client.chat.completions.create(
    ask({
      max_completion_tokens: 1, user: "u", store: false, metadata: { a: "b" }, service_tier: "auto",
      prompt_cache_key: "k", safety_identifier: "s", reasoning_effort: "low", verbosity: "low", stream: false,
      modalities: ["text"], logit_bias: {}, frequency_penalty: 0, presence_penalty: 0, top_p: 1, stop: null,
    }),
  );
});
