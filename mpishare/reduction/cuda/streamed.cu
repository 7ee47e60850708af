// Where the GPU is shared by turns, or memory cannot be mapped: streams wait for other ranks, these
// kernels never do.
#include "elements.cuh"

// Copies a field to a row of elements, and counts the calls that this rank's GPU has begun.
extern "C" __global__ void pack(
    const __grid_constant__ Shape shape, char* field, Word first, Word count, Number* packed,
    unsigned long long* launches, volatile unsigned long long* started
) {
    if (started && blockIdx.x == 0 && threadIdx.x == 0) *started = ++*launches;
    const Word step = static_cast<Word>(gridDim.x) * blockDim.x;
    for (Word i = static_cast<Word>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        packed[i] = *element(field, shape, first + i);
}

// Folds the rows of all ranks in their order.
extern "C" __global__ void fold(
    const __grid_constant__ Shape shape, const __grid_constant__ Peers rows, char* field, Word first,
    Word count
) {
    const Word step = static_cast<Word>(gridDim.x) * blockDim.x;
    for (Word i = static_cast<Word>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        Number total = reinterpret_cast<const Number*>(rows.at[0])[i];
#pragma unroll
        for (int rank = 1; rank < RANKS; ++rank)
            total = combine(total, reinterpret_cast<const Number*>(rows.at[rank])[i]);
        *element(field, shape, first + i) = total;
    }
}
