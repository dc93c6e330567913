#!/usr/bin/env bash
# Every check and every figure of results/h200, on one GPU, in three commands of less than ten minutes each:
#
#     DMST_COMMIT=abc1234 benchmarks/everything.sh check OUT     GPU tests, sanitizer, repeats; networks compiled, for `models`
#     DMST_COMMIT=abc1234 benchmarks/everything.sh models OUT    nothing else runs: whole networks
#     DMST_COMMIT=abc1234 benchmarks/everything.sh layers OUT    the same: layers, blocks, tokens, silent heads
#
# What is there when the time is up is in OUT. `models` after `check` on the same machine finds its networks compiled; alone it
# takes longer. NETWORKS= before `check` compiles none. Of `dmst bench operators`, last, the rows of its targets come first,
# those that are compiled last.
set -uo pipefail
case "${1:-}" in check | models | layers) stage=$1 ;; *) echo "usage: $0 check|models|layers OUT" >&2 && exit 2 ;; esac
mkdir -p "${2:?usage: $0 check|models|layers OUT}"
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH=. TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/dmst-compiled}"
logs=$(mktemp -d)
began=$SECONDS
limited() { # seconds, name, command: in the log of that name
  local limit=$1 name=$2
  shift 2
  timeout --kill-after=20 "$limit" "$@" >"$logs/$name" 2>&1
  echo "[$((SECONDS - began)) s] $name: $?"
}
blocks=(python3 benchmarks/block.py --shapes 256x197 64x1024 4x16384 --streams float32)

case $stage in
check)
  limited 560 tests python3 tests/gpu.py --processes 12 --seconds 545 --commit "${DMST_COMMIT:-unknown}" --out "$out/tests.txt" &
  for network in ${NETWORKS-dmst_small vit_small:dmsa vit_small timm:vit_small_patch16_224 timm:xcit_small_12_p16_224}; do
    limited 400 "compile-$network" python3 -m dmst bench models --sizes 224 --only $network --out "$logs/$network.json" &
  done
  (sleep 200 && limited 300 compile-block "${blocks[@]}") &
  for part in 1 2 3 4 5 6 7; do
    limited 540 "race-$part" compute-sanitizer --tool racecheck python3 benchmarks/sanitize.py --part $part/7 &
    limited 540 "memory-$part" compute-sanitizer --tool memcheck python3 benchmarks/sanitize.py --part $part/7 &
  done
  (sleep 60 && limited 480 repeats python3 benchmarks/repeats.py --json "$out/repeats.json") &
  wait
  find "$TORCHINDUCTOR_CACHE_DIR" -name '*.best_config' -delete # chosen on a busy device
  {
    echo "commit ${DMST_COMMIT:-unknown}"
    python3 benchmarks/sanitize.py --read "$logs"/race-* && echo "racecheck: 0 about our memory"
    tail -qn 1 "$logs"/memory-*
  } 2>&1 | tee "$out/sanitizer.txt"
  grep -hE "images a second, |parity failed" "$logs"/compile-*
  grep -v "^passed" "$logs/tests" | tail -40
  ;;
models)
  limited 200 models python3 -m dmst bench models --out "$out/models.json" --sizes 224 --limit 180
  limited 190 more-models python3 -m dmst bench models --out "$out/models.json" --sizes 512,1024 --add --limit 165
  grep -hE "images a second, |│ (compiled|recorded|forward|kept|peak)|no time|parity failed" "$logs"/{models,more-models}
  ;;
layers)
  limited 75 block "${blocks[@]}" --json "$out/block.json"
  limited 90 tokens python3 benchmarks/tokens.py --json "$out/tokens.json"
  limited 75 mlp python3 benchmarks/mlp.py --dims 384 --json "$out/mlp.json"
  limited 60 silent python3 benchmarks/silent.py --dims 384 --active 8 4 2 1 --json "$out/silent.json"
  limited 215 operators python3 -m dmst bench operators --out "$out/operators.json" --limit "${OPERATORS_LIMIT:-200}"
  grep -hE "│ (compiled|recorded|forward|kept|peak)|no time|parity failed" "$logs"/operators
  cat "$logs"/{block,tokens,mlp,silent} | cut -c1-160
  ;;
esac
