// One greedy generation in node-llama-cpp.
//
// node generate.mjs TASK
//
// TASK is a JSON object: {"model", "prompt", "tokens", "gpuLayers", "contextSize", "threads",
// "top", "out"}. Writes {loadSeconds, tokens, seconds, text, steps} as JSON to the file `out`.
// llama.cpp's log goes to stderr.

import { writeFileSync } from "node:fs";
import { generate, generateWithLogprobs, openLlama, openModel } from "./llama.mjs";

const task = JSON.parse(process.argv[2]);
const llama = await openLlama(task.threads);

const started = performance.now();
const opened = await openModel(llama, task);
const loadSeconds = (performance.now() - started) / 1000;

// The speed is measured first, because reading all probabilities into JavaScript takes time.
const run = await generate(opened, task.prompt, task.tokens);
const steps = await generateWithLogprobs(opened, task.prompt, task.tokens, task.top);

writeFileSync(task.out, JSON.stringify({loadSeconds, ...run, steps}));
// Everything is freed in order, so that the plugin frees its backends and writes its statistics.
await opened.context.dispose();
await opened.model.dispose();
await llama.dispose();
