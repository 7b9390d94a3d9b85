// SPDX-License-Identifier: Apache-2.0
// The conversations and settings that the browser keeps. They leave this machine only in requests to the server.

const CONVERSATIONS = "flownpu.conversations";
const SETTINGS = "flownpu.settings";

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // of another version, or changed by hand
  }
}

export const settings = read(SETTINGS, {});
export let conversations = read(CONVERSATIONS, []);

export function keepSettings() {
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
}

/** Keeps all conversations; false where the browser has no room for them. */
export function keepConversations() {
  try {
    localStorage.setItem(CONVERSATIONS, JSON.stringify(conversations));
    return true;
  } catch {
    return false;
  }
}

/** A conversation is {id, title, messages}; a message {role, text, thought, calls, images, model, speed, error, others}:
 *  others are answers that stand beside it. */
export function begin(title = "", messages = []) {
  const conversation = { id: crypto.randomUUID?.() ?? `${Date.now()} ${Math.random()}`, title, messages };
  conversations.unshift(conversation);
  return conversation;
}

/** All conversations as the text of a file. */
export function exported() {
  return JSON.stringify({ flownpu: 1, conversations }, null, 1);
}

/** Adds the conversations of a file's text; returns how many. Takes what messages have, and nothing else. */
export function imported(text) {
  const found = JSON.parse(text).conversations.map(({ title, messages }) => [String(title), messages.map(clean)]);
  for (const [title, messages] of found.reverse()) begin(title, messages);
  return found.length;
}

const PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]*$/;

function clean({ role, text, thought, calls, images, model, others }) {
  if (!["user", "assistant"].includes(role) || typeof text !== "string") throw new Error("a message is none");
  return {
    role, text, thought: String(thought ?? ""), model: String(model ?? ""),
    calls: (calls ?? []).map((call) => ({ name: String(call.name), arguments: String(call.arguments) })),
    images: (images ?? []).filter(({ url }) => PICTURE.test(url)).map(({ name, url }) => ({ name: String(name), url })),
    others: (others ?? []).map(clean),
  };
}

export function forget(conversation) {
  conversations = conversations.filter((other) => other !== conversation);
}
