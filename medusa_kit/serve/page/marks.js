// Marks of a line that has ended: a heading, an item, bold, code, a row of a table. The marks go,
// the tokens stay, whole or in parts.

import { make } from "./elements.js";

const LONGEST = 2000; // characters of a line that is looked through
const HEADING = /^#{1,6} +/, ITEM = /^ *[*+-](?= )/, ROW = /^ *\|/;
const INSIDE = /(`+)([^`]+)\1(?!`)|\*\*(?=\S)([^*]*[^*\s])\*\*/g;

/** `nodes`: those of the line, which stand beside one another. */
export function mark(nodes) {
  const text = nodes.map((one) => one.textContent).join("");
  if (!text.trim() || text.length > LONGEST) return;
  const line = make("span", {});
  nodes[0].before(line);
  line.append(...nodes);
  if (ROW.test(text)) return line.classList.add("row");
  for (const found of [...text.matchAll(INSIDE)].reverse()) enclose(line, found);
  const item = ITEM.exec(text), heading = HEADING.exec(text);
  if (item) {
    const sign = part(line, item[0].length - 1, item[0].length);
    sign.deleteContents();
    sign.insertNode(document.createTextNode("•"));
  } else if (heading) {
    part(line, 0, heading[0].length).deleteContents();
    line.classList.add("heading");
  }
}

function enclose(line, { 0: whole, 1: ticks, index }) {
  const sign = ticks?.length ?? 2, end = index + whole.length;
  part(line, end - sign, end).deleteContents();
  part(line, index, index + sign).deleteContents();
  const inner = part(line, index, end - 2 * sign), element = make(ticks ? "code" : "strong");
  element.append(inner.extractContents());
  inner.insertNode(element);
}

/** The range of these characters of a line. */
export function part(line, from, to) {
  const range = document.createRange(), texts = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
  let before = 0, started = false;
  while (texts.nextNode()) {
    const node = texts.currentNode, after = before + node.length;
    if (!started && from < after) {
      range.setStart(node, from - before);
      started = true;
    }
    if (to <= after) {
      range.setEnd(node, to - before);
      break;
    }
    before = after;
  }
  return range;
}
