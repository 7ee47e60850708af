#!/usr/bin/env bash
# Let ranks die, and come late, while a kernel waits for them, many times: tests/device/test_late_faults.py.
# Each of its tests is a job that has RUNS runs, as many at a time as the GPUs have memory for; in a run each kind of
# wait is under way.
# Usage: scripts/lib/missed.sh [RUNS=34] [SECONDS=600] [WORDS]
# WORDS choose some of the tests, as those of `pytest -k`.
# Needs GPUs without MPS, and takes python3 and mpirun as they are. A job of deaths has RUNS + 2 processes, all
# with memory on each GPU: 108 of them did not fit on an H100, nor 180 on two H200, and the driver
# makes their contexts one after the other: 288 on four H200 took longer than 110 s. Start it once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export MPISHARE_RUNS=${1:-34} WORK
limit=${2:-600} words=${3:-}
free_mib=$(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits | sort -n | head -n 1)
jobs=$((free_mib / (800 * (MPISHARE_RUNS + 2))))
((jobs > 0)) || { echo "$MPISHARE_RUNS runs in a job take more memory than the GPUs have free" >&2 && exit 1; }
WORK=$(mktemp -d "${TMPDIR:-/tmp}/mpishare.XXXXXX")
trap 'rm -rf -- "$WORK"' EXIT
file=tests/device/test_late_faults.py

# Deaths and late ranks in turn: the two tests of a way to wait on the host stand beside each other.
python3 -m pytest -q -p no:cacheprovider --collect-only -k "$words" "$file" | grep :: | sort -t '[' -k 2 >"$WORK/tests"
# shellcheck disable=SC2016 # for the shell of a job
one='said=$(python3 -m pytest -q -p no:cacheprovider --color=no --outcomes "$WORK/$$.jsonl" "$1" 2>&1) && state=passed || state=FAILED
[[ $said != *skipped* ]] || state=skipped
echo "$state: $1"
[[ $state == passed ]] || echo "$said" >>"$WORK/failures"'
timeout -k 5 "$limit" xargs -d '\n' -P "$jobs" -n 1 bash -c "$one" job <"$WORK/tests" | tee "$WORK/ended" || :
[[ ! -e $WORK/failures ]] || tail -n 200 "$WORK/failures"
all=$(wc -l <"$WORK/tests") passed=$(grep -c ^passed "$WORK/ended" || :)
cut -d '[' -f 1 "$WORK/tests" | sort -u | while read -r test; do
  count=$(grep -c "^passed: $test" "$WORK/ended" || :)
  echo "${test##*::}: $((count * MPISHARE_RUNS)) runs were right"
done
echo "$passed of $all jobs passed, $(wc -l <"$WORK/ended") ended, within $SECONDS s"
((passed == all))
