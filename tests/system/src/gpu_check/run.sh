#!/bin/sh
# Checks the GPU of this machine in less than ten minutes, with the files beside this script:
# compares the results of vgpu's engine, measures the speed of its kernels and the tokens per second
# of models with the shapes of published ones, and runs ggml's own tests through the plugin. If a
# part fails or exceeds its time limit, the others still run. The script ends with a table, and
# writes all results to summary.json. NVIDIA's driver is required. NVIDIA's compiler (libnvrtc) is
# required only for a GPU without machine code in vgpu.
#
#     ./run.sh [folder for results]
#
# vgpu writes each model with random weights before its use; the script removes it afterwards. The
# script also measures models/*.gguf. Environment variables:
#
#     GGML_CUDA          a libggml-cuda.so for the ggml in bin/, to measure the same models with
#                        [default: the one in cuda/, if it exists]
#     SECONDS_IN_ALL     the time for all parts [570]
#     SECONDS_OF_TESTS   the part of that time which models leave for ggml's tests [180]
#     VGPU_MODELS        the models [those below 30 GB of `vgpu gpu-check models`]
#     VGPU_SMALL         1: small models of the same kinds
#     VGPU_MODEL_FOLDER  the folder for models [/dev/shm if it has space, else the folder for
#                        results]
#     VGPU_ENGINE        the engine [cuda]
#     VGPU_CHECK_OPTIONS, VGPU_OPS_OPTIONS, VGPU_BENCH_OPTIONS
#                        options of the programs
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/out}
mkdir -p "$out"
rm -f "$out"/bench-*.json "$out/check.json" "$out/summary.json"
engine=${VGPU_ENGINE:-cuda}
# shellcheck source=parts.sh
. "$here/parts.sh"
if command -v nvidia-smi > /dev/null; then
    LINES_SHOWN=20 part nvidia-smi 20 nvidia-smi
fi

# Finds the fastest kernels. All following parts use them.
if [ "$engine" != cpu ]; then
    part tune 45 "$here/vgpu" gpu-check tune --engine "$engine"
fi
# shellcheck disable=SC2086 # several words
LINES_SHOWN=250 part check 130 "$here/vgpu" gpu-check --engine "$engine" --json "$out/check.json" \
    ${VGPU_CHECK_OPTIONS:---budget 60}
# The same comparisons with a token in one launch, which is off by default, and with weights that
# are not repacked.
if [ "$engine" != cpu ]; then
    part check-megakernel 60 env VGPU_MEGAKERNEL=on \
        "$here/vgpu" gpu-check --engine "$engine" --compare-only
    part check-plain 30 env VGPU_REPACK=off \
        "$here/vgpu" gpu-check --engine "$engine" --compare-only --tokens 0
fi
# Which kernels are faulty. All following parts do without them.
if [ "$engine" != cpu ]; then
    part self-check 75 "$here/vgpu" gpu-check self-check --engine "$engine"
fi

options="-ngl 99 -fa 1 -r 2 ${VGPU_BENCH_OPTIONS:--p 512,2048 -n 128}"

# bench NAME FILE: tokens per second, with vgpu and with ggml's own backend.
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
# The largest model takes too long; speed.sh measures it.
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
    # A sample, since the sanitizer slows every part down many times.
    part compute-sanitizer 60 compute-sanitizer --target-processes all --error-exitcode 9 \
        "$here/vgpu" gpu-check --engine "$engine" --compare-only --tokens 0 --silence 60
else
    echo "== compute-sanitizer is not on this machine"
fi
if start_executor VGPU_MEGAKERNEL=off; then
    # shellcheck disable=SC2086
    part test-llama-archs 60 $through LD_PRELOAD="$here/load_backends.so" \
        "$here/bin/test-llama-archs"
    # Gets the remaining time, so it is the last part. Excludes three cases whose weights take
    # minutes to make.
    threads=$(nproc 2> /dev/null || echo 2)
    cases='^(?!.*n_mats=128,n_used=4,b=0,m=4096)'
    # shellcheck disable=SC2086
    part test-backend-ops 600 $through "$here/bin/test-backend-ops" test -b VGPU0 -j "$threads" \
        -p "$cases" ${VGPU_OPS_OPTIONS:-}
    stop_executor
fi

echo "== table"
"$here/vgpu" gpu-check table "$out" || failed=1
exit "$failed"
