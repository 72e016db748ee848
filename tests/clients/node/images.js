// Vercel's AI SDK sends an image; prints the answer between bars.
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const provider = createOpenAICompatible({ name: "wicore", baseURL: `${process.env.BASE_URL}/v1`, apiKey: "none" });
const content = [{ type: "text", text: "use" }, { type: "image", image: readFileSync(process.env.PICTURE) }];
const { text } = await generateText({
  model: provider(process.env.MODEL), messages: [{ role: "user", content }], maxOutputTokens: 8, temperature: 0, maxRetries: 0,
});
console.log(`|${text}|`);
