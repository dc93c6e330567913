#!/usr/bin/env bash
# Every check and every figure of results/h200, on one GPU, in three commands of less than ten minutes each:
#
#     DMST_COMMIT=abc1234 benchmarks/everything.sh check OUT     GPU tests, sanitizer
#     DMST_COMMIT=abc1234 benchmarks/everything.sh models OUT    nothing else runs: whole networks
#     DMST_COMMIT=abc1234 benchmarks/everything.sh layers OUT    the same: layers, a million tokens
set -uo pipefail
case "${1:-}" in check | models | layers) stage=$1 ;; *) echo "usage: $0 check|models|layers OUT" >&2 && exit 2 ;; esac
mkdir -p "${2:?usage: $0 check|models|layers OUT}"
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH=.
logs=$(mktemp -d)
limited() { # seconds, name, command: in the log of that name
  local limit=$1 name=$2
  shift 2
  timeout --kill-after=20 "$limit" "$@" >"$logs/$name" 2>&1
  echo "[$SECONDS s] $name: $?"
}

case $stage in
check)
  pytest=(python3 -m pytest -c /dev/null --rootdir . -W ignore -q -m gpu) # the plugins of pyproject.toml may not be there
  "${pytest[@]}" tests --collect-only 2>/dev/null | grep :: >"$logs/names"
  for part in 0 1 2 3 4 5 6 7; do
    mapfile -t names < <(awk "NR % 8 == $part" "$logs/names")
    limited 560 "tests-$part" "${pytest[@]}" "${names[@]}" &
  done
  for part in 1 2 3 4 5 6 7; do
    limited 540 "race-$part" compute-sanitizer --tool racecheck python3 benchmarks/sanitize.py --part $part/7 &
    limited 540 "memory-$part" compute-sanitizer --tool memcheck python3 benchmarks/sanitize.py --part $part/7 &
  done
  wait
  (grep -hE "(Read|Write) access at" "$logs"/race-* | sort | uniq -c; tail -qn 1 "$logs"/{race,memory}-*) | tee "$out/sanitizer.txt"
  (grep -hE "^(FAILED|ERROR|E  )" "$logs"/tests-* | sort | uniq -c; tail -qn 1 "$logs"/tests-*) | tee "$out/tests.txt"
  ;;
models)
  for what in vit_small vit_small:dmsa dmst_small gmst_small tost_small timm:vit_small_patch16_224 timm:xcit_small_12_p16_224; do
    (
      beside=(--add --beside "$logs/device" --json "$out/models.json" --only "$what")
      limited 400 "$what-224" python3 benchmarks/models.py "${beside[@]}" --sizes 224
      limited 150 "$what-more" python3 benchmarks/models.py "${beside[@]}" --sizes 512 1024 --modes graph
    ) &
  done
  wait
  grep -h " s  " "$logs"/*-224 "$logs"/*-more
  ;;
layers)
  limited 90 tokens python3 benchmarks/operators.py --json "$out/tokens.json" --only dmsa gmsa --modes graph eager \
    --shapes 1x65536 1x131072 1x262144 1x524288 1x1048576
  for what in floor dmsa gmsa gmsa_proximal tssa sdpa_p48 sdpa_p64 xca mssa tssa_published listing; do
    limited 400 "$what" python3 benchmarks/operators.py --add --beside "$logs/device" --json "$out/operators.json" --only "$what" &
  done
  wait
  grep -h " s  " "$logs"/*
  ;;
esac
