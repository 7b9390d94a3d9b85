// SPDX-License-Identifier: Apache-2.0
// Markdown as elements of the page. Texts become text nodes and never HTML; nothing is loaded, and links leave the page.

import hljs from "./highlight.js";
import { copyButton, make } from "./elements.js";
import { lexer } from "./marked.js";

const LONGEST = 50_000; // characters of a code block that are coloured: colouring takes time
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };
const SIMPLE = { strong: "strong", em: "em", del: "del", paragraph: "p", blockquote: "blockquote" };

/** The elements of a text in Markdown. */
export function elementsOf(text) {
  return lexer(text).flatMap(block);
}

const plain = (text) => text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (_, name) => ENTITIES[name]);
const all = (tokens) => (tokens ?? []).flatMap(block);

function block(token) {
  switch (token.type) {
    case "space": case "def": return [];
    case "heading": return [make(`h${Math.min(6, token.depth + 2)}`, {}, ...all(token.tokens))]; // h2 names the speaker
    case "code": return [codeBlock(token.text, token.lang ?? "")];
    case "hr": case "br": return [make(token.type)];
    case "list": return [list(token)];
    case "checkbox": return [token.checked ? "☑ " : "☐ "];
    case "table": return [table(token)];
    case "codespan": return [make("code", { textContent: token.text })];
    case "link": return [link(token.href, all(token.tokens))];
    case "image": return [link(token.href, [token.text || token.href])];
    case "html": return [token.raw];
    default: break;
  }
  if (token.type in SIMPLE) return [make(SIMPLE[token.type], {}, ...all(token.tokens))];
  return token.tokens ? all(token.tokens) : [plain(token.text ?? token.raw)];
}

function list(token) {
  const items = token.items.map((item) => make("li", {}, ...all(item.tokens)));
  const element = make(token.ordered ? "ol" : "ul", {}, ...items);
  if (token.ordered && token.start !== 1) element.start = token.start;
  return element;
}

function table(token) {
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, ...all(cell.tokens))));
  const body = make("tbody", {}, ...token.rows.map((cells) => row(cells, "td")));
  return make("div", { className: "table", tabIndex: 0 }, make("table", {}, make("thead", {}, row(token.header, "th")), body));
}

/** A link to the web or to mail; any other address, such as a script, stays a text. */
function link(href, children) {
  if (!/^(https?|mailto):/i.test(href)) return make("span", {}, ...children);
  return make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** A code block with its language and a button that copies it. */
export function codeBlock(text, language) {
  const name = language.split(/\s/)[0];
  const head = make("div", { className: "code-head" }, make("span", { textContent: name }), copyButton(() => text));
  const code = make("code", {}, ...coloured(text, name));
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, code));
}

function coloured(text, language) {
  if (!hljs.getLanguage(language) || text.length > LONGEST) return [text];
  const found = hljs.highlight(text, { language, ignoreIllegals: true });
  return found.errorRaised ? [text] : found._emitter.nodes(); // after an error, there is a part of the text only
}

/** Receives highlight.js' parts of a code; lowlight has such a class, too. */
class Emitter {
  #open = [document.createDocumentFragment()];

  addText(text) { this.#open.at(-1).append(text); }
  openNode(name) { this.#open.push(make("span", { className: `code-${name.split(".")[0]}` })); }
  closeNode() { const part = this.#open.pop(); this.#open.at(-1).append(part); }
  startScope(name) { this.openNode(name); }
  endScope() { this.closeNode(); }
  __addSublanguage(other) { this.#open.at(-1).append(...other.nodes()); }
  closeAllNodes() { while (this.#open.length > 1) this.closeNode(); }
  finalize() { this.closeAllNodes(); }
  toHTML() { return ""; }
  nodes() { return [...this.#open[0].childNodes]; }
}

hljs.configure({ __emitter: Emitter });
