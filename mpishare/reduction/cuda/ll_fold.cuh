// An element that every rank sends to all others by LL, and folds with theirs.
#include "elements.cuh"
#include "ll.cuh"

typedef LL<Number> Words;

// Sends an element to all other ranks, to the word `at` of their buffers.
template <class T>
__device__ __forceinline__ void send_to_ranks(
    const LL<T>& mine, const Peers& peers, int me, Word at, Word flag
) {
#pragma unroll
    for (int k = 1; k < RANKS; ++k) {
        const int to = me + k < RANKS ? me + k : me + k - RANKS;
        mine.put(reinterpret_cast<Word*>(peers.at[to]) + at, flag);
    }
}

// Ranks whose words a thread has in flight.
const int BATCH = RANKS < 8 ? RANKS : 8;

// Folds an element, given those of my rank and where those of all ranks arrive, `stride` words from
// rank to rank. Returns whether the result is whole.
template <class OfRanks, class T>
__device__ __forceinline__ bool fold_ranks(
    const LL<T>& mine, const Word* from, Word stride, int me, Word flag, Wait& wait, T& total
) {
    OfRanks fold;
#pragma unroll
    for (int first = 0; first < RANKS; first += BATCH) {
        LL<T> words[BATCH];
        while (true) {
            unsigned missing = 0;
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const int rank = first + k;
                if (rank == me) words[k] = mine;
                else if (rank < RANKS && !words[k].get(from + rank * stride, flag))
                    missing |= 1 << k;
            }
            if (!missing) break;
            if (!wait.keep_waiting(first + __ffs(missing) - 1)) return false;
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            fold.add(total, first + k, words[k].value());
        }
    }
    fold.end(total);
    return true;
}
