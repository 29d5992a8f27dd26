// The conversations of this tab, and the one that is shown.
//
// A message: {role, content}. An answer has more: spans, figures, finish, model, asked (the request
// without its messages), system, comparison. `error`: {message, status} of what went wrong last.

import { kept } from "./kept.js";

let all = kept.read("conversations") ?? [];
if (!all.length) all = [{ messages: [] }];
let current = all[kept.read("current")] ?? all.at(-1);

export const conversations = {
  get current() { return current; },
  get index() { return all.indexOf(current); },
  get titles() { return all.map(titleOf); },
  choose(index) { current = all[index]; this.save(); },
  begin() {
    if (current.messages.length) all.push(current = { messages: [] });
    this.save();
  },
  remove() {
    all = all.filter((one) => one !== current);
    if (!all.length) all = [{ messages: [] }];
    current = all.at(-1);
    this.save();
  },
  save() {
    kept.write("conversations", all);
    kept.write("current", this.index);
  },
};

function titleOf({ messages }) {
  const letters = Array.from(messages[0]?.content ?? "(empty)");
  return letters.length > 32 ? `${letters.slice(0, 31).join("")}…` : letters.join("");
}

/** Whether the message at `index` is a question that a later one stands behind, without an answer. */
export const isPassedOver = (messages, index) => messages[index].role === "user" && messages[index + 1]?.role === "user";

/** What is sent of the messages before `end`. Templates refuse two questions in a row, so those
 * that had no answer stay behind. */
export function messagesFor({ messages }, system, end = messages.length) {
  const before = messages.slice(0, end);
  const said = before.filter((_, index) => !isPassedOver(before, index)).map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}
