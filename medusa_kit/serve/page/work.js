// The one thing that is under way: an answer, or a comparison.

import { byId, focusPrompt, tell } from "./elements.js";

let controller = null; // an AbortController

export const isBusy = () => controller !== null;

function setUnderWay(next) {
  controller = next;
  byId("stop").hidden = !next;
  byId("send").disabled = next !== null;
  for (const button of document.querySelectorAll(".buttons button")) button.disabled = next !== null;
  for (const id of ["conversations", "new", "delete"]) byId(id).disabled = next !== null;
}

export function stop() {
  if (!controller || controller.signal.aborted) return;
  controller.abort();
  tell("Stopped.");
}

/** Run `work(signal)`; whatever else would ask the server waits until it has ended. */
export async function exclusively(work) {
  const hadFocus = document.activeElement;
  tell("");
  setUnderWay(new AbortController());
  try {
    await work(controller.signal);
  } finally {
    setUnderWay(null);
    // A button that is disabled or hidden loses the focus.
    if (document.activeElement === document.body && hadFocus?.isConnected) hadFocus.focus({ preventScroll: true });
    if (document.activeElement === document.body) focusPrompt();
  }
}
