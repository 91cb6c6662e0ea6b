#!/bin/sh
# Looks at the GPU of this machine, from the files beside this script: what vgpu's engine gives and how fast it is, ggml's
# own tests through the plugin, and tokens a second. Needs NVIDIA's driver, and its compiler (libnvrtc) only for a GPU that
# vgpu has no machine code for.
#
#     ./run.sh [folder for results]
#
# Models are the files models/*.gguf; put larger ones there. If GGML_CUDA names a build of libggml-cuda.so for the ggml in
# bin/, the same models run on it, too.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/out}
mkdir -p "$out"
failed=0

part() {
    name=$1
    shift
    echo "== $name"
    "$@" > "$out/$name.txt" 2>&1
    status=$?
    tail -n "${LINES_SHOWN:-12}" "$out/$name.txt"
    if [ "$status" -ne 0 ]; then
        echo "== $name ended with $status; all of it is in $out/$name.txt"
        failed=1
    fi
}

engine=${VGPU_ENGINE:-cuda}
if command -v nvidia-smi > /dev/null; then
    part nvidia-smi nvidia-smi
fi

# shellcheck disable=SC2086 # words of their own
LINES_SHOWN=200 part check "$here/vgpu" gpu-check --engine "$engine" --json "$out/check.json" ${VGPU_CHECK_OPTIONS:-}

socket=$out/vgpu.sock
"$here/vgpu" serve --engine "$engine" --listen "unix:$socket" > "$out/serve.txt" 2>&1 &
serve=$!
trap 'kill "$serve" 2> /dev/null' EXIT
for _ in $(seq 300); do
    if [ -S "$socket" ] || ! kill -0 "$serve" 2> /dev/null; then
        break
    fi
    sleep 0.1
done

# A program of bin/ on the executor.
through() {
    program=$1
    shift
    GGML_BACKEND_PATH="$here/libggml-vgpu.so" VGPU_ENDPOINT="unix:$socket" VGPU_LOG=warn \
        LD_LIBRARY_PATH="$here/bin" "$here/bin/$program" "$@"
}

if kill -0 "$serve" 2> /dev/null; then
    # shellcheck disable=SC2086
    part test-backend-ops through test-backend-ops test -b VGPU0 ${VGPU_OPS_OPTIONS:-}
    for model in "$here"/models/*.gguf; do
        name=$(basename "$model" .gguf)
        # shellcheck disable=SC2086
        part "bench-$name" through llama-bench -m "$model" -ngl 99 -fa 1 ${VGPU_BENCH_OPTIONS:--p 512,2048 -n 128}
        if [ -n "${GGML_CUDA:-}" ]; then
            # shellcheck disable=SC2086
            part "bench-cuda-$name" env GGML_BACKEND_PATH="$GGML_CUDA" LD_LIBRARY_PATH="$here/bin" \
                "$here/bin/llama-bench" -m "$model" -ngl 99 -fa 1 ${VGPU_BENCH_OPTIONS:--p 512,2048 -n 128}
        fi
    done
else
    echo "== vgpu serve ended; what it said is in $out/serve.txt"
    tail -n 5 "$out/serve.txt"
    failed=1
fi
exit "$failed"
