# shellcheck shell=bash
# Sourced by scripts/test-gpu: run a part of the suite for a limited time, and say how it ended.

# limited SECONDS PART FOLDER COMMAND...: run COMMAND, which is pytest on one rank or more.
# FOLDER/PART.xml has the outcomes, but not of ranks that were cut off. FOLDER/PART.end says
# "passed", "failed after N s, exit status M" or "cut off after N s". The exit status is 0 if it
# passed.
limited() {
  local seconds=$1 file=$3/$2 status=0 begin=$SECONDS took end=passed
  shift 3
  rm -f "$file".{xml,end}
  timeout -k 10 "$seconds" "$@" --junitxml "$file.xml" || status=$?
  took=$((SECONDS - begin))
  if ((status == 5)); then status=0; fi # no test of this kind
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
