// Between nodes: a rank packs its node's result, NCCL moves it, and a fold combines those of all nodes.
#include "elements.cuh"
#include "epochs.cuh"

// Copies a field to a row of elements, and begins an epoch, if `epochs` is given.
extern "C" __global__ void pack(
    const __grid_constant__ Shape shape, char* field, Word count, Number* row, Epochs* epochs,
    volatile Word* begun
) {
    if (epochs) begin_epoch(epochs, begun);
    const Word step = static_cast<Word>(gridDim.x) * blockDim.x;
    for (Word i = static_cast<Word>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        row[i] = *element(field, shape, i);
}

// Folds rows into a field in their order, and ends the epoch, if `epochs` is given.
extern "C" __global__ void fold(
    const __grid_constant__ Shape shape, const __grid_constant__ Peers rows, char* field, Word count,
    Epochs* epochs, volatile Word* done
) {
    const Word epoch = epochs ? end_epoch(epochs) : 0;
    const Word step = static_cast<Word>(gridDim.x) * blockDim.x;
    for (Word i = static_cast<Word>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        Number total;
        Fold fold;
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank)
            fold.add(total, rank, reinterpret_cast<const Number*>(rows.at[rank])[i]);
        fold.end(total);
        *element(field, shape, i) = total;
    }
    if (epochs) publish_epoch(epochs, done, epoch);
}
