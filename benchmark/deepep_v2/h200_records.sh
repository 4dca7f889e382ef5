#!/usr/bin/env bash
# Makes the records of docs/measurements.md on one H200, step by step:
#   bash benchmark/deepep_v2/h200_records.sh OUT STEP...
# OUT gets the JSONL files, and STEP.log of each step. Steps, each with the seconds that it takes with warm JIT caches:
#   tests 300 | layer 110 | variants 200 | shapes 420 | qwen3 300 | mimo 300 | profile 120 | accuracy 300
# LIMIT (default 570) ends a step after that many seconds; what it has measured by then is kept. SERVER_ARGS replaces the servers'
# arguments, where FA3 is installed for instance. BENCH_COMMIT names the commit where the checkout has no history. Nothing else may
# use the GPU meanwhile.
set -euo pipefail

steps="tests layer variants shapes qwen3 mimo profile accuracy"
if (($# < 2)) || [[ $1 == -* ]]; then
    sed -n '2,/^set/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
for step in "$@"; do
    [[ " $steps " == *" $step "* ]] || { echo "unknown step $step; steps: $steps" >&2; exit 2; }
done
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=benchmark/deepep_v2
limit=${LIMIT:-570}
python=${PYTHON:-python3}
# Four servers share one GPU in turns, so each gets the same small share of its memory.
server_args=${SERVER_ARGS:-"--attention-backend triton --sampling-backend pytorch --grammar-backend none --sleep-on-idle --max-total-tokens 140000 --max-running-requests 128 --context-length 70000 --cuda-graph-max-bs-decode 8"}
paths=sglang_nonexpanded,sglang_expanded,psum,psum_sync_free

# Interrupted rather than killed, so that the tools write what they have and end their servers.
limited() { timeout -s INT -k 30 "$limit" "$@"; }

servers() {
    limited "$python" -m sglang_deepep_v2 ab --model "random:$1" --paths "$paths" --prompt-len "$2" --rounds 3 --tokens 262144 \
        --together --jobs 4 --mem-fraction 0.5 --server-args "$server_args" --out "$out/$1"
}

run() {
    case $1 in
    tests) limited "$python" -m pytest test/srt -m gpu -v ;;
    layer) limited "$python" -m sglang_deepep_v2 bench --rounds 15 --out "$out" ;;
    variants) limited "$python" $here/bench_variants.py --tokens 2304 8192 --out "$out" --time-budget $((limit - 20)) ;;
    shapes) limited "$python" $here/bench_layer.py --no-inspect --rounds 5 --shapes deepseek-v3 glm qwen3-235b mimo-v2-flash \
        --local-experts 8 16 32 --tokens 128 512 2304 8192 16384 --out "$out" --time-budget $((limit - 20)) ;;
    qwen3) servers qwen3-moe-fp8 1024,8192,32768 ;;
    mimo) servers mimo-v2-flash-fp8 1024,8192,32768 ;;
    profile) limited "$python" $here/server_profile.py --model random:qwen3-moe-fp8 --jobs 4 --mem-fraction 0.5 \
        --server-args "$server_args" --out "$out" --logs "$out/profile" ;;
    accuracy) "$python" $here/accuracy/train_arithmetic_moe.py --out "$out/model" --max-value 99 --seconds 78 --skip-eval &&
        limited "$python" $here/accuracy/eval_paths.py --model "$out/model/fp8" --max-value 99 --parallel 4 --out "$out" \
            --logs "$out/accuracy" --time-budget $((limit - 60)) ;;
    esac
}

failed=()
for step in "$@"; do
    SECONDS=0
    if run "$step" 2>&1 | tee "$out/$step.log"; then state=done; else state="failed or cut"; failed+=("$step"); fi
    echo "$step: $state after $SECONDS s"
done
((${#failed[@]} == 0)) || { echo "not whole: ${failed[*]}" >&2; exit 1; }
