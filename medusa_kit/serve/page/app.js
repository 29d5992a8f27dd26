// The chat: the conversation that is shown, the answer under way, keys and buttons.

import { get } from "./answers.js";
import { compareWithPlain, showComparison } from "./comparing.js";
import { conversations, isPassedOver, messagesFor } from "./conversations.js";
import { drawn, written } from "./drawn.js";
import { byId, focusPrompt, make, onTouch, prompt, tell, visible, voice } from "./elements.js";
import { follow, toEnd, toTop } from "./following.js";
import { kept } from "./kept.js";
import { closeAnswer, lineText, messageElement } from "./messages.js";
import { Meter } from "./meter.js";
import { sampling, settings, settingsInError, showUsual } from "./settings.js";
import { askForKey, removeErrors, showError } from "./troubles.js";
import { exclusively, isBusy, stop } from "./work.js";

let usual = null; // the temperature where none is given, once the server has said it
const TOO_MUCH = [400, 413]; // statuses that the same message gets again

// ---- Models

/** With what drafts for it; other servers do not say. */
function modelText({ id, medusa_kit: { kind, num_heads: count } = {} }) {
  return count ? `${id} (${kind}, ${count} ${count === 1 ? "head" : "heads"})` : id;
}

async function listModels() {
  const select = byId("model");
  try {
    const { data } = await get("v1/models", settings.key);
    const chosen = select.value;
    usual = data[0]?.medusa_kit?.temperature ?? null;
    if (usual !== null) showUsual(usual);
    select.replaceChildren(...data.map((one) => make("option", { value: one.id }, modelText(one))));
    if (data.some(({ id }) => id === chosen)) select.value = chosen;
    removeErrors("models");
    return true;
  } catch (error) {
    if (error.status === 401) askForKey(error);
    else if (!select.length) showError(error, { "Try again": listModels }, "models");
    return false;
  }
}

/** A key was entered: what waited for it goes on. */
settings.onKey = async () => {
  meter.poll();
  if (!await listModels() || !removeErrors("key")) return;
  if (conversations.current.messages.at(-1)?.error?.status === 401) askAgain();
  else focusPrompt();
};

// ---- The conversation

function showConversation() {
  const { messages } = conversations.current;
  byId("messages").replaceChildren(byId("welcome"));
  byId("welcome").hidden = messages.length > 0;
  messages.forEach((message, index) => {
    const { element, text } = messageElement(message.role === "user" ? "You" : message.model);
    if (message.role === "user") {
      text.textContent = message.content;
      if (isPassedOver(messages, index)) element.append(make("p", { class: "note" }, "This had no answer; the model is not told of it again."));
    } else {
      written(text, message.spans);
      closed(element, conversations.current, index);
    }
  });
  byId("conversations").replaceChildren(...conversations.titles.map((title, index) => make("option", { value: index }, title)));
  byId("conversations").value = conversations.index;
  if (messages.length) toEnd();
  else toTop();
}

function closed(element, conversation, index) {
  const message = conversation.messages[index];
  closeAnswer(element, message, (button) => compareWithPlain({
    element, button, message, usual,
    messages: messagesFor(conversation, message.system, index), done: () => conversations.save(),
  }));
  if (message.comparison) showComparison(element, message.comparison);
}

/** Say what is wrong with the end of the conversation, if anything is. */
function showTrouble() {
  const last = conversations.current.messages.at(-1);
  if (!last || (last.role === "assistant" && !last.error)) return;
  const error = last.error ?? { message: "This message has no answer." };
  if (error.status === 401) return askForKey(error);
  const ways = TOO_MUCH.includes(error.status) ? {} : { "Try again": askAgain };
  showError(error, last.role === "user" ? { ...ways, "Edit the message": takeBack } : ways);
}

/** The last message goes back into the box, before what stands there. */
function takeBack() {
  const { content } = conversations.current.messages.pop();
  setDraft([content, prompt.value].filter(Boolean).join("\n\n"));
  conversations.save();
  showConversation();
  prompt.focus();
}

function setDraft(text) {
  prompt.value = text;
  kept.write("draft", text);
}

// ---- Asking

function send() {
  const content = prompt.value.trim();
  if (isBusy()) tell("An answer is under way: stop it, or wait for its end.");
  else if (content && !settingsInError()) {
    conversations.current.messages.push({ role: "user", content });
    setDraft("");
    showConversation();
    askForAnswer();
  }
}

/** Ask once more for what failed. What came of it stays until more comes. */
function askAgain() {
  if (isBusy()) return;
  const answered = conversations.current.messages.at(-1)?.role === "assistant";
  askForAnswer(answered ? Array.from(byId("messages").querySelectorAll("article")).at(-1) : null);
}

/** `replaced`: the element of an answer that broke off, for which this one is given. */
async function askForAnswer(replaced = null) {
  const conversation = conversations.current, { messages } = conversation, model = byId("model").value;
  const asked = { model, ...sampling() }, { system } = settings;
  const end = messages.length - (replaced ? 1 : 0);
  const request = { ...asked, messages: messagesFor(conversation, system, end) };
  removeErrors();
  conversations.save();
  const place = beginAnswer(model);
  const makeRoom = () => { // for what is given instead
    replaced?.remove();
    messages.length = end;
    replaced = null;
  };
  let result = null;
  await exclusively(async (signal) => {
    result = await drawn(request, settings.key, signal, place, (spans) => {
      if (replaced) makeRoom();
      voice.add(spans.map(([one]) => one).join(""));
    });
  });
  endAnswer(place);
  const { text: content, spans, figures, finish } = result;
  const error = result.error && { message: result.error.message, status: result.error.status };
  if (content || !["stopped", "error"].includes(finish)) {
    makeRoom();
    messages.push({ role: "assistant", content, spans, figures, finish, model, asked, system, error });
    closed(place.element, conversation, messages.length - 1);
    if (finish !== "stopped") voice.say(`End of the answer. ${lineText(figures)}.`);
  } else {
    place.element.remove();
    if (error) messages.at(-1).error = error;
  }
  conversations.save();
  follow();
  if (!content && finish === "stopped" && !replaced) {
    takeBack();
    tell("Stopped before the answer began: the message is back in its box.");
  }
  else showTrouble();
  if (!error && !byId("model").length) listModels(); // the server has come back
}

function beginAnswer(model) {
  const { element, text } = messageElement(model || "Answer");
  const live = make("p", { class: "figures-line live" }, "Prefilling the prompt …");
  element.append(live);
  element.setAttribute("aria-busy", "true");
  toEnd();
  return { element, text, live };
}

function endAnswer({ element, live }) {
  voice.flush();
  live.remove();
  element.removeAttribute("aria-busy");
}

// ---- Keys and buttons

byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
prompt.addEventListener("keydown", (event) => {
  // A keyboard on the screen has no other key that begins a line.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || onTouch()) return;
  event.preventDefault();
  send();
});
prompt.addEventListener("input", () => setDraft(prompt.value));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
byId("stop").addEventListener("click", stop);
byId("tints").addEventListener("change", (event) => {
  document.body.classList.toggle("untinted", !event.target.checked);
});
byId("messages").addEventListener("click", ({ target }) => { // a finger has no pointer to rest
  if (target.matches(".token")) tell(`“${visible(target.textContent)}”: ${target.title}.`);
});
byId("openings").addEventListener("click", ({ target }) => {
  if (target.tagName !== "BUTTON") return;
  setDraft(target.textContent);
  focusPrompt();
  send();
});
byId("new").addEventListener("click", () => {
  conversations.begin();
  showConversation();
  prompt.focus();
});
byId("delete").addEventListener("click", () => {
  conversations.remove();
  showConversation();
  showTrouble();
  tell("The conversation is deleted.");
});
byId("conversations").addEventListener("change", (event) => {
  conversations.choose(event.target.value);
  showConversation();
  showTrouble();
});

byId("api").textContent = new URL("v1", document.baseURI).href;
setDraft(prompt.value || kept.read("draft") || "");
showConversation();
showTrouble();
listModels();
const meter = new Meter(() => settings.key);
meter.poll();
