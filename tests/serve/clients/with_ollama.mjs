// SPDX-License-Identifier: Apache-2.0
// The client of Ollama for JavaScript: a schema as format, tools, and streams.

import { Echo, Order, address, first, long, model, prompt, run, short } from "./scenario.mjs";
import { Ollama } from "ollama";
import { z } from "zod";

const client = new Ollama({ host: address });
const messages = [{ role: "user", content: prompt }];
const options = (tokens) => ({ temperature: 0, num_predict: tokens });

// Ollama's API cannot say that a call must be made.
async function offered() {
  const order = { name: "order", description: "Orders something.", parameters: z.toJSONSchema(Order) };
  const tools = [{ type: "function", function: order }];
  return (await client.chat({ model, messages, tools, options: options(short) })).message.content;
}

async function structured() {
  const answer = await client.chat({ model, messages, format: z.toJSONSchema(Order), options: options(long) });
  return Order.parse(JSON.parse(answer.message.content));
}

async function stream() {
  let text = "";
  for await (const part of await client.chat({ model, messages, options: options(short), stream: true })) {
    text += part.message.content;
  }
  return text;
}

async function leave() {
  const format = z.toJSONSchema(Echo);
  const parts = await client.chat({ model, messages, format, options: options(long), stream: true });
  const pieces = await first(parts);
  parts.abort();
  return pieces;
}

await run({ offered, structured, stream, leave });
