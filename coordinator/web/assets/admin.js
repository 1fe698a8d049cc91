// Calls that need the scope admin. Errors are sentences for people.

import { authorization } from "./key.js";

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
  if (message) throw new Error(message);
  throw new Error(response.status === 403 ? "This needs an API key with the scope admin." : `The coordinator answered ${response.status}.`);
}
