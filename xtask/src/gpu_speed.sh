#!/bin/sh
# How fast models are on the GPU of this machine beside what they should be, from the files beside this script, in less than ten
# minutes: tokens a second as shares of what memory and tensor cores give, and beside ggml's own backend with the same files.
# Whatever fails or takes too long, there is a table in the end, and all of it in speed.json. Needs NVIDIA's driver.
#
#     ./speed.sh [folder for results]
#
# Models are written by vgpu one after the other, with random weights and the shapes of published ones, and removed after. The
# ways they run: launches (CUDA graphs), megakernel (VGPU_MEGAKERNEL=on), kernels for any GPU (VGPU_KERNELS=general), the executor in the
# process instead of behind the window, and ggml-cuda. GGML_CUDA: a libggml-cuda.so for the ggml in bin/; without it the one in
# cuda/; without either there is nothing to compare with, which the table says. SECONDS_IN_ALL: for everything (570). VGPU_MODELS: which models (all that
# `vgpu gpu-check models` says). VGPU_SMALL=1: small ones of the same kinds. VGPU_MODEL_FOLDER: where they are written
# (/dev/shm if it has room, else the folder for results). Also VGPU_ENGINE, VGPU_DECODE_OPTIONS, VGPU_BOTH_OPTIONS.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/speed}
mkdir -p "$out"
rm -f "$out"/bench-*.json "$out"/plan-*.json "$out/speed.json"
engine=${VGPU_ENGINE:-cuda}
# shellcheck source=gpu_check_parts.sh
. "$here/parts.sh"
small=${VGPU_SMALL:+--small}
decode="-ngl 99 -fa 1 -r 3 ${VGPU_DECODE_OPTIONS:--p 0 -n 128}"
both="-ngl 99 -fa 1 -r 3 ${VGPU_BOTH_OPTIONS:--p 2048 -ub 2048 -n 128}"

if command -v nvidia-smi > /dev/null; then
    LINES_SHOWN=20 part nvidia-smi 20 nvidia-smi
fi
[ -n "$peer" ] || echo "== there is no libggml-cuda.so: ggml's own backend is not measured"

# The engine without llama.cpp and without the window; it measures the ceilings, too.
# plan NAME VARIABLE=VALUE... -- OPTION...
plan() {
    name=$1
    shift
    settings=
    while [ "$1" != -- ]; do
        settings="$settings $1"
        shift
    done
    shift
    # shellcheck disable=SC2086 # words of their own
    part "plan-$name" 60 env $settings "$here/vgpu" bench plan --engine "$engine" --json "$out/plan-$name.json" "$@"
}
shapes=8b
[ -z "$small" ] || shapes=256m
plan "$shapes" VGPU_MEGAKERNEL=off -- --model "$shapes"
plan "$shapes-megakernel" VGPU_MEGAKERNEL=on -- --model "$shapes"
[ -n "$small" ] || plan "$shapes-prefill" VGPU_MEGAKERNEL=off -- --model "$shapes" --tokens 2048

# llama-bench's results of a way: bench WAY NAME COMMAND...
bench() {
    way=$1
    name=$2
    shift 2
    part "$way-$name" 90 sh -c '"$@" > "$0"' "$out/bench-$way-$name.json" "$@"
}
# on_executor WAY NAME OPTIONS VARIABLE=VALUE...: the model through the window.
on_executor() {
    way=$1
    name=$2
    asked=$3
    shift 3
    if start_executor "$@"; then
        # shellcheck disable=SC2086
        bench "$way" "$name" $through "$here/bin/llama-bench" -m "$model" -o json $asked
        stop_executor
    fi
}
# in_process WAY NAME VARIABLE=VALUE...: the executor inside the plugin.
in_process() {
    way=$1
    name=$2
    shift 2
    # shellcheck disable=SC2086
    bench "$way" "$name" env "$@" VGPU_ENGINE="$engine" $through VGPU_ENDPOINT=inproc "$here/bin/llama-bench" \
        -m "$model" -o json $decode
}

# Bytes free in a folder, in KiB.
free_in() {
    df -P -k "$1" 2> /dev/null | awk 'NR == 2 {print $4}'
}

"$here/vgpu" gpu-check models > "$out/models.txt"
for name in ${VGPU_MODELS:-$(awk '{print $1}' "$out/models.txt")}; do
    # The file, and something beside it.
    need=$(awk -v name="$name" '$1 == name {printf "%.0f", $2 * 1e6 + 2e6}' "$out/models.txt")
    [ -z "$small" ] || need=200000
    folder=
    for place in ${VGPU_MODEL_FOLDER:-/dev/shm "$out"}; do
        free=$(free_in "$place")
        if [ "${free:-0}" -ge "${need:-0}" ]; then
            folder=$place
            break
        fi
    done
    if [ -z "$folder" ]; then
        echo "== $name is left out: there is no room for its $need KiB"
        printf 'room-%s\t1\t0\n' "$name" >> "$out/parts.tsv"
        failed=1
        continue
    fi
    model=$folder/vgpu-$$-$name.gguf
    options=$decode
    [ "$name" != 8b-q4_k_m ] || options=$both
    # shellcheck disable=SC2086
    if part "write-$name" 120 "$here/vgpu" gpu-check model "$name" "$model" $small; then
        on_executor vgpu "$name" "$options" VGPU_MEGAKERNEL=off
        on_executor vgpu_megakernel "$name" "$decode" VGPU_MEGAKERNEL=on
        if [ "$name" = gpt-oss-20b-mxfp4 ]; then
            on_executor vgpu_plain "$name" "$decode" VGPU_MEGAKERNEL=off VGPU_REPACK=off
        fi
        if [ "$name" = 8b-q4_k_m ]; then
            on_executor vgpu_general "$name" "$options" VGPU_MEGAKERNEL=off VGPU_KERNELS=general
            in_process vgpu_inproc "$name" VGPU_MEGAKERNEL=off
            in_process vgpu_inproc_megakernel "$name" VGPU_MEGAKERNEL=on
        fi
        if [ -n "$peer" ]; then
            bench cuda "$name" $on_cuda "$here/bin/llama-bench" -m "$model" -o json $options
        fi
    fi
    rm -f "$model"
    model=
done

echo "== table"
# shellcheck disable=SC2086
"$here/vgpu" gpu-check targets "$out" $small || failed=1
exit "$failed"
