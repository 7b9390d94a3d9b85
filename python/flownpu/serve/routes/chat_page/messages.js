// SPDX-License-Identifier: Apache-2.0
// Messages of a conversation as elements of the page.

import { button, copyButton, make } from "./elements.js";
import { codeBlock, elementsOf } from "./markdown.js";

export function speedText({ tokens, rate, first, used, context }) {
  const count = `${tokens} token${tokens === 1 ? "" : "s"}`;
  const speed = rate ? `, ${rate.toFixed(1)} tokens/s` : "";
  const wait = first ? `, first token after ${first.toFixed(2)} s` : "";
  return `${count}${speed}${wait}${used && context ? `, ${used} of the context's ${context} tokens` : ""}`;
}

/** The element of a message, which holds an answer or several, side by side. `actions(answer)` may have the functions
 *  `edit`, `regenerate`, `beside` and `take`. */
export function messageElement(message, actions = () => ({})) {
  const images = (message.images ?? []).map((image) => make("img", { src: image.url, alt: image.name }));
  const answers = [message, ...(message.others ?? [])].map((one) => answerElement(one, actions(one)));
  return make("li", { className: message.role }, ...images, ...answers);
}

function answerElement(message, actions) {
  const name = message.role === "user" ? "You" : message.model;
  const element = make("section", {}, make("h2", { textContent: name }), make("div", { className: "said" }));
  showParts(element, message);
  if (message.speed) element.append(make("p", { className: "speed", textContent: speedText(message.speed) }));
  if (message.error) element.append(make("p", { className: "error", textContent: message.error }));
  const buttons = [];
  if (message.text) buttons.push(copyButton(() => message.text));
  if (actions.edit) buttons.push(button("Edit", actions.edit));
  if (actions.regenerate) buttons.push(button("Regenerate", actions.regenerate));
  if (actions.beside) buttons.push(button("Another beside it", actions.beside));
  if (actions.take) buttons.push(button("Go on with this", actions.take));
  element.append(make("div", { className: "actions" }, ...buttons));
  return element;
}

/** Shows what a message says so far. What the reader folded out stays so. */
export function showParts(element, message) {
  const said = element.querySelector(".said");
  const open = said.querySelector(".thought")?.open ?? false;
  const parts = [];
  if (message.thought) {
    const title = make("summary", { textContent: message.text ? "Thoughts" : "Thinking…" });
    parts.push(make("details", { className: "thought", open }, title, make("div", { textContent: message.thought })));
  }
  const text = message.role === "user" ? [message.text] : elementsOf(message.text);
  if (message.text || !message.calls?.length) parts.push(make("div", { className: "text" }, ...text));
  for (const call of message.calls ?? []) {
    const title = make("summary", { textContent: `Calls ${call.name}` });
    parts.push(make("details", { className: "call", open: true }, title, codeBlock(call.arguments, "json")));
  }
  said.replaceChildren(...parts);
}
