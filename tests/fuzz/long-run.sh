#!/bin/sh
# Builds all targets for libFuzzer with the stable compiler and runs each: with coverage, debug
# assertions and overflow checks, but without the address sanitizer, which needs a nightly compiler.
# Failing inputs go to artifacts/, new inputs to found/. Neither folder is committed.
#
#   tests/fuzz/long-run.sh          at least 100 million executions
#   tests/fuzz/long-run.sh 10       a tenth of them
#   tests/fuzz/long-run.sh 1 config codec   all of them, of these targets
set -eu
cd "$(dirname "$0")"
divide=${1:-1}
[ $# -eq 0 ] || shift
wanted=" $* "

RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Coverflow-checks"
export RUSTFLAGS
# With --target, build scripts are not instrumented.
bins=
for target; do
    bins="$bins --bin $target"
done
# Unquoted: several words, or none.
# shellcheck disable=SC2086
cargo build --release --target x86_64-unknown-linux-gnu $bins
bin=${CARGO_TARGET_DIR:-target}/x86_64-unknown-linux-gnu/release

mkdir -p artifacts
failed=0
# Target, executions, longest input, further options. The time per execution differs by a factor of
# a thousand. In `session`, which has the most features, half the time would go to their entropy.
while read -r target runs length options; do
    case $wanted in
    "  " | *" $target "*) ;;
    *) continue ;;
    esac
    mkdir -p "found/$target"
    echo "== $target"
    # shellcheck disable=SC2086
    "$bin/$target" $options -runs=$((runs / divide)) -max_len="$length" -timeout=60 \
        -rss_limit_mb=1024 -reload=0 -verbosity=0 -print_final_stats=1 \
        -artifact_prefix="artifacts/$target-" "found/$target" "corpus/$target" </dev/null ||
        failed=1
done <<END
monitor 30000000 400
batch 100000 400
codec 25000000 200
pages 20000000 200
text 10000000 120
ring 8000000 400
graph 8000000 600
frames 1000000 600
gguf 1000000 400
config 3000000 600
device 3000000 300
session 5000000 1500 -entropic=0
END
exit $failed
