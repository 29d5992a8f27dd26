// An answer as it is written: code between fences (``` or ~~~) stands in a block of its own; other
// lines get their marks when they end.

import { make } from "./elements.js";
import { mark, part } from "./marks.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/, LANGUAGE = /^[\w+#.{}-]{0,30}$/;

export class Written {
  /** `place`: the element to fill. `nodesOf`: the nodes of a span, [text, depth, by]. */
  constructor(place, nodesOf) {
    this.place = this.target = place;
    this.nodesOf = nodesOf;
    this.fence = ""; // that opened the block
    this.startLine();
  }

  /** Spans as they come. */
  add(spans) {
    for (const [text, depth, by] of spans) {
      for (const part of text.split(/(\n)/)) {
        if (part === "\n") this.endLine(depth, by);
        else if (part) this.put(part, depth, by);
      }
    }
  }

  /** No more comes: a last line may be a fence too. */
  end() {
    if (this.fence && this.isFence()) this.closeBlock();
    else if (!this.fence) mark(this.nodes);
  }

  put(text, depth, by) {
    const nodes = this.nodesOf([text, depth, by]);
    this.target.append(...nodes);
    this.nodes.push(...nodes);
    this.line += text;
  }

  startLine() {
    this.line = "";
    this.nodes = [];
  }

  endLine(depth, by) {
    if (!this.isFence()) {
      if (!this.fence) mark(this.nodes);
      this.put("\n", depth, by);
    } else if (this.fence) this.closeBlock();
    else this.openBlock(depth, by);
    this.startLine();
  }

  /** Whether the line opens a block, or closes the one that is open. */
  isFence() {
    const [, fence, info] = FENCE.exec(this.line) ?? [];
    if (!fence) return false;
    return !this.fence || (fence.startsWith(this.fence) && !info.trim());
  }

  /** What a language's name has no room for is text that was meant to be read. */
  openBlock(depth, by) {
    const [, fence, info] = FENCE.exec(this.line), language = info.trim();
    const named = LANGUAGE.test(language);
    if (named) this.dropLine();
    this.fence = fence;
    this.target = make("code");
    this.place.append(make("pre", { class: "code", tabindex: 0, role: "group",
      "aria-label": named && language ? `Code, ${language}` : "Code" }, this.target));
    if (named) return;
    this.target.append(...this.nodes);
    part(this.target, 0, this.line.indexOf(fence) + fence.length).deleteContents();
    this.put("\n", depth, by);
  }

  closeBlock() {
    this.dropLine();
    this.fence = "";
    this.target = this.place;
  }

  dropLine() {
    for (const node of this.nodes) node.remove();
  }
}
