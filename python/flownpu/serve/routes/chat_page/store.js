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

/** A conversation is {id, title, messages}; a message {role, text, images, speed, error}. */
export function begin() {
  const conversation = { id: crypto.randomUUID?.() ?? String(Date.now()), title: "", messages: [] };
  conversations.unshift(conversation);
  return conversation;
}

export function forget(conversation) {
  conversations = conversations.filter((other) => other !== conversation);
}
