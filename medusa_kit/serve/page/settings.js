// The form of settings, and what requests take from it.

import { byId } from "./elements.js";
import { kept } from "./kept.js";

const form = byId("settings-form");
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "seed"];

export const settings = {
  /** Called with what was entered as the key. */
  onKey: () => {},
  get key() { return form.elements.key.value.trim(); },
  set key(value) { form.elements.key.value = value; save(); },
  get system() { return form.elements.system.value.trim(); },
};

/** What a request says of how to decode; the server decides what is left empty. */
export function sampling() {
  const given = {};
  for (const name of NUMBERS) {
    const field = form.elements[name];
    if (field.value !== "") given[name] = field.valueAsNumber;
  }
  const drafter = form.elements.drafter.value;
  return drafter ? { ...given, medusa_kit: { drafter } } : given;
}

/** Whether a value cannot be sent; the browser then says why, beside its field. */
export function settingsInError() {
  const wrong = Array.from(form.elements).find((one) => !one.checkValidity());
  if (!wrong) return false;
  byId("settings").open = true;
  wrong.reportValidity();
  return true;
}

/** Say in the form which temperature holds where none is given. */
export function showUsual(temperature) {
  form.elements.temperature.placeholder = temperature === 0 ? "0: greedy" : `${temperature}, the model’s`;
}

const save = () => kept.write("settings", Object.fromEntries(new FormData(form)));

for (const [name, value] of Object.entries(kept.read("settings") ?? {})) {
  if (form.elements[name]) form.elements[name].value = value;
}
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", save);
form.addEventListener("reset", () => setTimeout(save));
form.elements.key.addEventListener("change", () => settings.onKey());
