// SPDX-License-Identifier: Apache-2.0
// The AI SDK with its provider for servers of OpenAI's API: tools and objects of zod's schemas, and streams.

import { Echo, Order, address, first, long, model, prompt, run, short } from "./scenario.mjs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, streamText, tool as toolOf } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "flownpu",
  baseURL: `${address}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const asked = { model: provider(model), prompt, temperature: 0, maxRetries: 0 };
const tools = { order: toolOf({ description: "Orders something.", inputSchema: Order }) };

async function tool() {
  const answer = await generateText({ ...asked, tools, toolChoice: { type: "tool", toolName: "order" } });
  return { arguments: answer.toolCalls[0].input };
}

async function tool_in_a_stream() {
  const answer = streamText({ ...asked, tools, toolChoice: "required" });
  return { arguments: (await answer.toolCalls)[0].input };
}

async function structured() {
  return (await generateText({ ...asked, output: Output.object({ schema: Order }) })).output;
}

async function stream() {
  let text = "";
  for await (const piece of streamText({ ...asked, maxOutputTokens: short }).textStream) text += piece;
  return text;
}

async function leave() {
  const controller = new AbortController();
  const output = Output.object({ schema: Echo });
  const answer = streamText({ ...asked, maxOutputTokens: long, output, abortSignal: controller.signal });
  const pieces = await first(answer.partialOutputStream);
  controller.abort();
  return pieces;
}

await run({ tool, tool_in_a_stream, structured, stream, leave });
