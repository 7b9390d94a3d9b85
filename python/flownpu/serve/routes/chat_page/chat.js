// SPDX-License-Identifier: Apache-2.0
// The page: what is shown, and what buttons and keys do.

import { answer, models } from "./api.js";
import { readImage } from "./images.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "seed", "max_tokens"];

let current = store.conversations[0] ?? store.begin();
let pictures = []; // of the next message
let running = null; // AbortController of the answer that is written

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A text with its code blocks set apart. What a model writes is never read as HTML. */
function showText(element, text) {
  const parts = text.split(/^```.*$\n?/m);
  element.replaceChildren(...parts.map(
    (part, index) => (index % 2 ? make("pre", {}, make("code", { textContent: part })) : part)));
}

function speedText({ tokens, rate, first }) {
  const count = `${tokens} token${tokens === 1 ? "" : "s"}`;
  return rate ? `${count}, ${rate.toFixed(1)} tokens/s, first token after ${first.toFixed(2)} s` : count;
}

function messageElement(message) {
  const text = make("div", { className: "text" });
  showText(text, message.text);
  const images = (message.images ?? []).map((image) => make("img", { src: image.url, alt: image.name }));
  const name = message.role === "user" ? "You" : message.model;
  const element = make("li", { className: message.role }, make("h2", { textContent: name }), ...images, text);
  if (message.speed) element.append(make("p", { className: "speed", textContent: speedText(message.speed) }));
  if (message.error) element.append(make("p", { className: "error", textContent: message.error }));
  return element;
}

function showConversation() {
  $("log").replaceChildren(...current.messages.map(messageElement));
  $("log").scrollTop = $("log").scrollHeight;
  showList();
}

function showList() {
  $("conversations").replaceChildren(...store.conversations.map((conversation) => {
    const title = conversation.title || "New conversation";
    const open = make("button", { type: "button", textContent: title, title, onclick: () => change(conversation) });
    open.setAttribute("aria-current", conversation === current);
    const remove = make("button", { type: "button", textContent: "×", onclick: () => forget(conversation) });
    remove.setAttribute("aria-label", `Delete ${title}`);
    return make("li", {}, open, remove);
  }));
}

function change(conversation) {
  running?.abort();
  current = conversation;
  showConversation();
  $("prompt").focus();
}

function forget(conversation) {
  store.forget(conversation);
  keep();
  change(conversation === current ? store.conversations[0] ?? store.begin() : current);
}

function keep() {
  if (!store.keepConversations()) say("The browser has no room left: delete a conversation, or this one is not kept.");
}

function say(text) {
  $("state").textContent = text;
}

function showPictures() {
  $("images").replaceChildren(...pictures.map((picture) => {
    const remove = make("button", { type: "button", textContent: "Remove" });
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    remove.onclick = () => {
      pictures = pictures.filter((other) => other !== picture);
      showPictures();
    };
    return make("li", {}, make("img", { src: picture.url, alt: picture.name }), remove);
  }));
}

async function addFiles(files) {
  for (const file of files) {
    try {
      pictures.push(await readImage(file));
    } catch {
      say(`${file.name} is not an image that this browser can read.`);
    }
  }
  showPictures();
}

function request(conversation) {
  const content = ({ text, images }) => images?.length
    ? [...images.map(({ url }) => ({ type: "image_url", image_url: { url } })), { type: "text", text }]
    : text;
  // A turn that failed, and what led to it, was not said.
  const said = conversation.messages.filter((message, index, all) => !message.error && !all[index + 1]?.error);
  const messages = said.map((message) => ({ role: message.role, content: content(message) }));
  if (store.settings.system) messages.unshift({ role: "system", content: store.settings.system });
  const numbers = NUMBERS.filter((name) => store.settings[name] !== undefined && store.settings[name] !== "");
  const sampling = Object.fromEntries(numbers.map((name) => [name, Number(store.settings[name])]));
  return { model: $("model").value, messages, ...sampling };
}

async function send() {
  const text = $("prompt").value.trim();
  if (running || (!text && !pictures.length)) return;
  const conversation = current;
  conversation.messages.push({ role: "user", text, images: pictures });
  conversation.title ||= text.slice(0, 60) || "Image";
  $("prompt").value = "";
  pictures = [];
  showPictures();
  const asked = request(conversation);
  const message = { role: "assistant", text: "", model: asked.model };
  conversation.messages.push(message);
  showConversation();
  keep();
  await write(conversation, message, asked);
}

async function write(conversation, message, asked) {
  const element = $("log").lastElementChild;
  element.setAttribute("aria-busy", "true");
  running = new AbortController();
  setRunning(true);
  try {
    message.speed = await answer(asked, store.settings.key, running.signal, (text) => {
      const log = $("log");
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      message.text += text;
      showText(element.querySelector(".text"), message.text);
      if (follows) log.scrollTop = log.scrollHeight;
    });
    say(running.signal.aborted ? "Stopped." : `Answered: ${speedText(message.speed)}.`);
  } catch (error) {
    message.error = error.message;
    say(`Error: ${error.message}`);
  }
  running = null;
  setRunning(false);
  if (element.isConnected) element.replaceWith(messageElement(message));
  keep();
}

function setRunning(is) {
  $("stop").hidden = !is;
  $("send").hidden = is;
  if (is) say("Answering…");
}

async function showModels() {
  try {
    const names = await models(store.settings.key);
    $("model").replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
    if (names.includes(store.settings.model)) $("model").value = store.settings.model;
  } catch (error) {
    say(`Error: ${error.message}`);
    $("settings").open = true;
  }
}

function bindSettings() {
  for (const name of [...NUMBERS, "system", "theme", "key", "model"]) {
    const field = $(name);
    if (store.settings[name] !== undefined) field.value = store.settings[name];
    field.addEventListener("change", () => {
      if (!field.checkValidity()) return field.reportValidity();
      store.settings[name] = field.value;
      store.keepSettings();
      showTheme();
      if (name === "key") showModels();
    });
  }
}

function showTheme() {
  document.documentElement.dataset.theme = store.settings.theme ?? "";
}

$("new").onclick = () => change(current.messages.length ? store.begin() : current);
$("stop").onclick = () => running?.abort();
$("attach").onclick = () => $("file").click();
$("file").onchange = async () => {
  await addFiles($("file").files);
  $("file").value = "";
};
$("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
$("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
};
$("prompt").onpaste = (event) => {
  if (event.clipboardData.files.length) addFiles(event.clipboardData.files);
};
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else $("settings").open = false;
});

bindSettings();
showTheme();
showConversation();
showModels();
$("prompt").focus();
