// SPDX-License-Identifier: Apache-2.0
// The client of OpenAI for JavaScript: its helpers for zod's schemas, and streams.

import { Echo, Order, address, first, long, model, prompt, run, short } from "./scenario.mjs";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";

const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: prompt }], temperature: 0 };
const tools = [zodFunction({ name: "order", parameters: Order })];

async function tool() {
  const choice = { type: "function", function: { name: "order" } };
  const answer = await client.chat.completions.parse({ ...asked, tools, tool_choice: choice });
  const message = answer.choices[0].message;
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "Done." };
  const messages = [...asked.messages, message, result];
  const after = await client.chat.completions.create({ ...asked, messages, tools, max_tokens: 8 });
  return {
    arguments: message.tool_calls[0].function.parsed_arguments,
    after: after.choices[0].message.content,
  };
}

async function tool_in_a_stream() {
  const stream = client.chat.completions.stream({ ...asked, tools, tool_choice: "required" });
  const answer = await stream.finalChatCompletion();
  return { arguments: answer.choices[0].message.tool_calls[0].function.parsed_arguments };
}

async function structured() {
  const form = zodResponseFormat(Order, "order");
  return (await client.chat.completions.parse({ ...asked, response_format: form })).choices[0].message.parsed;
}

async function structured_response() {
  const text = { format: zodTextFormat(Order, "order") };
  return (await client.responses.parse({ model, input: prompt, temperature: 0, text })).output_parsed;
}

async function stream() {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, max_tokens: short, stream: true })) {
    text += chunk.choices[0].delta.content ?? "";
  }
  return text;
}

async function leave() {
  const form = zodResponseFormat(Echo, "echo");
  const answer = { ...asked, max_tokens: long, response_format: form, stream: true };
  return first(await client.chat.completions.create(answer));
}

await run({ tool, tool_in_a_stream, structured, structured_response, stream, leave });
