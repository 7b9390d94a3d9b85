// SPDX-License-Identifier: Apache-2.0
// Pictures for a message, made as small as models look at them: the browser's store is small, too.

const LONGEST = 1024;

/** A file as {name, url}, its longer side 1024 pixels at most. */
export async function readImage(file) {
  const picture = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return { name: file.name || "image", url: canvas.toDataURL("image/jpeg", 0.9) };
}
