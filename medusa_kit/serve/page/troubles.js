// Boxes that say what went wrong, and what can be done.

import { byId, make } from "./elements.js";
import { settings } from "./settings.js";

/** `ways`: {what a button says: what it does}. A box of the same kind makes room. */
export function showError(error, ways, kind = "") {
  const box = emptyBox(kind, error.message);
  for (const [name, way] of Object.entries(ways)) {
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", () => { box.remove(); way(); });
    box.append(button, " ");
  }
  show(box);
}

function emptyBox(kind, message) {
  if (kind) removeErrors(kind);
  return make("div", { class: `error ${kind}`, role: "alert" }, make("p", {}, message));
}

function show(box) {
  byId("messages").append(box);
  box.scrollIntoView({ block: "nearest" });
}

export function removeErrors(kind = "") {
  const found = byId("messages").querySelectorAll(`:scope > .error${kind && `.${kind}`}`);
  found.forEach((one) => one.remove());
  return found.length > 0;
}

/** Ask for the key in a box of its own; it goes into the settings, where it is kept. */
export function askForKey(error) {
  const box = emptyBox("key", error.message);
  const field = make("input", { type: "password", autocomplete: "off", spellcheck: "false", "aria-label": "API key" });
  const form = make("form", {}, field, " ", make("button", { type: "submit" }, "Use this key"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    settings.key = field.value;
    settings.onKey();
  });
  box.append(form);
  show(box);
  field.focus({ preventScroll: true });
}
