// The meter of the batch: asked for once a second while the page can be seen.

import { get } from "./answers.js";
import { byId, count, make, plural, rate } from "./elements.js";

const EVERY = 1000, AFTER_FAILURE = 5000; // milliseconds
const MOST_CELLS = 64;

export class Meter {
  constructor(key) {
    this.key = key;
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.poll());
  }

  async poll() {
    clearTimeout(this.timer);
    if (document.visibilityState !== "visible") return;
    let next = EVERY;
    try {
      this.show(await get("v1/batch", this.key()));
    } catch (error) {
      next = AFTER_FAILURE;
      document.querySelectorAll("#batch dd").forEach((one) => { one.textContent = "–"; });
      byId("rows").replaceChildren();
      byId("batch-note").textContent = `No figures now. ${error.message}`;
    }
    clearTimeout(this.timer); // it may have been asked for twice
    this.timer = setTimeout(() => this.poll(), next);
  }

  show(batch) {
    const told = {
      rows: `${count(batch.rows)} of ${count(batch.max_rows)}`,
      waiting: count(batch.waiting),
      nodes: batch.rows ? count(batch.nodes) : "–", // of a step that is past
      tokens_per_second: rate(batch.tokens_per_second ?? 0),
    };
    for (const [name, text] of Object.entries(told)) {
      const place = document.querySelector(`#batch [data-of="${name}"]`);
      if (place.textContent !== text) place.textContent = text;
    }
    byId("batch-note").textContent = batch.reading
      ? `${plural(batch.reading, "prompt")} ${batch.reading === 1 ? "is" : "are"} being prefilled.`
      : "";
    const cells = Math.min(batch.max_rows, MOST_CELLS);
    byId("rows").replaceChildren(
      ...Array.from({ length: cells }, (_, index) => make("span", { class: cell(index, batch) })),
    );
  }
}

function cell(index, { rows, reading = 0 }) {
  if (index < rows) return "cell running";
  return index < rows + reading ? "cell reading" : "cell";
}
