"""A C program that opens a window: the Python of the job passes it one line of text.

    mpirun -n 2 python -m mpi4py scripts/examples/32_c_program.py

The program is compiled here, with the header that comes with mpishare, and on GPUs with cuda.h.
"""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import mpishare
import mpishare.device

PROGRAM = """
#include <mpishare_open.h>

int main(int argc, char **argv) {
  mpishare_export line;
  mpishare_memory memory;
  uint64_t i, n = 0;
  if (argc != 2 || mpishare_parse(argv[1], &line)) return 2;
  if (mpishare_open(&line, 1, &memory)) return fprintf(stderr, "%s\\n", memory.why), 1;
  n = memory.nbytes / sizeof(double);
#ifdef CUDA_VERSION
  for (i = 0; i < n; i++) cuMemsetD32((CUdeviceptr)memory.data + 8 * i + 4, 0x40000000, 1);
  cuCtxSynchronize();
#else
  for (i = 0; i < n; i++) ((double *)memory.data)[i] += 1;
#endif
  mpishare_close(&memory);
  return 0;
}
"""

with mpishare.Node() as node, tempfile.TemporaryDirectory() as folder:
    window = node.allocate_each(8, "f8", fill=1, name="c")  # named: its file stays open
    window.fence()
    last = node.size - 1
    if node.is_leader:
        Path(folder, "open.c").write_text(PROGRAM)
        command = [*shlex.split(os.environ.get("CC", "cc")), *mpishare.device.include()]
        command += ["-o", f"{folder}/open", f"{folder}/open.c"]
        if node.backend == "cuda":  # cuda.h there, or in a folder of CPATH
            command += ["-DMPISHARE_WITH_CUDA", "-I/usr/local/cuda/include", "-l:libcuda.so.1"]
        subprocess.run(command, check=True)
        subprocess.run([f"{folder}/open", str(window.export(last))], check=True)
    window.fence()  # the program is done
    right = 2 if node.rank == last else 1
    if not bool((window.array == right).all()):
        raise SystemExit(f"rank {node.rank}: WRONG: {window.array}")
    node.barrier()
    if node.is_leader:
        print("the C program added 1 to the last segment: right")
