// Asking the server: JSON, answers as streams of events, and what goes wrong, in words.

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function reached(path, options) {
  try {
    return await fetch(path, { ...options, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. It may have stopped, or the connection broke.");
  }
}

/** What a GET of `path` gives. */
export async function get(path, key) {
  const response = await reached(path, { headers: headers(key) });
  if (!response.ok) throw await refused(response, key);
  return response.json();
}

// What a status means, before what the server says of it; of others its words are enough.
const STATUS = {
  403: "The API key is not allowed to do this.",
  429: "The server is busy.",
  503: "The server is not ready.",
  504: "The answer took longer than the server allows.",
};

async function refused(response, key) {
  const { status } = response;
  if (status === 401) return new ServerError(key ? "The server does not accept this API key." : "The server asks for an API key.", status);
  const told = sentence(await toldBy(response));
  const words = [STATUS[status], told];
  const wait = Number(response.headers.get("Retry-After"));
  if (wait > 0) words.push(`Try again in ${wait} second${wait === 1 ? "" : "s"}.`);
  if (!told) words.push(`${STATUS[status] ? "" : "The server refused the request. "}(HTTP ${status})`);
  return new ServerError(words.filter(Boolean).join(" "), status);
}

async function toldBy(response) {
  try {
    const { error } = await response.json();
    return typeof error === "string" ? error : error.message;
  } catch { // no JSON: the status has to do
    return "";
  }
}

function sentence(text) {
  if (!text) return "";
  const begun = text[0].toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

/** The events of a streamed answer, parsed. Raises ServerError where it breaks off. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new ServerError("The answer broke off: the connection ended before it did.");
    rest += value;
    const lines = rest.split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // comments keep the connection open
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(sentence(event.error.message ?? String(event.error)));
      yield event;
    }
  }
}

const AT_ONCE = 5, SHORTEST = 20; // milliseconds

/** An answer as far as it has come. */
export class Answer {
  constructor() {
    this.text = "";
    this.spans = []; // [text, depth, by]
    this.finish = null; // stop | length | stopped (by the reader) | error
    this.usage = null;
    this.tree = null;
    this.sent = performance.now();
    this.first = this.last = null;
    this.early = 0; // tokens that came together with the first
  }

  /** Take a chunk in; the spans that it adds. */
  take(chunk) {
    const choice = chunk.choices?.[0];
    const told = chunk.medusa_kit ?? choice?.medusa_kit ?? {};
    if (chunk.usage) this.usage = chunk.usage;
    if (told.tree) this.tree = told.tree;
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    const content = choice?.delta?.content ?? "";
    if (!content) return [];
    this.last = performance.now();
    this.first ??= this.last;
    this.text += content;
    const spans = (told.spans ?? []).map(({ text, depth, by }) => [text, depth, by ?? null]);
    const whole = spans.map(([text]) => text).join("") === content;
    const added = whole ? spans : [[content, 0, null]]; // the text is what counts
    this.spans.push(...added);
    if (this.last - this.first < AT_ONCE) this.early = this.spans.length;
    return added;
  }

  /** How it went so far. Each step gives one token of the model's own, after the first. */
  get figures() {
    const own = this.spans.filter(([, depth]) => !depth).length;
    const tokens = this.usage?.completion_tokens ?? this.spans.length;
    const kit = this.usage?.medusa_kit ?? {};
    const timed = this.last - this.first; // without the reading of the prompt
    return {
      tokens,
      drafter: kit.drafter ?? null,
      cached: kit.cached_tokens ?? 0,
      wait: this.first === null ? null : (this.first - this.sent) / 1000,
      seconds: this.last === null ? null : (this.last - this.sent) / 1000,
      rate: timed >= SHORTEST ? ((tokens - this.early) / timed) * 1000 : null,
      acceptance: kit.acceptance_length ?? (own > 1 ? (this.spans.length - 1) / (own - 1) : null),
      depths: this.depths,
    };
  }

  /** How many tokens came at each depth; index 0: the model's own. */
  get depths() {
    const counts = [];
    for (const [, depth] of this.spans) counts[depth ?? 0] = (counts[depth ?? 0] ?? 0) + 1;
    return Array.from(counts, (one) => one ?? 0);
  }
}

/** Ask for an answer; `onSpans(spans, answer)` hears of each piece. What there is of it when it is
 * stopped or fails is returned too, in the latter case with `error`. */
export async function answer(request, key, signal, onSpans = () => {}) {
  const body = {
    ...request,
    stream: true,
    stream_options: { include_usage: true },
    medusa_kit: { spans: true, tree: true, ...request.medusa_kit },
  };
  const result = new Answer();
  try {
    const response = await reached("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers(key) },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw await refused(response, key);
    for await (const chunk of events(response)) onSpans(result.take(chunk), result);
  } catch (error) {
    if (signal.aborted) result.finish = "stopped";
    else {
      result.finish = "error";
      result.error = error instanceof ServerError ? error : new ServerError(`The page failed: ${error.message}`);
    }
  }
  return result;
}
