// SPDX-License-Identifier: Apache-2.0
// Makes elements of the page.

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function button(text, onclick) {
  return make("button", { type: "button", textContent: text, onclick });
}

/** A button that copies a text, and says that it did. */
export function copyButton(text) {
  const copy = button("Copy", async () => {
    await write(text());
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });
  return copy;
}

async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // pages without TLS, but for this machine's own, have no clipboard
    const field = make("textarea", { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}
