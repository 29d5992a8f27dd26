// The end of the messages stays on the screen while an answer comes, until the reader scrolls away.

import { byId } from "./elements.js";

const NEAR = 24; // pixels from the end
const pane = byId("messages");
let follows = false, before = 0;

const fromEnd = () => pane.scrollHeight - pane.scrollTop - pane.clientHeight;

/** Show the end, and stay there. */
export function toEnd() {
  follows = true;
  pane.scrollTop = pane.scrollHeight;
  before = pane.scrollTop;
}

/** Show the beginning, and stay there. */
export function toTop() {
  follows = false;
  pane.scrollTop = before = 0;
}

/** Show the end, unless the reader has scrolled away from it. */
export function follow() {
  if (follows) toEnd();
}

// Only a reader's scrolling leaves the end above `before`: toEnd never does, and a pane that grows
// or loses lines is moved by the browser to its end.
pane.addEventListener("scroll", () => {
  if (pane.scrollTop < before && fromEnd() > 1) follows = false;
  else if (pane.scrollTop > before && fromEnd() < NEAR) follows = true;
  before = pane.scrollTop;
});
// A keyboard on the screen or a turned phone leaves less room.
new ResizeObserver(follow).observe(pane);
