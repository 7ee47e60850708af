# shellcheck shell=bash
# Sourced by scripts/test-gpu: run tests under compute-sanitizer, and say what it found.

# Of CUDA's own errors none are reported: cuda.bindings and CuPy ask the driver for symbols that it
# may lack (cuGetProcAddress), and what else fails raises in the program itself.
sanitizer_options=(--report-api-errors no --error-exitcode 99)

# find_sanitizer PYTHON FOLDER: sets `sanitizer` to its path, or `no_sanitizer` to why it cannot be
# used. FOLDER gets the log of a trial.
# shellcheck disable=SC2034  # no_sanitizer is for the caller
find_sanitizer() {
  local said=
  no_sanitizer=
  if ! sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer); then
    no_sanitizer="no compute-sanitizer here"
    return
  fi
  : >"$2/trial.log"
  if ! said=$("$sanitizer" "${sanitizer_options[@]}" --log-file "$2/trial.log" \
    "$1" -c 'import cupy; cupy.ones(1).sum().get()' 2>&1) || ! grep -q 'SUMMARY: 0 ' "$2/trial.log"; then
    # Under gVisor it cannot attach.
    said=$(echo "$said" | cat "$2/trial.log" - | sed '/^$/d' | tail -n 2 | paste -sd' ')
    no_sanitizer="compute-sanitizer does not run here: $said"
  fi
}

# sanitized SECONDS TOOL RANKS FOLDER LAUNCH... -- PYTEST...: as `limited`, under a tool. It fails
# too where the tool has not watched every rank to its end.
sanitized() {
  local seconds=$1 tool=$2 ranks=$3 folder=$4 launch=() status=0 clean
  shift 4
  while [[ $1 != -- ]]; do launch+=("$1") && shift; done
  rm -f "$folder/$tool".*.log
  limited "$seconds" "$tool" "$folder" "${launch[@]}" "$sanitizer" --tool "$tool" \
    "${sanitizer_options[@]}" --log-file "$folder/$tool.%p.log" "${@:2}" || status=$?
  clean=$(cat "$folder/$tool".*.log | grep -c 'SUMMARY: 0 ') || :
  printf '== %s: %d of %d ranks without an error\n' "$tool" "$clean" "$ranks"
  if ((clean < ranks)) || grep -h 'SUMMARY:' "$folder/$tool".*.log | grep -qv 'SUMMARY: 0 '; then
    head -n 40 "$folder/$tool".*.log
    if ((status == 0)); then echo "failed: $clean of $ranks ranks are clean" >"$folder/$tool.end"; fi
    return 1
  fi
  return "$status"
}
