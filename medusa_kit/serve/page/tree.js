// The last step's tree, drawn and as text.

import { byId, depthClass, make, makeSvg, plural, visible } from "./elements.js";

const WIDTH = 62, HEIGHT = 22, GAP_X = 18, GAP_Y = 7, MARGIN = 3, LETTERS = 8;
const EVERY = 500; // milliseconds

/** {nodes, rows, depth}: nodes with token, parent, depth, children, row (where it is drawn).
 * `texts`: of the tokens; without them their ids are shown. */
function laidOut({ parents, tokens, texts, accepted }) {
  const words = texts?.map(visible) ?? tokens.map((id) => `#${id}`);
  const kept = new Set([0, ...accepted]);
  const nodes = parents.map((parent, node) => ({
    node, parent, depth: 0, children: [], row: 0, accepted: kept.has(node),
    token: words[node],
  }));
  for (const one of nodes.slice(1)) {
    const parent = nodes[one.parent];
    one.depth = parent.depth + 1;
    parent.children.push(one);
  }
  let rows = 0;
  const place = (one) => {
    // The accepted path runs straight along the top.
    one.children.sort((a, b) => b.accepted - a.accepted || a.node - b.node);
    if (!one.children.length) one.row = rows++;
    else {
      one.children.forEach(place);
      one.row = one.accepted ? one.children[0].row : average(one.children.map(({ row }) => row));
    }
  };
  place(nodes[0]);
  return { nodes, rows, depth: Math.max(...nodes.map(({ depth }) => depth)) };
}

const average = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;
const x = (one) => MARGIN + one.depth * (WIDTH + GAP_X);
const y = (one) => MARGIN + one.row * (HEIGHT + GAP_Y);
const asSeen = new Intl.Segmenter(); // a joined emoji is one letter
const shortened = (text) => {
  const letters = Array.from(asSeen.segment(text), ({ segment }) => segment);
  return letters.length > LETTERS ? `${letters.slice(0, LETTERS - 1).join("")}…` : text;
};

function edge(one, parent) {
  const [fromX, fromY] = [x(parent) + WIDTH, y(parent) + HEIGHT / 2];
  const [toX, toY] = [x(one), y(one) + HEIGHT / 2];
  const middle = (fromX + toX) / 2;
  return makeSvg("path", {
    class: one.accepted ? "edge accepted" : "edge",
    d: `M${fromX} ${fromY}C${middle} ${fromY} ${middle} ${toY} ${toX} ${toY}`,
  });
}

function box(one) {
  const look = one.accepted ? `node accepted ${depthClass(one.depth)}` : "node";
  return makeSvg(
    "g",
    { class: look, transform: `translate(${x(one)} ${y(one)})` },
    makeSvg("title", {}, described(one)),
    makeSvg("rect", { width: WIDTH, height: HEIGHT, rx: 5 }),
    makeSvg("text", { x: WIDTH / 2, y: HEIGHT / 2 + 4 }, shortened(one.token)),
  );
}

function described(one) {
  if (!one.depth) return `“${one.token}”, the model’s own token`;
  return `“${one.token}”, ${one.accepted ? "accepted" : "not accepted"} at depth ${one.depth}`;
}

function asText(one) {
  const item = make("li", { class: one.accepted ? "accepted" : null }, described(one));
  if (one.children.length) item.append(make("ul", {}, ...one.children.map(asText)));
  return item;
}

function summary(nodes) {
  const drafted = nodes.length - 1;
  if (!drafted) return "The last step verified no draft token: the model’s own came alone.";
  const path = nodes.filter((one) => one.accepted && one.depth);
  const words = path.map(({ token }) => `“${token}”`).join(" ");
  const kept = path.length ? `${path.length} accepted: ${words}` : "none accepted";
  return `The last step verified ${plural(drafted, "draft token")}, ${kept}.`;
}

let waiting = null;
let timer = null;

/** Draw it, or the newest one a little later: steps come faster than anybody reads, and drawing
 * takes time from a server on the same machine. */
export function showTree(tree) {
  waiting = tree;
  if (timer === null) drawNext();
}

function drawNext() {
  timer = null;
  if (waiting === null) return;
  draw(waiting);
  waiting = null;
  timer = setTimeout(drawNext, EVERY);
}

function draw(tree) {
  const { nodes, rows, depth } = laidOut(tree);
  const width = 2 * MARGIN + depth * (WIDTH + GAP_X) + WIDTH;
  const height = 2 * MARGIN + rows * (HEIGHT + GAP_Y) - GAP_Y;
  const told = summary(nodes);
  const drawing = makeSvg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": told },
    ...nodes.slice(1).filter((one) => !one.accepted).map((one) => edge(one, nodes[one.parent])),
    ...nodes.slice(1).filter((one) => one.accepted).map((one) => edge(one, nodes[one.parent])),
    ...nodes.map(box),
  );
  byId("tree").replaceChildren(drawing);
  byId("tree-text").replaceChildren(asText(nodes[0]));
  byId("tree-note").textContent = told;
  byId("tree").hidden = byId("tree-details").hidden = false;
}
