// One streamed chat completion, with the times that the page measures.

import { authorization } from "./key.js";

const LEAST_MS = 200; // pieces that arrive together would show an absurd speed

// Calls `onChange(answer)` as text arrives. Resolves with the finished answer; rejects with an Error for people.
export async function streamAnswer(body, signal, onChange) {
  const answer = { content: "", reasoning: "", calls: [], usage: null, finish: null, started: performance.now(), first: null, last: null, later: 0, prompt: null, pieces: [] };
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization() },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, token_origins: true } }),
    signal,
  });
  if (!response.ok) throw new Error(await errorText(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let ended = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) ended = apply(answer, block) || ended;
    onChange(answer);
  }
  if (!ended) throw new Error("The answer ended early: the connection was lost.");
  return answer;
}

// Returns true at the end of the stream.
function apply(answer, block) {
  const progress = /^: prefill (\d+)\/(\d+)/.exec(block);
  if (progress) answer.prompt = [Number(progress[1]), Number(progress[2])];
  if (!block.startsWith("data: ")) return false;
  const data = block.slice("data: ".length);
  if (data === "[DONE]") return true;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) answer.usage = chunk.usage;
  for (const choice of chunk.choices) applyDelta(answer, choice);
  return false;
}

function applyDelta(answer, choice) {
  const { delta } = choice;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  const text = delta.content || delta.reasoning_content || delta.tool_calls;
  if (!text) return;
  answer.last = performance.now();
  if (answer.first === null) answer.first = answer.last;
  else answer.later += choice.token_origins?.length ?? 1; // tokens after the first piece
  if (delta.content) addPiece(answer.pieces, delta.content, choice.token_origins ?? "");
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const call of delta.tool_calls ?? []) {
    const known = (answer.calls[call.index] ??= { name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
}

// Adds text to the pieces [origin, text], and joins neighbours of one origin. A piece of several tokens counts as an
// accepted draft if all of them are.
function addPiece(pieces, text, letters) {
  const origin = letters && !letters.includes("s") ? "d" : "s";
  if (pieces.length && pieces.at(-1)[0] === origin && origin === "s" && !letters) pieces.at(-1)[1] += text;
  else pieces.push([origin, text]);
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The coordinator answered ${response.status}.`;
  }
}

// Tokens a second since the first piece of an answer that is still running; null for too short a time.
export function rateSoFar({ first, last, later }) {
  return first !== null && last - first >= LEAST_MS ? later / ((last - first) / 1000) : null;
}

// The figures shown under an answer.
export function figuresOf(answer) {
  const usage = answer.usage;
  const details = usage?.completion_tokens_details ?? {};
  const accepted = details.accepted_prediction_tokens ?? 0;
  const rejected = details.rejected_prediction_tokens ?? 0;
  const decode = answer.first === null ? 0 : (answer.last - answer.first) / 1000;
  return {
    firstToken: answer.first === null ? null : (answer.first - answer.started) / 1000,
    tokens: usage?.completion_tokens ?? null,
    prompt: usage?.prompt_tokens ?? null,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    rate: usage && usage.completion_tokens > 1 && decode > 0 ? (usage.completion_tokens - 1) / decode : usage ? null : rateSoFar(answer), // a stopped answer has no usage
    drafts: accepted + rejected ? [accepted, accepted + rejected] : null,
    finish: answer.finish,
  };
}
