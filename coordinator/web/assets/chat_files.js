// Chats as files of the user. The browser writes them, and nothing is sent.

import { saveFile } from "./dom.js";

const NAME = 60; // characters of a file's name

export function saveMarkdown(conversation) {
  saveFile(`${fileName(conversation.title)}.md`, "text/markdown", markdownOf(conversation));
}

export function saveJson(conversation) {
  saveFile(`${fileName(conversation.title)}.json`, "application/json", JSON.stringify(conversation, null, 2));
}

export function saveAll(conversations) {
  saveFile("mtp-cluster-chats.json", "application/json", JSON.stringify(conversations, null, 2));
}

// A name that every file system takes.
export function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, NAME).replace(/^-+|-+$/g, "") || "chat";
}

export function markdownOf({ title, messages }) {
  return `# ${title.replace(/\s+/g, " ")}\n\n${messages.map(partOf).join("\n\n")}\n`;
}

function partOf({ role, content, images, reasoning, calls, error }) {
  const parts = role === "user" ? ["## Question"] : ["## Answer"];
  parts.push(...(images ?? []).map((url, i) => `![Image ${i + 1}](${url})`));
  if (reasoning) parts.push(reasoning.trim().replace(/^/gm, "> "));
  parts.push(content, ...(calls ?? []).map((call) => `\`\`\`json\n${JSON.stringify({ name: call.name, arguments: call.arguments })}\n\`\`\``));
  if (error) parts.push(`*${error}*`);
  return parts.filter(Boolean).join("\n\n");
}
