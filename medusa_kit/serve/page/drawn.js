// An answer that is drawn while it comes, once a frame. All answers whose speeds are compared are
// drawn in the same way: drawing takes time from a server on the same machine.

import { answer } from "./answers.js";
import { follow } from "./following.js";
import { lineText, tokenNodes } from "./messages.js";
import { showTree } from "./tree.js";
import { Written } from "./written.js";

/** Ask for an answer and write it into `text`, its figures into `live`. */
export async function drawn(request, key, signal, { text, live }, onSpans = () => {}) {
  const written = new Written(text, tokenNodes);
  let waiting = [], frame = null;
  const draw = (soFar) => {
    frame = null;
    written.add(waiting);
    waiting = [];
    live.textContent = lineText(soFar.figures);
    follow();
  };
  const result = await answer(request, key, signal, (spans, soFar) => {
    if (soFar.tree) showTree(soFar.tree);
    if (!spans.length) return;
    onSpans(spans);
    waiting.push(...spans);
    frame ??= requestAnimationFrame(() => draw(soFar));
  });
  cancelAnimationFrame(frame);
  written.add(waiting);
  written.end();
  return result;
}

/** What was answered before. */
export function written(text, spans) {
  const place = new Written(text, tokenNodes);
  place.add(spans);
  place.end();
}
