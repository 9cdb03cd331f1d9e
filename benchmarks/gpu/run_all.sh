#!/usr/bin/env bash
# Everything that needs real GPUs, in order, each part under a time limit. A table of what came out is printed last.
#
#   benchmarks/gpu/run_all.sh [PART...]      # without names: all, in this order
#
#   check         results against the reference, failures, two ranks; then one, three and four on the GPUs there are
#   random        thousands of random steps, every output compared            (RANDOM_STEPS, default 10000)
#   faults        ranks that die or stop, masks, readmission
#   conformance   tests/conformance over nvlink, in several processes         (WORKERS, default 6)
#   capture       tests of captured forwards and of what a Fleet counts
#   nccl-tests    the torch_dist transport over NCCL: its own tests, then tests/conformance
#   bench         nvlink beside the peers that peers.sh finds                 (BENCH_ARGS: more options)
#   overlap       time hidden by the halves, and what programs cost a GEMM
#
# Results go to $OUT (default build/gpu): JSON and pictures, and run_all.log with everything that was printed.
# Limits in seconds: CHECK_S, TINY_S, RANDOM_S, ... ; PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
LOGS=$(mktemp -d)
trap 'rm -rf "$LOGS"' EXIT
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
GPUS=$($PYTHON -c 'import torch; print(torch.cuda.device_count())')
summary=()

part() {  # part NAME SECONDS COMMAND...: run it, show its output (lines that match SHOW), note how it ended
  local name=$1 limit=$2 log begin=$SECONDS
  shift 2
  log="$LOGS/$name"
  echo "== $name (at most $limit s): $*"
  timeout -k 10 "$limit" "$@" 2>&1 | tee "$log" | tee -a "$OUT/run_all.log" | grep --line-buffered -E "${SHOW:-}"
  rc=${PIPESTATUS[0]}
  note "$name" "$rc" $((SECONDS - begin)) "$log"
}

note() {  # note NAME STATUS SECONDS LOG: a line of the summary
  local verdict=ok
  [ "$2" = 0 ] || verdict="FAILED ($2)"
  [ "$2" = 124 ] && verdict="out of time"
  summary+=("$(printf '%-18s %-12s %4d s  %s' "$1" "$verdict" "$3" "$(tail -n 1 "$4" | cut -c1-90)")")
}

conformance() {  # the plain options only: plugins may be missing there
  SHOW='FAILED|ERROR|^E  |passed|failed' part "$1" "$2" $PYTHON -m pytest tests/conformance -v --tb=short -rfE \
    -o addopts=--import-mode=importlib -o timeout=300 --device cuda --transports "$3" "${@:4}"
}

run_check() {
  part check "${CHECK_S:-200}" $PYTHON benchmarks/gpu/check_nvlink.py --quick --world "$GPUS" --only checks \
    --stuck-after $((${CHECK_S:-200} - 10))
  local world limit=${TINY_S:-200} begin=$SECONDS pids=() status=0
  echo "== check-world1, 3, 4 side by side (at most $limit s each)"
  for world in 1 3 4; do  # most of their time goes into compiling
    timeout -k 10 "$limit" $PYTHON benchmarks/gpu/check_nvlink.py --tiny --world $world --only checks \
      --stuck-after $((limit - 10)) >"$LOGS/world$world" 2>&1 &
    pids[world]=$!
  done
  for world in 1 3 4; do
    wait "${pids[world]}"
    status=$?
    sed "s/^/world $world: /" "$LOGS/world$world" | tee -a "$OUT/run_all.log" | tail -n 30
    note "check-world$world" $status $((SECONDS - begin)) "$LOGS/world$world"
  done
}
run_random() {
  part random "${RANDOM_S:-170}" $PYTHON benchmarks/gpu/check_nvlink.py --world "$GPUS" --only random \
    --random-steps "${RANDOM_STEPS:-10000}" --stuck-after $((${RANDOM_S:-170} - 10))
}
run_faults() { part faults "${FAULTS_S:-180}" $PYTHON benchmarks/gpu/check_faults.py; }
run_conformance() {
  conformance conformance "${CONFORMANCE_S:-420}" nvlink -n "${WORKERS:-6}" ${CONFORMANCE_ARGS:-}
  # What failed once more, alone and with all kernels compiled: whether only the load was too much.
  [ "$rc" = 1 ] && conformance conformance-again "${AGAIN_S:-100}" nvlink -n 2 --last-failed ${CONFORMANCE_ARGS:-}
}
run_capture() {
  part capture "${CAPTURE_S:-120}" $PYTHON -m pytest tests/transports/nvlink -o addopts=--import-mode=importlib -q -rfE \
    -m gpu --deselect tests/transports/nvlink/test_gpu.py::test_checks_on_gpus
}
run_nccl-tests() {
  part nccl-tests "${NCCL_S:-150}" $PYTHON -m pytest tests/transports/torch_dist/test_nccl.py -q -rfE \
    -o addopts=--import-mode=importlib
  conformance nccl-conformance "${NCCL_CONFORMANCE_S:-300}" torch_dist -n "${WORKERS:-6}" ${CONFORMANCE_ARGS:-}
}
bench() {  # bench NAME SECONDS OPTIONS...: with the peers that benchmarks/gpu/peers.sh finds
  part "$1" "$2" bash -c 'source benchmarks/gpu/peers.sh; exec "$@"' bash $PYTHON -m moefleet bench comm --device cuda \
    --world "$GPUS" --rounds 5 --hidden 7168 --experts 256 --topk 8 --dtype bfloat16 --json "$OUT/$1.json" \
    --plot "$OUT/$1.png" "${@:3}" ${BENCH_ARGS:-}
}
run_bench() {
  bench bench-ll "${BENCH_S:-200}" --layout expert_major --layout rank_major --tokens 1,128 \
    --transport nvlink,nvlink:count=0,nvlink:faults=1,torch_dist,nccl_ep,nixl_ep  # what counting and fault tolerance cost
  bench bench-zipf "${BENCH_S:-200}" --layout expert_major --layout rank_major --tokens 128 --routing zipf
  bench bench-ht "${BENCH_S:-200}" --layout flat --tokens 128,4096
}
run_overlap() {
  part overlap "${OVERLAP_S:-200}" $PYTHON -m torch.distributed.run --nproc-per-node "$GPUS" benchmarks/gpu/overlap.py \
    --json "$OUT/overlap.json"
}

all=(check random faults conformance capture nccl-tests bench overlap)
for name in "$@"; do
  declare -F "run_$name" >/dev/null || { echo "run_all.sh: no part $name; there are: ${all[*]}" >&2 && exit 2; }
done
for name in "${@:-${all[@]}}"; do "run_$name"; done
echo
printf '%s\n' "${summary[@]}" | tee -a "$OUT/run_all.log"
case "${summary[*]}" in *FAILED* | *"out of time"*) exit 1 ;; esac
