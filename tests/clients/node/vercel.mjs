// Vercel's `ai`: texts, streams, a tool loop and objects over three of its providers.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.env.BASE_URL;
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const models = {
  compatible: createOpenAICompatible({
    name: "cluster", baseURL: `${url}/v1`, supportsStructuredOutputs: true })("tiny"),
  chat: openai.chat("tiny"),
  responses: openai("tiny"),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("tiny"),
};
const weather = tool({
  description: "The weather.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `18 degrees in ${city}`,
});
const schema = z.object({ city: z.string(), degrees: z.number().int() });
const found = {};
for (const [name, model] of Object.entries(models)) {
  const prompt = "How is Rome?";
  const loop = streamText({ model, prompt, tools: { weather }, stopWhen: stepCountIs(3) });
  let inputs = "";
  for await (const part of loop.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "tool-input-delta") inputs += part.delta;
  }
  const forced = await generateText({
    model, prompt: "Say hello.", tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } });
  const long = await generateText({ model, prompt: "Count these." + " word".repeat(15000) });
  found[name] = {
    forced: forced.toolCalls[0].input,
    long: long.text,
    text: (await generateText({ model, prompt })).text,
    streamed: JSON.parse(inputs),
    report: await loop.text,
    object: (await generateText({ model, prompt, output: Output.object({ schema }) })).output,
  };
}
console.log(JSON.stringify(found));
