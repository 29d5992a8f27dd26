// An answer beside plain decoding: both speeds, and whether the texts are identical.

import { make, rate, voice } from "./elements.js";
import { drawn } from "./drawn.js";
import { settings } from "./settings.js";
import { exclusively, isBusy } from "./work.js";

const LEAST_COMPARED = 32; // tokens of an answer whose speed says something
const LEAST_LOOP = 100; // characters that repeat others

/** Whether a request that names no temperature asks for a draw all the same. */
const narrows = ({ temperature, top_p, top_k }) => temperature === undefined && (top_p ?? top_k) !== undefined;

/** Only greedy answers that ended by themselves, drafted for, can be compared as they are.
 * `usual`: the temperature where none is given; null where the server does not say. */
function canBeTaken({ asked, finish }, usual) {
  const drafts = asked.medusa_kit?.drafter !== "none";
  return drafts && (asked.temperature ?? usual) === 0 && !narrows(asked) && ["stop", "length"].includes(finish);
}

/** Answer `messages` again, plainly, and if need be with drafting too at temperature 0; both are
 * drawn below `element`. What came of it is kept in `message`. */
export async function compareWithPlain({ element, button, message, messages, usual, done }) {
  if (isBusy()) return;
  element.querySelectorAll(".comparison").forEach((one) => one.remove());
  const note = make("p", { class: "note" });
  const box = make("div", { class: "comparison" }, note);
  element.append(box);
  await exclusively(async (signal) => {
    const asItIs = canBeTaken(message, usual);
    const request = { ...message.asked, messages, temperature: 0 };
    if (request.medusa_kit?.drafter === "none") delete request.medusa_kit;
    const again = async (how, asked) => {
      note.textContent = `Answering again, ${how} …`;
      voice.say(note.textContent);
      return answerBelow(box, asked, signal);
    };
    const drafted = asItIs ? { text: message.content, figures: message.figures } : await again("with drafting", request);
    const plain = drafted.error || signal.aborted ? drafted
      : await again("plainly", { ...request, medusa_kit: { drafter: "none" } });
    if (plain.error) element.append(make("p", { class: "comparison error", role: "alert" }, plain.error.message));
    if (plain.error || signal.aborted) return;
    message.comparison = compared(drafted, plain, !asItIs);
    voice.say(showComparison(element, message.comparison));
    done();
  });
  box.remove();
  button.focus({ preventScroll: true });
  element.querySelector(".comparison")?.scrollIntoView({ block: "nearest" });
}

/** An answer that is drawn as the first one was, and taken away again. */
async function answerBelow(box, request, signal) {
  const text = make("div", { class: "text", dir: "auto" });
  const live = make("p", { class: "note" }, "Prefilling the prompt …");
  box.append(text, live);
  live.scrollIntoView({ block: "nearest" });
  const result = await drawn(request, settings.key, signal, { text, live });
  text.remove();
  live.remove();
  return result;
}

function compared(drafted, plain, again) {
  const loop = endsInLoop(drafted.text);
  const speeds = [drafted, plain].map(({ figures }) => (loop || figures.tokens < LEAST_COMPARED ? null : figures.rate));
  return { again, text: [drafted.text, plain.text], loop, rates: speeds };
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

function wordsFor({ again, text, rates: [fast, slow], loop }) {
  const words = [];
  if (fast && slow) words.push(`${(fast / slow).toFixed(2)} × the speed of plain decoding.`);
  if (text[0] === text[1]) words.push("The texts are identical.");
  else {
    const [letters, others] = text.map((one) => Array.from(one));
    const at = letters.findIndex((letter, place) => letter !== others[place]);
    words.push(`The texts differ from character ${(at < 0 ? letters.length : at) + 1} on.`);
    words.push("Where two tokens are equally likely but for rounding, either may come.");
  }
  if (loop) words.push("The answer ends in a loop, one span over and over, which any drafter copies: speeds are not compared.");
  if (again) words.push("Both ways answered again at temperature 0.");
  return words.join(" ");
}

export function showComparison(element, comparison) {
  const { rates, loop } = comparison, words = wordsFor(comparison);
  const box = make("div", { class: "comparison" });
  const most = Math.max(...rates.map((one) => one ?? 0));
  ["with drafting", "plain"].forEach((name, way) => {
    const bar = make("span", { class: way ? "bar" : "bar fast", "aria-hidden": "true" });
    bar.style.width = `${most ? (100 * (rates[way] ?? 0)) / most : 0}%`;
    const speed = rates[way] === null ? (loop ? "not timed" : "too short to time") : `${rate(rates[way])} tokens/s`;
    box.append(make("div", { class: "way" }, make("span", {}, name),
      make("span", { class: "track" }, bar), make("span", {}, speed)));
  });
  box.append(make("p", {}, words));
  element.append(box);
  return words;
}
