// Where the GPU is shared by turns, or memory cannot be mapped: streams wait for other ranks, these
// kernels never do.
#include "elements.cuh"
#include "epochs.cuh"

// Copies a field to a row of elements, and begins an epoch, if `epochs` is given. `parity` is in
// bytes, from the buffer of even epochs to that of odd ones.
extern "C" __global__ void pack(
    const __grid_constant__ Shape shape, char* field, Word first, Word count, char* row, Word parity,
    Epochs* epochs, volatile Word* begun
) {
    const Word epoch = epochs ? begin_epoch(epochs, begun) : 0;
    Number* packed = reinterpret_cast<Number*>(row + (epoch & 1) * parity);
    const Word step = static_cast<Word>(gridDim.x) * blockDim.x;
    for (Word i = static_cast<Word>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        packed[i] = *element(field, shape, first + i);
}

// Folds the rows of all ranks in their order, and ends the epoch, if `epochs` is given.
extern "C" __global__ void fold(
    const __grid_constant__ Shape shape, const __grid_constant__ Peers rows, char* field, Word first,
    Word count, Word parity, Epochs* epochs, volatile Word* done
) {
    const Word epoch = epochs ? end_epoch(epochs) : 0, here = (epoch & 1) * parity;
    const Word step = static_cast<Word>(gridDim.x) * blockDim.x;
    for (Word i = static_cast<Word>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        Number total;
        Fold fold;
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank)
            fold.add(total, rank, reinterpret_cast<const Number*>(rows.at[rank] + here)[i]);
        fold.end(total);
        *element(field, shape, first + i) = total;
    }
    if (epochs) publish_epoch(epochs, done, epoch);
}
