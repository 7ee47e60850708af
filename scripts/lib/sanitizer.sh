# shellcheck shell=bash
# Sourced by scripts/test-gpu: run tests under compute-sanitizer, and say what it found.

# Of CUDA's own errors none are reported: cuda.bindings and CuPy ask the driver for symbols that it
# may lack (cuGetProcAddress), and what else fails raises in the program itself. For backtraces of the
# host a tool keeps the Python frames of each launch, and so the arrays in them.
sanitizer_options=(--report-api-errors no --show-backtrace device --error-exitcode 99)

# Tests that launch each kernel in each of its forms: few, small and of few steps, since under a tool
# kernels are up to a hundred times slower, and none with a held stream, behind which a launch waits.
in_fused=(
  'test_faces_of_every_size['{8-f8-aligned,8-u1-shifted,4096-u1-shifted,131072-f4-aligned}']'
  'test_faces_of_every_size['{131088-f8-aligned,131088-u1-shifted}']'
  'test_small_faces_of_odd_sizes['{u1-columns-shifted,c16-columns-aligned,f4-rows-shifted}']'
  test_strided_faces_of_bytes_and_large_ones_in_one_plan
  'test_one_launch_whatever_the_neighbors_and_fields['{faces-1,corners-16}']'
)
in_direct=(test_parts_that_are_made_to_go_straight_to_another_gpu)
in_halo=(
  'test_forced_routes['{copy,pinned}']'
  test_accumulate_in_a_graph
)
in_fields=('test_one_plan_of_everything[private]')
in_accumulate=('test_corners_and_wide_halos['{own,pinned}']')
in_seams=(
  'test_a_captured_step_follows_a_shift_in_gpu_memory['{own,copy}'-i4-small]'
  'test_faces_are_transposed_and_reversed['{own-flip0-f4,own-flip1-c16,pinned-flip3-f8}']'
)
in_wire=('test_fields_in_windows['{1-f8-float32,4097-c8-bfloat16,4097-f4-float16}']')
in_replays=('test_replays[20-'{False,True}']')
in_rows=(
  test_a_captured_exchange_by_the_gpus_bounds
  test_captured_rounds
)
in_exact=(
  'test_dot['{f8-wide,c8-special,f2-ties}']'
  'test_reduce['{f8-cancels,f4-wide}']'
  'test_any_strides[strided]'
)
in_allreduce=(
  'test_sizes_by_every_route['{own-7,own-4096,own-4097,own-65537,copy-7,pinned-4097}']'
  test_a_field_of_several_segments
  'test_strides_may_differ_from_rank_to_rank['{own-300,own-40003,copy-300}']'
  'test_dots_are_those_of_numpy['{own-e,own-D,copy-f}']'
  'test_dots_of_views_and_of_other_shapes_on_each_rank[own]'
  'test_replays_and_calls_mixed['{own-300,own-40003}']'
)
in_capture=(test_a_step_is_run_once_captured_once_and_replayed)
in_redistribute=(
  'test_random_distributions_by_forced_routes['{copy,pinned}'-0]'
  'test_transposed_parts_of_any_size[one after the other-f8]'
)
in_device=(
  'test_every_group_puts_from_anywhere_to_anywhere['{1-starts0,8-starts1}-{thread,warp,block}-1000']'
  'test_a_barrier_orders_all_stores_before_it[3]'
  test_words_come_with_their_epochs
  test_remote_atomics_add_up
)
# shellcheck disable=SC2034  # for the caller
kernel_tests=(
  "${in_fused[@]/#/tests/halo/test_fused_gpu.py::}"
  "${in_direct[@]/#/tests/halo/test_direct_gpu.py::}"
  "${in_halo[@]/#/tests/halo/test_exchange_gpu.py::}"
  "${in_fields[@]/#/tests/halo/test_fields_ranks.py::}"
  "${in_accumulate[@]/#/tests/halo/test_accumulate_ranks.py::}"
  "${in_seams[@]/#/tests/halo/test_seams_gpu.py::}"
  "${in_wire[@]/#/tests/halo/test_wire_ranks.py::}"
  "${in_replays[@]/#/tests/rows/test_replays_gpu.py::}"
  "${in_rows[@]/#/tests/rows/test_rows_gpu.py::}"
  "${in_exact[@]/#/tests/reduction/test_exact_ranks.py::}"
  "${in_allreduce[@]/#/tests/reduction/test_allreduce_gpu.py::}"
  "${in_capture[@]/#/tests/graphs/test_capture_gpu.py::}"
  "${in_redistribute[@]/#/tests/redistribution/test_redistribute_gpu.py::}"
  "${in_device[@]/#/tests/device/test_device_gpu.py::}"
)

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
