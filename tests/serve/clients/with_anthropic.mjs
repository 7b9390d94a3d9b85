// SPDX-License-Identifier: Apache-2.0
// The client of Anthropic for JavaScript: tools whose result goes back, JSON of a schema, streams.

import { Echo, Order, address, first, long, model, prompt, run, short } from "./scenario.mjs";
import Anthropic from "@anthropic-ai/sdk";
import { z } from "zod";

const client = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: prompt }], max_tokens: long };
const tools = [{ name: "order", description: "Orders something.", input_schema: z.toJSONSchema(Order) }];
const form = (schema) => ({ format: { type: "json_schema", schema: z.toJSONSchema(schema) } });

async function tool() {
  const answer = await client.messages.create({ ...asked, tools, tool_choice: { type: "tool", name: "order" } });
  const call = answer.content[0];
  const result = { type: "tool_result", tool_use_id: call.id, content: "Done." };
  const turns = [{ role: "assistant", content: answer.content }, { role: "user", content: [result] }];
  const messages = [...asked.messages, ...turns];
  const after = await client.messages.create({ ...asked, messages, tools, tool_choice: { type: "none" }, max_tokens: 8 });
  return { arguments: call.input, after: after.content[0].text };
}

async function tool_in_a_stream() {
  const answer = await client.messages.stream({ ...asked, tools, tool_choice: { type: "any" } }).finalMessage();
  return { arguments: answer.content[0].input };
}

async function structured() {
  const answer = await client.messages.create({ ...asked, output_config: form(Order) });
  return JSON.parse(answer.content[0].text);
}

async function stream() {
  let text = "";
  const said = client.messages.stream({ ...asked, max_tokens: short, top_k: 1 });
  said.on("text", (further) => (text += further));
  await said.finalMessage();
  return text;
}

async function leave() {
  return first(await client.messages.create({ ...asked, output_config: form(Echo), stream: true }));
}

await run({ tool, tool_in_a_stream, structured, stream, leave });
