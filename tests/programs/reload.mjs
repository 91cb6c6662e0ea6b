// A program that goes on after it has lost its executor: generates, fails, loads the model again.
//
// node reload.mjs TASK
//
// TASK is a JSON object: {"model", "prompt", "tokens", "gpuLayers", "contextSize", "threads"}.
// Prints one JSON object per line: {"event": "generated", "tokens", "devices"}; then {"event":
// "generating"} during a generation without end; then {"event": "failed", "error"} when that
// generation fails; and, after a line on stdin, "generated" for the same text from a newly loaded
// model.

import { createInterface } from "node:readline/promises";
import { generate, openLlama, openModel } from "./llama.mjs";

const task = JSON.parse(process.argv[2]);
const say = (event, more = {}) => process.stdout.write(JSON.stringify({event, ...more}) + "\n");

const llama = await openLlama(task.threads);
const devices = await llama.getGpuDeviceNames();

const first = await openModel(llama, task);
say("generated", {tokens: (await generate(first, task.prompt, task.tokens)).tokens, devices});

try {
    let count = 0;
    for await (const token of first.sequence.evaluate(first.model.tokenize(task.prompt),
        {temperature: 0, yieldEogToken: true}))
        if (++count === 4)
            say("generating");
    throw new Error("the generation ended by itself");
} catch (error) {
    say("failed", {error: String(error)});
}

// What the first load has left is freed as after any error, without an executor.
await first.context.dispose();
await first.model.dispose();

const stdin = createInterface({input: process.stdin});
await stdin[Symbol.asyncIterator]().next();
stdin.close();

const second = await openModel(llama, task);
say("generated", {tokens: (await generate(second, task.prompt, task.tokens)).tokens, devices});
await second.context.dispose();
await second.model.dispose();
await llama.dispose();
