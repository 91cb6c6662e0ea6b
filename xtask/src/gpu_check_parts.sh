# shellcheck shell=sh
# What the scripts of the bundle have in common: parts with limits, and executors. They set `here` and `out`, the folders of the
# bundle and for results, and `engine`; `failed` is 1 when something was not as it should be.
failed=0
began=$(date +%s)
in_all=${SECONDS_IN_ALL:-570}
: > "$out/parts.tsv"

# Seconds that are kept for what comes later.
kept=0
# Seconds that are left for a part that may take so many.
left() {
    rest=$((began + in_all - kept - $(date +%s)))
    [ "$rest" -lt "$1" ] || rest=$1
    echo "$rest"
}

# part NAME SECONDS COMMAND: runs it, shows the end of what it says, and notes how it went.
part() {
    part=$1
    limit=$(left "$2")
    shift 2
    if [ "$limit" -lt 5 ]; then
        echo "== $part: no time is left"
        printf '%s\t124\t0\n' "$part" >> "$out/parts.tsv"
        failed=1
        return 124
    fi
    echo "== $part"
    start=$(date +%s.%N)
    timeout -k 5 "$limit" "$@" > "$out/$part.txt" 2>&1
    status=$?
    seconds=$(echo "$(date +%s.%N) $start" | awk '{printf "%.1f", $1 - $2}')
    printf '%s\t%s\t%s\n' "$part" "$status" "$seconds" >> "$out/parts.tsv"
    tail -n "${LINES_SHOWN:-4}" "$out/$part.txt"
    if [ "$status" -ne 0 ]; then
        echo "== $part ended with $status after $seconds s; all of it is in $out/$part.txt"
        failed=1
    fi
    return "$status"
}

# An executor for each model: its memory is free afterwards, and one that fails takes nothing along.
# Names of sockets are short, those of folders may not be.
sockets=$(mktemp -d)
socket=$sockets/vgpu.sock
serve=
# start_executor VARIABLE=VALUE...: with these in its environment.
start_executor() {
    rm -f "$socket"
    env "$@" "$here/vgpu" serve --engine "$engine" --listen "unix:$socket" >> "$out/serve.txt" 2>&1 &
    serve=$!
    for _ in $(seq 300); do
        if [ -S "$socket" ] || ! kill -0 "$serve" 2> /dev/null; then
            break
        fi
        sleep 0.1
    done
    if ! kill -0 "$serve" 2> /dev/null; then
        echo "== vgpu serve ended; what it said is in $out/serve.txt"
        tail -n 5 "$out/serve.txt"
        serve=
        failed=1
        return 1
    fi
}
stop_executor() {
    if [ -n "$serve" ]; then
        kill "$serve" 2> /dev/null
        wait "$serve" 2> /dev/null
        serve=
    fi
}
# The model that is there for the moment.
model=
clean() {
    stop_executor
    [ -z "$model" ] || rm -f "$model"
    rm -rf "$sockets"
}
trap clean EXIT
trap 'exit 130' INT TERM

# ggml's own backend for the GPU, if it is there.
peer=${GGML_CUDA:-}
if [ -z "$peer" ] && [ -f "$here/cuda/libggml-cuda.so" ]; then
    peer=$here/cuda/libggml-cuda.so
fi

# A program of bin/: on the executor, and on ggml's own backend. Neither may quietly become a measurement of the processor.
through="env GGML_BACKEND_PATH=$here/libggml-vgpu.so VGPU_ENDPOINT=unix:$socket VGPU_REQUIRED=1 VGPU_LOG=warn LD_LIBRARY_PATH=$here/bin"
on_cuda="env GGML_BACKEND_PATH=$peer LD_LIBRARY_PATH=$here/bin:$here/cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
if [ -n "$peer" ]; then
    # shellcheck disable=SC2086 # words of their own
    $on_cuda "$here/bin/llama-bench" --list-devices > "$out/peer.txt" 2>&1
    if ! grep -q '^ *CUDA[0-9]' "$out/peer.txt"; then
        echo "== $peer finds no GPU; ggml's own backend is not measured:"
        tail -n 5 "$out/peer.txt"
        failed=1
        peer=
    fi
fi
