// The chat: conversations, the answer under way, its comparison with plain decoding, settings.

import { answer, get } from "./answers.js";
import { byId, count, depthClass, make, plural, rate, Voice } from "./elements.js";
import { Meter } from "./meter.js";
import { showTree } from "./tree.js";
import { Written } from "./written.js";

const voice = new Voice();
const prompt = byId("prompt");
const settings = byId("settings-form");
let conversations = [{ messages: [] }];
let current = conversations[0];
let underWay = null; // the AbortController of what is asked for now
let usual = null; // the temperature where none is given, once the server has said it
const LEAST_COMPARED = 32; // tokens of an answer whose speed says something
const LEAST_LOOP = 100; // characters that repeat others

// Conversations and settings are kept until the tab is closed, where the browser allows it.
const kept = {
  read(name) {
    try { return JSON.parse(sessionStorage.getItem(name)); } catch { return null; }
  },
  write(name, value) {
    try { sessionStorage.setItem(name, JSON.stringify(value)); } catch { /* full, or forbidden */ }
  },
};

// ---- Settings

const key = () => settings.elements.key.value.trim();

function sampling() {
  const given = {};
  for (const name of ["temperature", "max_tokens", "top_p", "top_k", "seed"]) {
    const field = settings.elements[name];
    if (field.value !== "") given[name] = field.valueAsNumber;
  }
  const drafter = settings.elements.drafter.value;
  return drafter ? { ...given, medusa_kit: { drafter } } : given;
}

function settingsInError() {
  const wrong = Array.from(settings.elements).find((one) => !one.checkValidity());
  if (!wrong) return false;
  byId("settings").open = true;
  wrong.reportValidity();
  return true;
}

const saveSettings = () => kept.write("settings", Object.fromEntries(new FormData(settings)));

function restoreSettings() {
  for (const [name, value] of Object.entries(kept.read("settings") ?? {})) {
    if (settings.elements[name]) settings.elements[name].value = value;
  }
}

/** With what drafts for it; other servers do not say. */
function modelText({ id, medusa_kit: { kind, num_heads: count } = {} }) {
  return count ? `${id} (${kind}, ${count} ${count === 1 ? "head" : "heads"})` : id;
}

async function listModels() {
  const select = byId("model");
  try {
    const { data } = await get("v1/models", key());
    const chosen = select.value;
    usual = data[0]?.medusa_kit?.temperature ?? null;
    if (usual !== null) settings.elements.temperature.placeholder = usual === 0 ? "0: greedy" : `${usual}, the model’s`;
    select.replaceChildren(...data.map((one) => make("option", { value: one.id }, modelText(one))));
    if (data.some(({ id }) => id === chosen)) select.value = chosen;
    byId("messages").querySelector(".error.models")?.remove();
  } catch (error) {
    if (!select.length) showError(error, () => listModels(), "models");
  }
}

// ---- Messages

/** What is sent of a conversation, up to its message `end`. */
function messagesFor(conversation, system, end = conversation.messages.length) {
  const said = conversation.messages.slice(0, end).map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

/** The space before a word is not tinted: at the end of a line it would stick out. */
function tokenNodes([text, depth, by]) {
  const how = depth ? `accepted at depth ${depth}${by ? `, drafted by ${by}` : ""}` : "the model’s own";
  const space = /^ +(?=\S)/.exec(text)?.[0] ?? "";
  const word = make("span", { class: `token ${depthClass(depth)}`, title: how }, text.slice(space.length));
  return [document.createTextNode(space), word];
}

function messageElement(who) {
  const text = make("div", { class: "text" });
  const element = make("article", { class: `message ${who === "You" ? "user" : "answer"}` },
    make("h3", {}, who), text);
  byId("welcome").hidden = true;
  byId("messages").append(element);
  return { element, text };
}

function figuresText({ tokens, rate: speed, acceptance, wait, drafter }) {
  const parts = [
    speed === null ? null : `${rate(speed)} tokens/s`,
    acceptance === null ? null : `acceptance length ${acceptance.toFixed(2)}`,
    plural(tokens, "token"),
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

const ENDS = { length: "It was cut at the longest answer that the settings allow.", stopped: "You stopped it.", error: "It broke off." };

/** What stands below an answer that has ended. */
function closeAnswer(element, conversation, index) {
  const message = conversation.messages[index];
  const { figures, finish } = message;
  if (figures.tokens) {
    element.append(make("p", { class: "figures-line" }, figuresText(figures)));
    element.append(make("p", { class: "note" }, [depthsText(figures.depths), sourcesText(figures.drafter), ENDS[finish]].filter(Boolean).join(" ")));
  } else element.append(make("p", { class: "note" }, ENDS[finish] ?? "The answer is empty."));
  const compare = make("button", { type: "button" }, "Compare with plain");
  compare.addEventListener("click", () => compareWithPlain(element, compare, conversation, index));
  element.append(make("div", { class: "buttons" }, compare));
  if (message.comparison) showComparison(element, message.comparison);
}

function showError(error, again, kind = "") {
  const retry = make("button", { type: "button" }, "Try again");
  const box = make("div", { class: `error ${kind}`, role: "alert" }, make("p", {}, error.message), retry);
  retry.addEventListener("click", () => { box.remove(); prompt.focus(); again(); });
  byId("messages").append(box);
  box.scrollIntoView({ block: "nearest" });
  if (error.status === 401) {
    byId("settings").open = true;
    settings.elements.key.focus();
  }
}

function showConversation() {
  byId("messages").replaceChildren(byId("welcome"));
  byId("welcome").hidden = current.messages.length > 0;
  current.messages.forEach((message, index) => {
    const { element, text } = messageElement(message.role === "user" ? "You" : message.model);
    if (message.role === "user") text.textContent = message.content;
    else {
      const written = new Written(text, tokenNodes);
      written.add(message.spans);
      written.end();
      closeAnswer(element, current, index);
    }
  });
  byId("conversations").replaceChildren(...conversations.map((one, index) => {
    const first = one.messages[0]?.content ?? "(empty)";
    const title = first.length > 32 ? `${first.slice(0, 31)}…` : first;
    return make("option", { value: index }, title);
  }));
  byId("conversations").value = conversations.indexOf(current);
}

// ---- Asking

function setUnderWay(controller) {
  underWay = controller;
  byId("stop").hidden = controller === null;
  byId("send").disabled = controller !== null;
  for (const button of document.querySelectorAll(".buttons button")) button.disabled = controller !== null;
  for (const id of ["conversations", "new"]) byId(id).disabled = controller !== null;
}

function stop() {
  if (!underWay) return;
  underWay.abort();
  voice.say("Stopped.");
}

/** Run `work(signal)` as the one thing that is under way. */
async function exclusively(work) {
  const hadFocus = document.activeElement;
  setUnderWay(new AbortController());
  try {
    await work(underWay.signal);
  } finally {
    setUnderWay(null);
    // A button that is disabled or hidden loses the focus.
    if (document.activeElement === document.body) (hadFocus?.isConnected ? hadFocus : prompt).focus();
    if (document.activeElement === document.body) prompt.focus();
  }
}

const nearEnd = () => {
  const { scrollHeight, scrollTop, clientHeight } = byId("messages");
  return scrollHeight - scrollTop - clientHeight < 80;
};
const toEnd = () => { byId("messages").scrollTop = byId("messages").scrollHeight; };

async function askForAnswer() {
  const conversation = current, model = byId("model").value;
  const { element, text } = messageElement(model || "Answer");
  const written = new Written(text, tokenNodes);
  const live = make("p", { class: "figures-line live" }, "Prefilling the prompt …");
  element.append(live);
  element.setAttribute("aria-busy", "true");
  toEnd();
  const asked = { model, ...sampling() }, system = settings.elements.system.value.trim();
  const request = { ...asked, messages: messagesFor(conversation, system) };
  let result = null;
  await exclusively(async (signal) => {
    result = await answer(request, key(), signal, (spans, soFar) => {
      const follows = nearEnd();
      written.add(spans);
      if (spans.length) live.textContent = figuresText(soFar.figures);
      voice.add(spans.map(([one]) => one).join(""));
      if (soFar.tree) showTree(soFar.tree);
      if (follows) toEnd();
    });
  });
  written.end();
  voice.flush();
  live.remove();
  element.removeAttribute("aria-busy");
  if (!result.text && result.finish === "stopped") takeBack(conversation);
  else if (result.text || result.finish !== "error") {
    const { text: content, spans, figures, finish } = result;
    conversation.messages.push({ role: "assistant", content, spans, figures, finish, model, asked, system });
    closeAnswer(element, conversation, conversation.messages.length - 1);
    if (result.finish !== "stopped") voice.say(`End of the answer. ${figuresText(figures)}.`);
  } else element.remove();
  if (result.error) showError(result.error, () => againAfter(conversation));
  kept.write("conversations", conversations);
  toEnd();
}

/** A message that was stopped before its answer began can be changed. */
function takeBack(conversation) {
  const { content } = conversation.messages.pop();
  prompt.value ||= content;
  showConversation();
}

/** Ask once more for what failed; what came of it makes room. */
function againAfter(conversation) {
  if (conversation !== current || underWay) return;
  if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  showConversation();
  if (conversation.messages.length) askForAnswer();
}

function send() {
  const content = prompt.value.trim();
  if (!content || underWay || settingsInError()) return;
  byId("messages").querySelectorAll(".error").forEach((one) => one.remove());
  if (current.messages.at(-1)?.role === "user") current.messages.pop(); // it had no answer
  current.messages.push({ role: "user", content });
  prompt.value = "";
  showConversation();
  askForAnswer();
}

// ---- Comparing

/** Whether a request that names no temperature asks for a draw all the same. */
const narrows = ({ temperature, top_p, top_k }) => temperature === undefined && (top_p ?? top_k) !== undefined;

/** The same messages again, plainly. Only greedy answers that ended by themselves can be compared
 * as they are; for others both ways answer at temperature 0. */
async function compareWithPlain(element, button, conversation, index) {
  if (underWay) return;
  const message = conversation.messages[index];
  element.querySelectorAll(".comparison, .error").forEach((one) => one.remove());
  const busy = make("p", { class: "comparison note" }, "Answering again, plainly …");
  element.append(busy);
  voice.say("Answering again with plain decoding.");
  await exclusively(async (signal) => {
    const { asked, system, finish } = message;
    const request = { ...asked, messages: messagesFor(conversation, system, index), temperature: 0 };
    const drafts = asked.medusa_kit?.drafter !== "none";
    const asItIs = drafts && (asked.temperature ?? usual) === 0 && !narrows(asked) && ["stop", "length"].includes(finish);
    if (!drafts) delete request.medusa_kit;
    const drafted = asItIs
      ? { text: message.content, figures: message.figures }
      : await answer(request, key(), signal);
    const plain = drafted.error || signal.aborted ? drafted
      : await answer({ ...request, medusa_kit: { drafter: "none" } }, key(), signal);
    busy.remove();
    if (plain.error) element.append(make("p", { class: "comparison error", role: "alert" }, plain.error.message));
    if (plain.error || signal.aborted) return;
    message.comparison = {
      again: !asItIs, text: [drafted.text, plain.text],
      loop: endsInLoop(drafted.text),
      rates: [drafted, plain].map(({ figures }) => (figures.tokens < LEAST_COMPARED ? null : figures.rate)),
    };
    if (message.comparison.loop) message.comparison.rates = [null, null];
    voice.say(showComparison(element, message.comparison));
    kept.write("conversations", conversations);
  });
  busy.remove();
  button.focus();
}

/** Whether one span stands at the end three times or more. Any drafter copies it, so its speed says
 * nothing. */
function endsInLoop(text) {
  for (let period = 1; 3 * period <= text.length; period += 1) {
    let start = text.length;
    while (start > period && text[start - 1] === text[start - 1 - period]) start -= 1;
    if (text.length - start >= Math.max(2 * period, LEAST_LOOP)) return true;
  }
  return false;
}

function showComparison(element, { again, text, rates, loop }) {
  const [fast, slow] = rates;
  const words = [];
  if (fast && slow) words.push(`${(fast / slow).toFixed(2)} × the speed of plain decoding.`);
  if (text[0] === text[1]) words.push("The texts are identical.");
  else {
    const at = Array.from(text[0]).findIndex((letter, place) => letter !== Array.from(text[1])[place]);
    words.push(`The texts differ from character ${(at < 0 ? Array.from(text[0]).length : at) + 1} on.`);
    words.push("Where two tokens are equally likely but for rounding, either may come.");
  }
  if (loop) words.push("The answer ends in a loop, one span over and over, which any drafter copies: speeds are not compared.");
  if (again) words.push("Both ways answered again at temperature 0.");
  const box = make("div", { class: "comparison" });
  const most = Math.max(...rates.map((one) => one ?? 0));
  ["with drafting", "plain"].forEach((name, way) => {
    const bar = make("span", { class: way ? "bar" : "bar fast", "aria-hidden": "true" });
    bar.style.width = `${most ? (100 * (rates[way] ?? 0)) / most : 0}%`;
    const speed = rates[way] === null ? (loop ? "not timed" : "too short to time") : `${rate(rates[way])} tokens/s`;
    box.append(make("div", { class: "way" }, make("span", {}, name),
      make("span", { class: "track" }, bar), make("span", {}, speed)));
  });
  box.append(make("p", {}, words.join(" ")));
  element.append(box);
  return words.join(" ");
}

// ---- Keys and buttons

byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
settings.addEventListener("submit", (event) => event.preventDefault());
settings.addEventListener("change", saveSettings);
settings.addEventListener("reset", () => setTimeout(saveSettings));
settings.elements.key.addEventListener("change", () => { listModels(); meter.poll(); });
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
byId("stop").addEventListener("click", stop);
byId("tints").addEventListener("change", (event) => {
  document.body.classList.toggle("untinted", !event.target.checked);
});
byId("openings").addEventListener("click", ({ target }) => {
  if (target.tagName !== "BUTTON") return;
  prompt.value = target.textContent;
  prompt.focus();
  send();
});
byId("new").addEventListener("click", () => {
  if (current.messages.length) conversations.push(current = { messages: [] });
  showConversation();
  prompt.focus();
});
byId("conversations").addEventListener("change", (event) => {
  current = conversations[event.target.value];
  showConversation();
});

byId("api").textContent = new URL("v1", document.baseURI).href;
restoreSettings();
conversations = kept.read("conversations") ?? conversations;
current = conversations.at(-1);
showConversation();
listModels();
const meter = new Meter(key);
meter.poll();
