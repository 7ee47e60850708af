"""The arithmetic of `epoch` in mpishare.cuh, compiled for the processor: of any grid and launch."""

import subprocess

import mpishare.device
from tests.helpers.c_program import compiler

# Blocks run one after the other: the first of the grid first or last. Instead of the many between
# them the counter gets what they add.
PROGRAM = r"""
#include <cassert>
#include <cstdio>

#define __device__
#define __forceinline__ inline
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x, y, z; } threadIdx, blockIdx, blockDim = {1, 1, 1}, gridDim;
void __syncthreads() {}
bool __syncthreads_and(bool ok) { return ok; }
void __syncwarp() {}
bool __all_sync(unsigned, bool ok) { return ok; }
unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
    const unsigned long long before = *to;
    *to += value;
    return before;
}
#include <mpishare.cuh>

using mpishare::Word;
enum { STRIDE = 16, SLOT = 3 };
static Word words[4 * STRIDE];

static Word run(const mpishare::Device& d, unsigned block) {
    blockIdx.x = block;
    return mpishare::epoch(d, SLOT);
}

int main() {
    const Word limit = 1ull << 32;
    const Index grids[] = {{1, 1, 1}, {2, 1, 1}, {3, 1, 1}, {1 << 20, 1, 1}, {(1 << 20) + 2, 1, 1},
                           {1 << 22, 1, 1}, {0x7fffffff, 1, 1}, {1 << 16, 1 << 15, 2}};
    const Word firsts[] = {1, limit - 2, 3 * limit - 2, 1ull << 48};
    mpishare::Device d = {};
    d.local = words;
    d.stride = STRIDE;
    for (const Word first : firsts)
        for (int is_first_last = 0; is_first_last < 2; is_first_last++) {
            words[STRIDE + SLOT] = (first - 1) * limit;
            words[2 * STRIDE + SLOT] = first - 1;
            Word launch = first;
            for (const Index& grid : grids) {
                const Word n = static_cast<Word>(grid.x) * grid.y * grid.z;
                gridDim = grid;
                Word got = launch;
                if (!is_first_last) got = run(d, 0);
                if (n > 1 && got == launch) got = run(d, 1);
                if (n > 2) words[STRIDE + SLOT] += n - 3;
                if (n > 2 && got == launch) got = run(d, 2);
                if (is_first_last && got == launch) got = run(d, 0);
                if (got != launch)
                    printf("%llu blocks count launch %llu as %llu\n", n, launch, got);
                launch++;
            }
        }
    for (int i = 0; i < 4 * STRIDE; i++) assert(!words[i] || i % STRIDE == SLOT);
    puts("done");
}
"""


def test_every_block_of_every_grid_gets_the_number_of_its_launch(tmp_path):
    (tmp_path / "epochs.cpp").write_text(PROGRAM)
    command = [*compiler("c++17"), "-std=c++17", *mpishare.device.include()]
    command += ["-o", tmp_path / "epochs", tmp_path / "epochs.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = subprocess.run([tmp_path / "epochs"], capture_output=True, text=True, check=False)
    assert said.stdout.splitlines() == ["done"], said.stderr
