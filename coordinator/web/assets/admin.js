// Calls that need the scope admin. Errors are sentences for people.

import { authorization } from "./key.js";

const POLL_MS = 400;

// Serves another model, downloaded first if needed. Open answers end first; the page's stream ends and comes back with
// the new model. `onReport` gets the progress.
export async function loadModel(name, onReport) {
  let report = await callAdmin("POST", "/v1/models/load", { model: name });
  while (report.phase !== "ready" && report.phase !== "failed") {
    onReport(report);
    await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
    report = await callAdmin("GET", "/v1/models/load");
  }
  if (report.phase === "failed") throw new Error(sentence(report.error));
}

// The coordinator's texts begin with a small letter.
export function sentence(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

// Why this page may not make such calls, for people; an empty text if it may.
export async function whyNoAdmin() {
  try {
    await callAdmin("GET", "/v1/cluster/invitations");
    return "";
  } catch (error) {
    return error.message;
  }
}

export async function callAdmin(method, path, body) {
  let response;
  try {
    response = await fetch(path, { method, headers: { "Content-Type": "application/json", ...authorization() }, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Error("The coordinator does not answer.");
  }
  let content = null;
  try {
    content = await response.json();
  } catch {
    // An answer without JSON: the status says enough.
  }
  if (response.ok) return content;
  const message = content?.error?.message;
  if (message) throw new Error(sentence(message));
  throw new Error(response.status === 403 ? "This needs an API key with the scope admin." : `The coordinator answered ${response.status}.`);
}
