// Anthropic's client: a text, a stream with thinking and a tool, a forced call, a long prompt, the tool's result, and a count of tokens.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const asked = { model: "tiny", max_tokens: 200, messages: [{ role: "user", content: "How is Rome?" }] };
const ask = (content, more) => client.messages.create({
  ...asked, messages: [{ role: "user", content }], ...more });
const long = "Count these." + " word".repeat(15000);
const tools = [{ name: "weather", description: "The weather.", input_schema: {
  type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];

const text = await client.messages.create(asked);
let pieces = "";
const stream = client.messages.stream({ ...asked, tools, thinking: { type: "enabled", budget_tokens: 1024 } });
stream.on("inputJson", (delta) => { pieces += delta; });
const message = await stream.finalMessage();
const call = message.content.find((block) => block.type === "tool_use");
const report = await client.messages.create({
  ...asked, tools,
  messages: [
    ...asked.messages,
    { role: "assistant", content: message.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "18 degrees" }] },
  ],
});
const count = await client.messages.countTokens({ model: "tiny", messages: asked.messages });
const forced = await ask("Say hello.", { tools, tool_choice: { type: "tool", name: "weather" } });
const counted = await ask(long);
let refused = "";
try {
  await ask(long, { max_tokens: 20_000 });
} catch (error) {
  refused = `${error.constructor.name} ${error.message.includes("exceed context limit")}`;
}
console.log(JSON.stringify({ anthropic: {
  text: text.content[0].text, thinking: message.content[0].thinking, call: call.input,
  streamed: JSON.parse(pieces), stop: message.stop_reason, report: report.content[0].text,
  forced: forced.content.find((block) => block.type === "tool_use").input,
  long: counted.content[0].text, counted: count.input_tokens > 0, refused,
} }));
