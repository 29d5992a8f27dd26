// Small helpers for the document. Text is only ever set as text, never as HTML.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (those that are null are left out) and children. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** The class of tokens of this depth: deeper ones look alike from 4 on. */
export const depthClass = (depth) => `d${Math.min(depth ?? 0, 4)}`;

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const count = (value) => number.format(value);
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
export const rate = (value) => (value >= 100 ? count(Math.round(value)) : count(value));

/** A token as a person can see it: spaces and line ends as signs. */
export function visible(text) {
  return text.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");
}

export const prompt = byId("prompt");

/** Whether a finger is what points: the keyboard is then one on the screen, if it is shown. */
export const onTouch = () => matchMedia("(pointer: coarse)").matches;

/** One can type at once; on a phone the keyboard would cover what is read. */
export function focusPrompt() {
  if (!onTouch()) prompt.focus({ preventScroll: true });
}

/** Say a line beside the message box. */
export function tell(text) {
  byId("told").textContent = text;
}

// What a screen reader says: whole sentences, as they are completed, not each token.
const SPOKEN_AT_ONCE = 60; // characters
const SPOKEN_KEPT = 8; // paragraphs

class Voice {
  constructor() {
    this.place = byId("spoken");
    this.rest = "";
  }

  /** Say this now, after what has not been said yet. */
  say(text) {
    this.flush();
    this.utter(text);
  }

  /** A part of an answer. */
  add(text) {
    this.rest += text;
    const end = Math.max(...[". ", "! ", "? ", "\n", "。"].map((one) => this.rest.lastIndexOf(one)));
    if (end + 1 >= SPOKEN_AT_ONCE) {
      this.utter(this.rest.slice(0, end + 1));
      this.rest = this.rest.slice(end + 1);
    }
  }

  flush() {
    this.utter(this.rest);
    this.rest = "";
  }

  utter(text) {
    if (!text.trim()) return;
    this.place.append(make("p", {}, text.trim()));
    while (this.place.childElementCount > SPOKEN_KEPT) this.place.firstElementChild.remove();
  }
}

export const voice = new Voice();
