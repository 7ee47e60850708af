# shellcheck shell=bash
# Sourced by scripts/test-gpu: run a part of the suite for a limited time, and say how it ended.

# limited SECONDS PART FOLDER COMMAND...: run COMMAND, which is pytest on one rank or more.
# FOLDER/PART.jsonl has the outcomes, also those from before a cut. FOLDER/PART.end says "passed",
# "failed after N s, exit status M" or "cut off after N s". The exit status is 0 if it passed.
limited() {
  local seconds=$1 file=$3/$2 status=0 begin=$SECONDS took end=passed
  shift 3
  rm -f "$file".{jsonl,end}
  timeout -k 10 "$seconds" "$@" --outcomes "$file.jsonl" || status=$?
  took=$((SECONDS - begin))
  # 5: no test of this kind.
  if ((status == 5)); then : >"$file.jsonl" && status=0; fi
  # 124 and 137 are those of `timeout`, but a test can end with them too.
  if ((status == 124 || status == 137)) && ((took >= seconds)); then
    end="cut off after $took s"
    printf '\n== %s: %s\n' "${file##*/}" "$end"
  elif ((status)); then
    end="failed after $took s, exit status $status"
  fi
  echo "$end" >"$file.end"
  return "$status"
}
