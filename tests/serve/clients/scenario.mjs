// SPDX-License-Identifier: Apache-2.0
// The tasks of each client of npm, as scenario.py is for those of Python.

import { z } from "zod";

export const address = process.argv[2];
export const model = "topics";
export const prompt = "Tell me about loops.";
export const short = 24;
export const long = 900;
const leftAfter = 3;

const Address = z.object({ city: z.enum(["Ulm", "Köln"]), number: z.int().min(1).max(99) }).meta({ id: "Address" });
const Person = z.object({ name: z.enum(["Ada", "Grace"]), home: Address });
const Item = z.object({
  name: z.enum(["bread", "salt"]),
  amount: z.int().min(1).max(9),
  sent_to: Address.nullable(),
});
// "Address" is used twice: zod writes it once, and refers to it.
export const Order = z.object({ customer: Person, items: z.array(Item).min(1).max(2) });

export const Echo = z.object({ words: z.array(z.literal("loop")).min(150).max(200) });

export async function first(stream) {
  let pieces = 0;
  for await (const _ of stream) {
    pieces += 1;
    if (pieces === leftAfter) break;
  }
  return pieces;
}

export async function run(scenarios) {
  const results = {};
  for (const [name, play] of Object.entries(scenarios)) {
    try {
      results[name] = await play();
    } catch (error) {
      results[name] = { error: String(error) };
    }
  }
  console.log(JSON.stringify(results));
}
