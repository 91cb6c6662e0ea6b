#!/bin/sh
# Measures the speed of models on the GPU of this machine in less than ten minutes, with the files
# beside this script: tokens per second, as shares of the limits of memory and tensor cores, and
# beside ggml's own backend with the same files. If a part fails or exceeds its time limit, the
# others still run. The script ends with a table, and writes all results to speed.json.
# NVIDIA's driver is required.
#
#     ./speed.sh [folder for results]
#
# vgpu writes each model with random weights and the shape of a published one before its use; the
# script removes it afterwards. Configurations: launches (CUDA graphs), megakernel
# (VGPU_MEGAKERNEL=on), kernels for any GPU (VGPU_KERNELS=general), the executor inside the program
# (VGPU_ENDPOINT=inproc), and ggml-cuda. Environment variables:
#
#     GGML_CUDA          a libggml-cuda.so for the ggml in bin/ [default: the one in cuda/; without
#                        either the table has no comparison]
#     SECONDS_IN_ALL     the time for all parts [570]
#     VGPU_MODELS        the models [all of `vgpu gpu-check models`]
#     VGPU_SMALL         1: small models of the same kinds
#     VGPU_MODEL_FOLDER  the folder for models [/dev/shm if it has space, else the folder for
#                        results]
#     VGPU_ENGINE        the engine [cuda]
#     VGPU_DECODE_OPTIONS, VGPU_BOTH_OPTIONS
#                        options of llama-bench
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/speed}
mkdir -p "$out"
rm -f "$out"/bench-*.json "$out"/plan-*.json "$out/speed.json"
engine=${VGPU_ENGINE:-cuda}
# shellcheck source=parts.sh
. "$here/parts.sh"
small=${VGPU_SMALL:+--small}
decode="-ngl 99 -fa 1 -r 3 ${VGPU_DECODE_OPTIONS:--p 0 -n 128}"
both="-ngl 99 -fa 1 -r 3 ${VGPU_BOTH_OPTIONS:--p 2048 -ub 2048 -n 128}"

if command -v nvidia-smi > /dev/null; then
    LINES_SHOWN=20 part nvidia-smi 20 nvidia-smi
fi
[ -n "$peer" ] || echo "== no libggml-cuda.so: ggml's own backend is not measured"

# The engine without llama.cpp and without a link. Also measures the limits of the device.
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
    # shellcheck disable=SC2086 # several words
    part "plan-$name" 60 env $settings \
        "$here/vgpu" bench plan --engine "$engine" --json "$out/plan-$name.json" "$@"
}
shapes=8b
[ -z "$small" ] || shapes=256m
plan "$shapes" VGPU_MEGAKERNEL=off -- --model "$shapes"
plan "$shapes-megakernel" VGPU_MEGAKERNEL=on -- --model "$shapes"
[ -n "$small" ] || plan "$shapes-prefill" VGPU_MEGAKERNEL=off -- --model "$shapes" --tokens 2048

# bench WAY NAME COMMAND...: llama-bench's results of a configuration.
bench() {
    way=$1
    name=$2
    shift 2
    part "$way-$name" 90 sh -c '"$@" > "$0"' "$out/bench-$way-$name.json" "$@"
}
# on_executor WAY NAME OPTIONS VARIABLE=VALUE...: the model on an executor.
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
    bench "$way" "$name" env "$@" VGPU_ENGINE="$engine" $through VGPU_ENDPOINT=inproc \
        "$here/bin/llama-bench" -m "$model" -o json $decode
}

# Bytes free in a folder, in KiB.
free_in() {
    df -P -k "$1" 2> /dev/null | awk 'NR == 2 {print $4}'
}

"$here/vgpu" gpu-check models > "$out/models.txt"
for name in ${VGPU_MODELS:-$(awk '{print $1}' "$out/models.txt")}; do
    # KiB for the file and some reserve.
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
        echo "== $name is skipped: no folder has $need KiB free"
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
