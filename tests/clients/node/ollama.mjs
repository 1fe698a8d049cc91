// Ollama's client: a text, a stream, a tool call and its result, a format, and the list of models.
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.BASE_URL });
const model = "tiny";
const messages = [{ role: "user", content: "How is Rome?" }];
const tools = [{ type: "function", function: { name: "weather", description: "The weather.", parameters: {
  type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const format = { type: "object", properties: { city: { type: "string" }, degrees: { type: "integer" } },
  required: ["city", "degrees"] };

const text = await client.chat({ model, messages, think: false });
let pieces = "";
for await (const part of await client.chat({ model, messages, stream: true, think: false })) {
  pieces += part.message.content;
}
const called = await client.chat({ model, messages, tools });
const call = called.message.tool_calls[0];
const report = await client.chat({
  model, tools, think: false,
  messages: [...messages, called.message, { role: "tool", tool_name: "weather", content: "18 degrees" }],
});
const typed = await client.chat({ model, messages, format, think: false });
const counted = await client.chat({
  model, think: false, messages: [{ role: "user", content: "Count these." + " word".repeat(15000) }] });
const listed = (await client.list()).models.length > 0;
console.log(JSON.stringify({ ollama: {
  text: text.message.content, pieces, thinking: called.message.thinking, call: call.function.arguments,
  report: report.message.content, object: JSON.parse(typed.message.content),
  long: counted.message.content, listed,
} }));
