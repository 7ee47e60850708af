// Small reductions: every rank sends its elements to all others by LL, and folds those of all.
//
// The buffer of a rank has a part for each parity of the epoch, and in it the elements of each rank.
// A rank overwrites what it sent at epoch e at epoch e + 2. By then its launch of e + 1 has ended,
// so it has had the words of e + 1 from every other rank; these sent them after their launches of e
// had ended, and with these all reads of e.
//
// A thread sends all of its elements before it waits, and the threads of other ranks that it waits
// for are those of the same block. Blocks start in the order of their numbers, so one resident block
// per rank is enough for progress: the first block that has not ended on some rank has been sent by
// all that are ahead.
#include "ll_fold.cuh"

extern "C" __global__ void __launch_bounds__(512) small(
    const __grid_constant__ Peers peers, const __grid_constant__ Shape shape, char* field,
    unsigned count, int me, State* state, const __grid_constant__ Host host
) {
    const Word epoch = epoch_of(state), flag = epoch << 32;
    const unsigned begin = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    // In words: from rank to rank, and where this epoch's begin.
    const Word stride = static_cast<Word>(count) * Words::COUNT, here = (epoch & 1) * RANKS * stride;
    Words mine;
    for (unsigned i = begin; i < count; i += step) {
        const Words words = Words::of(*element(field, shape, i));
        if (i == begin) mine = words;
        const Word at = here + me * stride + static_cast<Word>(i) * Words::COUNT;
        send_to_ranks(words, peers, me, at, flag);
    }
    const Word* buffer = reinterpret_cast<const Word*>(peers.at[me]) + here;
    Wait wait(host, &state->aborted, epoch);
    for (unsigned i = begin; i < count; i += step) {
        Number* at = element(field, shape, i);
        if (i != begin) mine = Words::of(*at);
        Number total;
        const Word* from = buffer + static_cast<Word>(i) * Words::COUNT;
        if (!fold_ranks<Fold>(mine, from, stride, me, flag, wait, total)) break;
        *at = total;
    }
    wait.end(RANKS);
    __syncthreads();
    if (threadIdx.x == 0) count_launch(state);
}
