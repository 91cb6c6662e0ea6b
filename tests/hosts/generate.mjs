// One greedy generation in node-llama-cpp.
//
// node generate.mjs '{"model", "prompt", "tokens", "gpuLayers", "contextSize", "threads", "top", "out"}'
//
// Writes {loadSeconds, tokens, seconds, text, steps} as JSON to `out`; llama.cpp's log goes to stderr.

import { writeFileSync } from "node:fs";
import { generate, generateWithLogprobs, openLlama, openModel } from "./host.mjs";

const task = JSON.parse(process.argv[2]);
const llama = await openLlama(task.threads);

const started = performance.now();
const opened = await openModel(llama, task);
const loadSeconds = (performance.now() - started) / 1000;

// Speed first; reading all probabilities back into JavaScript costs time of its own.
const run = await generate(opened, task.prompt, task.tokens);
const steps = await generateWithLogprobs(opened, task.prompt, task.tokens, task.top);

writeFileSync(task.out, JSON.stringify({loadSeconds, ...run, steps}));
// Everything is freed in order, as a well-behaved host does: the plugin sees its streams end.
await opened.context.dispose();
await opened.model.dispose();
await llama.dispose();
