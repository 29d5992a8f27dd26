// Messages: their elements, tokens, and what stands below an answer.

import { byId, count, depthClass, make, plural, rate } from "./elements.js";

/** The space before a word is not tinted: at the end of a line it would stick out. */
export function tokenNodes([text, depth, by]) {
  const space = /^ +(?=\S)/.exec(text)?.[0] ?? "";
  const attributes = { class: `token ${depthClass(depth)}`, title: howItCame(depth, by) };
  return [document.createTextNode(space), make("span", attributes, text.slice(space.length))];
}

function howItCame(depth, by) {
  return depth ? `accepted at depth ${depth}${by ? `, drafted by ${by}` : ""}` : "the model’s own";
}

export function messageElement(who) {
  const text = make("div", { class: "text", dir: "auto" });
  const kind = who === "You" ? "user" : "answer";
  const element = make("article", { class: `message ${kind}`, "aria-label": who }, make("h3", {}, who), text);
  byId("welcome").hidden = true;
  byId("messages").append(element);
  return { element, text };
}

/** The line below an answer. */
export function lineText({ tokens, seconds, depths }) {
  const drafted = depths.slice(1).reduce((sum, one) => sum + one, 0);
  const time = seconds ? ` in ${seconds.toFixed(1)} s` : "";
  return `${plural(tokens, "token")}${time}; ${drafted ? count(drafted) : "none"} of them drafted ahead`;
}

function figuresText({ rate: speed, acceptance, wait, drafter }) {
  const parts = [
    speed === null ? null : `${rate(speed)} tokens/s`,
    acceptance === null ? null : `acceptance length ${acceptance.toFixed(2)}`,
    wait === null ? null : `first after ${wait.toFixed(2)} s`,
    drafter?.split(" ")[0], // of its statistics
  ];
  return parts.filter(Boolean).join(" · ");
}

function depthsText(depths) {
  const deeper = depths.slice(1).map((n, index) => `${count(n)} at depth ${index + 1}`);
  return `The model’s own: ${count(depths[0] ?? 0)}. Accepted: ${deeper.join(", ") || "none"}.`;
}

/** What a drafter with several sources says of them. */
function sourcesText(drafter) {
  const told = /\((.*)\)$/.exec(drafter ?? "")?.[1];
  return told ? `Steps by source: ${told}.` : "";
}

function endText({ finish, figures }) {
  if (finish === "stopped") return "You stopped it.";
  if (finish === "error") return "It broke off.";
  if (finish !== "length") return "";
  return `It was cut at ${plural(figures.tokens, "token")}. “Longest answer” in the settings allows more.`;
}

/** What stands below an answer that has ended. */
export function closeAnswer(element, message, onCompare) {
  const { figures } = message, end = endText(message);
  if (figures.tokens) element.append(make("p", { class: "figures-line" }, `${lineText(figures)}.`));
  if (end || !figures.tokens) element.append(make("p", { class: "note end" }, end || "The answer is empty."));
  if (figures.tokens) {
    element.append(make("details", { class: "note" }, make("summary", {}, "Details"),
      make("p", {}, figuresText(figures)),
      make("p", {}, [depthsText(figures.depths), sourcesText(figures.drafter)].filter(Boolean).join(" "))));
  }
  const compare = make("button", { type: "button" }, "Compare with plain");
  compare.addEventListener("click", () => onCompare(compare));
  element.append(make("div", { class: "buttons" }, compare));
}
