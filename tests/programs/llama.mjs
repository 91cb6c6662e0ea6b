// Shared code of the node scripts: node-llama-cpp, loaded from the folder in which xtask has
// installed it, and greedy generation. ggml loads the plugin that the environment variable
// GGML_BACKEND_PATH names.

import { join } from "node:path";
import { pathToFileURL } from "node:url";

const installed = join(process.env.NODE_LLAMA_CPP, "node_modules/node-llama-cpp/dist/index.js");
const { getLlama } = await import(pathToFileURL(installed).href);

/** The library without GPU support of its own: all devices come from ggml backends. */
export async function openLlama(threads) {
    return await getLlama({
        gpu: false,
        build: "never",
        maxThreads: threads,
        logLevel: "debug",
        logger: (level, message) => process.stderr.write(`[${level}] ${message.trimEnd()}\n`)
    });
}

/** A model and one sequence in a context of `contextSize` tokens. */
export async function openModel(llama, {model: modelPath, gpuLayers, contextSize, threads}) {
    const model = await llama.loadModel({
        modelPath, gpuLayers,
        // The memory estimates of node-llama-cpp do not know the device.
        ignoreMemorySafetyChecks: true
    });
    const context = await model.createContext({
        contextSize, threads,
        batchSize: contextSize,
        ignoreMemorySafetyChecks: true
    });
    return {model, context, sequence: context.getSequence()};
}

/** Greedy tokens, and the seconds that each took. The first includes the prompt. */
export async function generate({model, sequence}, prompt, count) {
    await sequence.clearHistory();
    const tokens = [], seconds = [];
    let last = performance.now();
    for await (const token of sequence.evaluate(promptTokens(model, prompt), greedy)) {
        const now = performance.now();
        tokens.push(token);
        seconds.push((now - last) / 1000);
        last = now;
        if (tokens.length === count)
            break;
    }
    return {tokens, seconds, text: model.detokenize(tokens)};
}

/**
 * The same tokens once more, with the `top` largest log-probabilities of each step. Differences of
 * log-probabilities within one step are differences of logits.
 */
export async function generateWithLogprobs({model, sequence}, prompt, count, top) {
    await sequence.clearHistory();
    const steps = [];
    const input = promptTokens(model, prompt);
    for await (const {token, probabilities} of
        sequence.evaluateWithMetadata(input, {probabilities: true}, greedy)) {
        // The map is sorted, largest first.
        const candidates = [...probabilities.entries()].slice(0, top);
        steps.push({token, logprobs: candidates.map(([id, p]) => [id, Math.log(p)])});
        if (steps.length === count)
            break;
    }
    return steps;
}

// The end-of-text token of a model with random weights has no meaning, so generation continues.
const greedy = {temperature: 0, yieldEogToken: true};

function promptTokens(model, prompt) {
    return [model.tokens.bos, ...model.tokenize(prompt)];
}
