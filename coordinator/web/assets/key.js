// The API key of this tab, or of this browser if the user keeps it.

import { byId } from "./dom.js";

const NAME = "mtp-api-key";

// The key, or an empty text.
export function storedKey() {
  return sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "";
}

export function authorization() {
  const key = storedKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Resolves when the user has entered a key. `lacksScope` says that the present one is valid for other requests.
export function askForKey(lacksScope) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  const problem = lacksScope ? "This key may not read the status: it needs the scope “metrics”." : "The coordinator refused this key.";
  byId("key-error").textContent = storedKey() ? problem : "";
  sessionStorage.removeItem(NAME);
  localStorage.removeItem(NAME);
  input.value = "";
  if (!dialog.open) dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    byId("key-form").addEventListener("submit", () => {
      const store = byId("key-keep").checked ? localStorage : sessionStorage;
      store.setItem(NAME, input.value.trim());
      resolve();
    }, { once: true });
  });
}
