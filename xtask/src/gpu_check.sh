#!/bin/sh
# Looks at the GPU of this machine, from the files beside this script, in less than ten minutes: what vgpu's engine gives and
# how fast it is, tokens a second of models with the shapes of published ones, and ggml's own tests through the plugin.
# Whatever fails or takes too long, there is a table in the end, and all of it in summary.json. Needs NVIDIA's driver, and its
# compiler (libnvrtc) only for a GPU that vgpu has no machine code for.
#
#     ./run.sh [folder for results]
#
# Models are written by vgpu when they are needed, with random weights, and removed after; those in models/*.gguf are measured,
# too. GGML_CUDA: a libggml-cuda.so for the ggml in bin/, with which the same models run, too; without it the one in cuda/, if
# it is there. SECONDS_IN_ALL: for everything (570); SECONDS_OF_TESTS: how many of those models leave for tests (180). VGPU_MODELS:
# which models (those below 30 GB that `vgpu gpu-check models` says); VGPU_SMALL=1: small ones of the same kinds.
# VGPU_MODEL_FOLDER: where they are written (/dev/shm, if it has room, or the folder for results). Also VGPU_ENGINE,
# VGPU_CHECK_OPTIONS (--budget 60), VGPU_OPS_OPTIONS, VGPU_BENCH_OPTIONS.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/out}
mkdir -p "$out"
rm -f "$out"/bench-*.json "$out/check.json" "$out/summary.json"
engine=${VGPU_ENGINE:-cuda}
# shellcheck source=gpu_check_parts.sh
. "$here/parts.sh"
if command -v nvidia-smi > /dev/null; then
    LINES_SHOWN=20 part nvidia-smi 20 nvidia-smi
fi

# Which kernels are the fastest, for all that comes now.
if [ "$engine" != cpu ]; then
    part tune 45 "$here/vgpu" gpu-check tune --engine "$engine"
fi
# shellcheck disable=SC2086 # words of their own
LINES_SHOWN=250 part check 130 "$here/vgpu" gpu-check --engine "$engine" --json "$out/check.json" \
    ${VGPU_CHECK_OPTIONS:---budget 60}
# The same comparisons where a token is one launch, which is off by itself, and with weights as guests write them.
if [ "$engine" != cpu ]; then
    part check-megakernel 60 env VGPU_MEGAKERNEL=on "$here/vgpu" gpu-check --engine "$engine" --compare-only
    part check-plain 30 env VGPU_REPACK=off "$here/vgpu" gpu-check --engine "$engine" --compare-only --tokens 0
fi

options="-ngl 99 -fa 1 -r 2 ${VGPU_BENCH_OPTIONS:--p 512,2048 -n 128}"

# bench NAME FILE: tokens a second, here and on ggml's own backend.
# shellcheck disable=SC2086
bench() {
    if start_executor VGPU_MEGAKERNEL=off; then
        part "bench-$1" 60 sh -c '"$@" > "$0"' "$out/bench-vgpu-$1.json" \
            $through "$here/bin/llama-bench" -m "$2" -o json $options
        stop_executor
    fi
    if [ "$engine" != cpu ] && start_executor VGPU_MEGAKERNEL=on; then
        part "bench-megakernel-$1" 60 sh -c '"$@" > "$0"' "$out/bench-vgpu-$1-megakernel.json" \
            $through "$here/bin/llama-bench" -m "$2" -o json -ngl 99 -fa 1 -r 2 -p 0 -n 128
        stop_executor
    fi
    if [ -n "$peer" ]; then
        part "bench-cuda-$1" 90 sh -c '"$@" > "$0"' "$out/bench-cuda-$1.json" \
            $on_cuda "$here/bin/llama-bench" -m "$2" -o json $options
    fi
}

kept=${SECONDS_OF_TESTS:-180}
for file in "$here"/models/*.gguf; do
    if [ -f "$file" ]; then
        bench "$(basename "$file" .gguf)" "$file"
    fi
done
folder=${VGPU_MODEL_FOLDER:-}
if [ -z "$folder" ]; then
    free=$(df -P -k /dev/shm 2> /dev/null | awk 'NR == 2 {print $4}')
    folder=$out
    [ "${free:-0}" -lt 22000000 ] || folder=/dev/shm
fi
small=${VGPU_SMALL:+--small}
# The largest takes too long here: speed.sh has it.
for name in ${VGPU_MODELS:-$("$here/vgpu" gpu-check models | awk '$2 < 30 {print $1}')}; do
    model=$folder/vgpu-$$-$name.gguf
    # shellcheck disable=SC2086
    if part "write-$name" 60 "$here/vgpu" gpu-check model "$name" "$model" $small; then
        bench "$name" "$model"
    fi
    rm -f "$model"
    model=
done

kept=0
if command -v compute-sanitizer > /dev/null; then
    # A sample: everything takes many times as long there.
    part compute-sanitizer 60 compute-sanitizer --error-exitcode 9 \
        "$here/vgpu" gpu-check --engine "$engine" --compare-only --tokens 2
else
    echo "== compute-sanitizer is not on this machine"
fi
if start_executor VGPU_MEGAKERNEL=off; then
    # shellcheck disable=SC2086
    part test-llama-archs 60 $through LD_PRELOAD="$here/load_backends.so" "$here/bin/test-llama-archs"
    # The rest of the time: what comes first matters most. Three cases whose weights take minutes to make are left out.
    threads=$(nproc 2> /dev/null || echo 2)
    cases='^(?!.*n_mats=128,n_used=4,b=0,m=4096)'
    # shellcheck disable=SC2086
    part test-backend-ops 600 $through "$here/bin/test-backend-ops" test -b VGPU0 -j "$threads" -p "$cases" \
        ${VGPU_OPS_OPTIONS:-}
    stop_executor
fi

echo "== table"
"$here/vgpu" gpu-check table "$out" || failed=1
exit "$failed"
