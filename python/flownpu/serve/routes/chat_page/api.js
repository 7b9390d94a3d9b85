// SPDX-License-Identifier: Apache-2.0
// The server's API, as any client of OpenAI's would use it.

const SHORTEST = 500; // milliseconds of an answer that give a speed: the browser hands on tokens by the dozen

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function complain(response) {
  const text = await response.text();
  try {
    return new Error(JSON.parse(text).error.message);
  } catch {
    return new Error(`${response.status} ${response.statusText}`);
  }
}

/** The models as {id, context_length}. */
export async function models(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  if (!response.ok) throw await complain(response);
  return (await response.json()).data;
}

/** Whether a model has yet to be loaded; loading takes seconds. */
export async function mustLoad(model) {
  const response = await fetch("health");
  return response.ok && (await response.json()).models[model] === false;
}

/** Streams an answer: calls `add` with each further part; returns what was measured, also when it is stopped.
 *  A part is {content, reasoning_content, tool_calls}, of which one or more are there. */
export async function answer(request, key, signal, add) {
  const begun = performance.now();
  let first = 0, last = 0, pieces = 0, tokens = 0, used = 0;
  const body = { ...request, stream: true, stream_options: { include_usage: true } };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
    });
    if (!response.ok) throw await complain(response);
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const part = chunk.choices[0]?.delta ?? {};
      if (chunk.choices.length) last = performance.now();
      if (part.content || part.reasoning_content || part.tool_calls) {
        first ||= last;
        pieces += 1;
        add(part);
      }
      tokens = chunk.usage?.completion_tokens ?? tokens;
      used = chunk.usage?.total_tokens ?? used;
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  tokens ||= pieces; // it was stopped, before the server counted
  return {
    tokens,
    used,
    first: first ? (first - begun) / 1000 : 0,
    rate: last - first > SHORTEST ? ((tokens - 1) * 1000) / (last - first) : 0,
  };
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
