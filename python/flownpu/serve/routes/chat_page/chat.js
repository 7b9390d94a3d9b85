// SPDX-License-Identifier: Apache-2.0
// The page: what is shown, and what buttons and keys do.

import { answer, models, mustLoad } from "./api.js";
import { make } from "./elements.js";
import { readImage } from "./images.js";
import { messageElement, showParts, speedText } from "./messages.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "seed", "max_tokens"];

let current = store.conversations[0] ?? store.begin();
let pictures = []; // of the next message
let running = null; // AbortController of the answer that is written
let edited = null; // the message that the next one replaces, with all that follows it
let contexts = {}; // tokens that each model's context holds

function showConversation() {
  $("log").replaceChildren(...current.messages.map((message) => messageElement(message, actionsOf)));
  $("log").scrollTop = $("log").scrollHeight;
  showList();
}

function actionsOf(message) {
  if (running) return {};
  if (message.role === "user") return { edit: () => edit(message) };
  const last = current.messages.at(-1);
  if (last.others?.includes(message)) return { take: () => take(message) };
  if (message !== last) return {};
  return last.others ? { beside } : { regenerate, beside };
}

/** Has the chosen model, which may be another, write one more answer, beside those that are there. */
async function beside() {
  const last = current.messages.at(-1);
  const asked = request(current, current.messages.slice(0, -1));
  const message = begun(asked.model);
  (last.others ??= []).push(message);
  await write(current, message, asked);
}

/** Makes one of the answers that stand side by side the one with which the conversation goes on. */
function take(message) {
  const last = current.messages.pop();
  const { others, ...first } = last;
  current.messages.push({ ...message, others: [first, ...others.filter((other) => other !== message)] });
  keep();
  showConversation();
}

function edit(message) {
  edited = message;
  pictures = [...(message.images ?? [])];
  $("prompt").value = message.text;
  showPictures();
  say("Sending replaces your message and what follows it; Escape keeps them.");
  $("prompt").focus();
}

function dropEdit() {
  edited = null;
  pictures = [];
  $("prompt").value = "";
  showPictures();
  say("");
}

async function regenerate() {
  current.messages.pop();
  await ask(current);
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
  if (edited) dropEdit();
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

function request(conversation, turns = conversation.messages) {
  const content = ({ text, images }) => images?.length
    ? [...images.map(({ url }) => ({ type: "image_url", image_url: { url } })), { type: "text", text }]
    : text;
  // A turn that failed, and what led to it, was not said.
  const said = turns.filter((message, index, all) => !message.error && !all[index + 1]?.error);
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
  if (edited) conversation.messages.splice(conversation.messages.indexOf(edited));
  edited = null;
  conversation.messages.push({ role: "user", text, images: pictures });
  conversation.title ||= text.slice(0, 60) || "Image";
  $("prompt").value = "";
  pictures = [];
  showPictures();
  await ask(conversation);
}

/** Has the model answer a conversation's last message. */
async function ask(conversation) {
  const asked = request(conversation);
  const message = begun(asked.model);
  conversation.messages.push(message);
  await write(conversation, message, asked);
}

function begun(model) {
  return { role: "assistant", text: "", thought: "", calls: [], model };
}

/** Fills a message, the last one of the log, with what a model answers. */
async function write(conversation, message, asked) {
  running = new AbortController();
  setRunning(true);
  showConversation();
  keep();
  const element = [...$("log").querySelectorAll("section")].at(-1);
  element.setAttribute("aria-busy", "true");
  let frame = 0;
  const show = () => {
    frame = 0;
    keepPlace(() => showParts(element, message));
  };
  try {
    if (await mustLoad(asked.model)) say(`Loading ${asked.model}…`);
    message.speed = await answer(asked, store.settings.key, running.signal, (part) => {
      message.text += part.content ?? "";
      message.thought += part.reasoning_content ?? "";
      message.calls.push(...(part.tool_calls ?? []).map((call) => call.function));
      frame ||= requestAnimationFrame(show);
    });
    message.speed.context = contexts[asked.model];
    say(running.signal.aborted ? "Stopped." : `Answered: ${speedText(message.speed)}.`);
  } catch (error) {
    message.error = error.message;
    say(`Error: ${error.message}`);
  }
  cancelAnimationFrame(frame);
  running = null;
  setRunning(false);
  if (conversation === current) keepPlace(showConversation);
  keep();
}

/** Changes the log; its end stays in sight if it was, else what was. */
function keepPlace(change) {
  const log = $("log"), place = log.scrollTop;
  const follows = log.scrollHeight - place - log.clientHeight < 40;
  change();
  log.scrollTop = follows ? log.scrollHeight : place;
}

function setRunning(is) {
  $("stop").hidden = !is;
  $("send").hidden = is;
  if (is) say("Answering…");
}

async function showModels() {
  try {
    const found = await models(store.settings.key);
    const names = found.map((model) => model.id);
    contexts = Object.fromEntries(found.map((model) => [model.id, model.context_length]));
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
$("export").onclick = () => {
  const href = URL.createObjectURL(new Blob([store.exported()], { type: "application/json" }));
  make("a", { href, download: "flownpu-conversations.json" }).click();
  URL.revokeObjectURL(href);
};
$("import").onclick = () => $("exported").click();
$("exported").onchange = async () => {
  try {
    const count = store.imported(await $("exported").files[0].text());
    keep();
    change(store.conversations[0]);
    say(`${count} conversation${count === 1 ? " is" : "s are"} imported.`);
  } catch {
    say("The file holds no conversations of this page.");
  }
  $("exported").value = "";
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
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  addFiles(event.dataTransfer.files);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (edited) dropEdit();
  else $("settings").open = false;
});

bindSettings();
showTheme();
showConversation();
showModels();
$("prompt").focus();
