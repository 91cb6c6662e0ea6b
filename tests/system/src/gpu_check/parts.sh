# shellcheck shell=sh
# Functions of the scripts in the bundle: parts with time limits, and executors. The script that
# includes this file sets `here` (the folder of the bundle), `out` (the folder for results) and
# `engine`. `failed` is 1 after a failure.
failed=0
began=$(date +%s)
in_all=${SECONDS_IN_ALL:-570}
: > "$out/parts.tsv"

# Seconds reserved for later parts.
kept=0
# left SECONDS: the time limit of a part, at most SECONDS.
left() {
    rest=$((began + in_all - kept - $(date +%s)))
    [ "$rest" -lt "$1" ] || rest=$1
    echo "$rest"
}

# part NAME SECONDS COMMAND: runs the command, prints the end of its output, and records its status
# and its seconds in parts.tsv.
part() {
    part=$1
    limit=$(left "$2")
    shift 2
    if [ "$limit" -lt 5 ]; then
        echo "== $part: not run, no time left"
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
        echo "== $part ended with $status after $seconds s; its output is in $out/$part.txt"
        failed=1
    fi
    return "$status"
}

# One executor per model: its memory is free afterwards, and its failure affects no other model. The
# socket is in a temporary folder, since the path of a socket must be short.
sockets=$(mktemp -d)
socket=$sockets/vgpu.sock
serve=
# start_executor VARIABLE=VALUE...: starts vgpu serve with these environment variables.
start_executor() {
    rm -f "$socket"
    env "$@" "$here/vgpu" serve --engine "$engine" --listen "unix:$socket" \
        >> "$out/serve.txt" 2>&1 &
    serve=$!
    for _ in $(seq 300); do
        if [ -S "$socket" ] || ! kill -0 "$serve" 2> /dev/null; then
            break
        fi
        sleep 0.1
    done
    if ! kill -0 "$serve" 2> /dev/null; then
        echo "== vgpu serve ended; its output is in $out/serve.txt"
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
# The current model file.
model=
clean() {
    stop_executor
    [ -z "$model" ] || rm -f "$model"
    rm -rf "$sockets"
}
trap clean EXIT
trap 'exit 130' INT TERM

# ggml's own backend for the GPU, if it exists.
peer=${GGML_CUDA:-}
if [ -z "$peer" ] && [ -f "$here/cuda/libggml-cuda.so" ]; then
    peer=$here/cuda/libggml-cuda.so
fi

# The environment of a program of bin/ with the executor, and with ggml's own backend. If the GPU is
# not available, the program must fail instead of computing on the CPU.
through="env GGML_BACKEND_PATH=$here/libggml-vgpu.so VGPU_ENDPOINT=unix:$socket VGPU_REQUIRED=1"
through="$through VGPU_LOG=warn LD_LIBRARY_PATH=$here/bin"
on_cuda="env GGML_BACKEND_PATH=$peer"
on_cuda="$on_cuda LD_LIBRARY_PATH=$here/bin:$here/cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
if [ -n "$peer" ]; then
    # shellcheck disable=SC2086 # several words
    $on_cuda "$here/bin/llama-bench" --list-devices > "$out/peer.txt" 2>&1
    if ! grep -q '^ *CUDA[0-9]' "$out/peer.txt"; then
        echo "== $peer finds no GPU; ggml's own backend is not measured:"
        tail -n 5 "$out/peer.txt"
        failed=1
        peer=
    fi
fi
