// A kernel of one's own on a window: ranks 0 and 1 give each other words.
#include <mpishare.cuh>
using namespace mpishare;

// Both ranks give each other `words`, each block its part, into two halves in turn.
extern "C" __global__ void swap(Device d, const Word* source, long long words, Word* turns) {
    const Word launch = epoch(d, 0);
    const int peer = 1 - d.rank, slot = blockIdx.x;
    const long long first = words * blockIdx.x / gridDim.x, end = words * (blockIdx.x + 1) / gridDim.x;
    const long long half = (launch - 1) % 2 * words;
    put_signal<block>(d, peer, half + first, source + first, end - first, slot, launch);
    if (!wait<block>(d, peer, slot, launch)) return;
    if (block::rank() == 0) turns[blockIdx.x] = launch;
}
