// OpenAI's client: texts, streams, tool helpers and parsed formats over chat completions and responses.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.BASE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = "tiny";
const messages = [{ role: "user", content: "How is Rome?" }];
const Weather = z.object({ city: z.string(), degrees: z.number().int() });
const Place = z.object({ city: z.string() });

const long = [{ role: "user", content: "Count these." + " word".repeat(15000) }];
const hello = [{ role: "user", content: "Say hello." }];
const text = await client.chat.completions.create({ model, messages });
let pieces = "";
const stream = await client.chat.completions.create({
  model, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) pieces += chunk.choices[0]?.delta?.content ?? "";

const weather = { name: "weather", strict: true, parameters: {
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false } };
const runner = client.chat.completions.runTools({
  model, messages, stream: true,
  tools: [zodFunction({ name: "weather", parameters: Place, function: ({ city }) => `18 degrees in ${city}` })],
});
const report = await runner.finalContent();
const parsed = await client.chat.completions.parse({
  model, messages, response_format: zodResponseFormat(Weather, "weather"),
});
const answer = await client.responses.parse({
  model, input: messages, text: { format: zodTextFormat(Weather, "weather") },
});
const said = await client.responses.create({ model, input: messages });
let spoken = "";
for await (const event of await client.responses.create({ model, input: messages, stream: true })) {
  if (event.type === "response.output_text.delta") spoken += event.delta;
}
const events = client.responses.stream({
  model, input: "How is Rome?",
  tools: [{ type: "function", ...weather }],
});
let streamed = "";
for await (const event of events) {
  if (event.type === "response.function_call_arguments.delta") streamed += event.delta;
}
const final = await events.finalResponse();
const callOf = (response) => response.output.find((item) => item.type === "function_call");
const forced = await client.chat.completions.create({
  model, messages: hello, tools: [{ type: "function", function: weather }],
  tool_choice: { type: "function", function: { name: "weather" } },
});
const forcedItem = callOf(await client.responses.create({
  model, input: hello, tools: [{ type: "function", ...weather }], tool_choice: "required" }));
const counted = await client.chat.completions.create({ model, messages: long });
const countedItems = await client.responses.create({ model, input: long });
let refused = "";
try {
  await client.chat.completions.create({ model, messages, temperature: -1 });
} catch (error) {
  refused = `${error.constructor.name} ${error.param}`;
}
console.log(JSON.stringify({
  chat: {
    text: text.choices[0].message.content, pieces, report, object: parsed.choices[0].message.parsed,
    forced: JSON.parse(forced.choices[0].message.tool_calls[0].function.arguments),
    long: counted.choices[0].message.content, refused,
  },
  responses: {
    text: said.output_text, pieces: spoken, call: JSON.parse(callOf(final).arguments),
    streamed: JSON.parse(streamed), object: answer.output_parsed,
    forced: JSON.parse(forcedItem.arguments), long: countedItems.output_text,
  },
}));
