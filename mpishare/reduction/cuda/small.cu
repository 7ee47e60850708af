// Small reductions: every rank sends its elements to everybody by LL, and folds everybody's.
//
// The buffer of a rank has a part for each parity of the epoch, and in it the elements of each rank.
// A rank overwrites what it sent at epoch e at epoch e + 2. By then its launch of e + 1 has ended,
// so it has had the words of e + 1 from every other rank; these sent them after their launches of e
// had ended, and with these all reads of e.
//
// A thread sends before it waits, and the threads of other ranks that it waits for are those of the
// same block. Blocks start in the order of their numbers, so one resident block per rank is enough
// for progress: the first block that has not ended on some rank has been sent by all that are ahead.
#include "elements.cuh"
#include "waiting.cuh"
#include "ll.cuh"

// Ranks whose words a thread has in flight.
const int BATCH = RANKS < 8 ? RANKS : 8;

extern "C" __global__ void __launch_bounds__(512) small(
    const __grid_constant__ Peers peers, const __grid_constant__ Shape shape, char* field,
    unsigned count, int me, State* state, const __grid_constant__ Host host
) {
    const Word epoch = epoch_of(state);
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        Number* at = element(field, shape, i);
        const LL mine = split(*at);
        const Word flag = epoch << 32;
        // In words: from parity to parity, from rank to rank, the element.
        const Word of_rank = static_cast<Word>(count) * WORDS;
        const Word here = (epoch & 1) * RANKS * of_rank + static_cast<Word>(i) * WORDS;
#pragma unroll
        for (int k = 1; k < RANKS; ++k) {
            const int to = me + k < RANKS ? me + k : me + k - RANKS;
            put_ll(reinterpret_cast<Word*>(peers.at[to]) + here + me * of_rank, mine, flag);
        }
        const Word* from = reinterpret_cast<const Word*>(peers.at[me]) + here;
        Wait wait(host, state, epoch);
        Number total = *at;
        bool is_whole = true;
#pragma unroll
        for (int first = 0; first < RANKS; first += BATCH) {
            LL words[BATCH];
            unsigned missing;
            do {
                missing = 0;
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    const int rank = first + k;
                    if (rank == me) words[k] = mine;
                    else if (rank < RANKS && !get_ll(from + rank * of_rank, words[k], flag))
                        missing |= 1 << k;
                }
                is_whole = !missing || wait.keep_waiting(first + __ffs(missing) - 1);
            } while (missing && is_whole);
            if (!is_whole) break;
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int rank = first + k;
                if (rank == 0) total = joined(words[k]);
                else if (rank < RANKS) total = combine(total, joined(words[k]));
            }
        }
        wait.end();
        if (is_whole) *at = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) count_launch(state);
}
