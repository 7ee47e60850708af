// Large reductions: reduce-scatter and all-gather by stores into the other ranks' staging buffers.
//
// Each rank owns a slice of the elements, cut into chunks. SEND stores a chunk of a peer's slice
// there; REDUCE folds a chunk of my slice in rank order, and stores it into my field and to all
// peers; RECV copies a chunk of a peer's slice into my field. Chunks travel by plain stores, with
// one flag per chunk (release at the sender, acquire at the receiver).
//
// No buffer is doubled. A rank overwrites a chunk that it sent to s once its last launch has ended:
// it has had s's reduced chunk then, which s sent after it had read this one. It overwrites a
// reduced chunk at s once it has had s's chunk of the same epoch, so after the last launch of s.
//
// Blocks take items by tickets, in an order in which each is sent before it is waited for, alike on
// all ranks: so one resident block per rank is enough for progress.
#include "elements.cuh"
#include "wait.cuh"

#define SEND 0u
#define REDUCE 1u
#define RECV 2u
#define END 3u

// An item: kind, peer and chunk in 32 bits.
const unsigned KIND_SHIFT = 30, PEER_SHIFT = 20;

// Elements move in packs of 16 bytes.
const int PER_PACK = 16 / sizeof(Number);
struct __align__(16) Pack {
    Number at[PER_PACK];
};

// Packs that a thread has in flight.
const int IN_FLIGHT = FORM != ROW || sizeof(Fold) > 16 ? 1 : RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1;

// Elements whose place is computed at once: more of them would make the kernel many times as large.
const int UNROLLED = PER_PACK <= 4 ? PER_PACK : 1;

// The staging buffers, alike on all ranks: flags and packs of sent chunks, of reduced chunks. A part
// per sender in each, mine left out.
struct Staging {
    Word count;        // elements
    Word slice;        // packs
    unsigned chunk;    // packs
    unsigned chunks;   // per slice
    Word sent_flags, reduced_flags, sent, reduced; // byte offsets
};
#ifdef Staging_nbytes
static_assert(sizeof(Staging) == Staging_nbytes, "size of Staging");
#endif

const unsigned FLAG_NBYTES = 32;

struct Launch {
    const Peers& peers;
    const Staging& staging;
    const Shape& shape;
    char* field;
    Word first; // the element of the field that is the first of this launch
    int me;
    bool is_vector; // the field is a row of aligned packs

    __device__ __forceinline__ Pack load(Word pack) const {
        Pack found;
        if (FORM == ROW && is_vector && (pack + 1) * PER_PACK <= staging.count) {
            Number* at = element(field, shape, first + pack * PER_PACK);
            uint4 bits = *reinterpret_cast<uint4*>(at);
            memcpy(&found, &bits, sizeof found);
            return found;
        }
#pragma unroll UNROLLED
        for (int k = 0; k < PER_PACK; ++k) {
            const Word i = pack * PER_PACK + k;
            found.at[k] = i < staging.count ? *element(field, shape, first + i) : Number();
        }
        return found;
    }
    __device__ __forceinline__ void store(Word pack, const Pack& data) const {
        if (FORM == ROW && is_vector && (pack + 1) * PER_PACK <= staging.count) {
            uint4 bits;
            memcpy(&bits, &data, sizeof bits);
            *reinterpret_cast<uint4*>(element(field, shape, first + pack * PER_PACK)) = bits;
            return;
        }
#pragma unroll UNROLLED
        for (int k = 0; k < PER_PACK; ++k) {
            const Word i = pack * PER_PACK + k;
            if (i < staging.count) *element(field, shape, first + i) = data.at[k];
        }
    }
    // The part of a sender in a receiver's buffer: that of the receiver itself is left out.
    static __device__ __forceinline__ Word part(int sender, int receiver) {
        return sender < receiver ? sender : sender - 1;
    }
    __device__ __forceinline__ uint4* sent(int sender, int receiver) const {
        char* at = peers.at[receiver] + staging.sent;
        return reinterpret_cast<uint4*>(at) + part(sender, receiver) * staging.slice;
    }
    __device__ __forceinline__ uint4* reduced(int sender, int receiver) const {
        char* at = peers.at[receiver] + staging.reduced;
        return reinterpret_cast<uint4*>(at) + part(sender, receiver) * staging.slice;
    }
    __device__ __forceinline__ Word* flag(Word flags, int sender, int receiver, Word chunk) const {
        const Word index = part(sender, receiver) * staging.chunks + chunk;
        return reinterpret_cast<Word*>(peers.at[receiver] + flags + index * FLAG_NBYTES);
    }
};

// Calls `move(first, count)` until all packs have been moved, `IN_FLIGHT` or one at a time by a thread.
template <class Move>
__device__ __forceinline__ void each_pack(unsigned count, const Move& move) {
    unsigned k = threadIdx.x;
    for (; k + (IN_FLIGHT - 1) * blockDim.x < count; k += IN_FLIGHT * blockDim.x)
        move.template packs<IN_FLIGHT>(k);
    for (; k < count; k += blockDim.x) move.template packs<1>(k);
}

struct Send {
    const Launch& launch;
    Word begin; // of the chunk, in packs of the field
    uint4* to;

    template <int COUNT>
    __device__ __forceinline__ void packs(unsigned k) const {
        Pack data[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) data[j] = launch.load(begin + k + j * blockDim.x);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            uint4 bits;
            memcpy(&bits, &data[j], sizeof bits);
            to[k + j * blockDim.x] = bits;
        }
    }
};

struct Recv {
    const Launch& launch;
    Word begin;
    uint4* from;

    template <int COUNT>
    __device__ __forceinline__ void packs(unsigned k) const {
        uint4 bits[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) bits[j] = from[k + j * blockDim.x];
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            Pack data;
            memcpy(&data, &bits[j], sizeof data);
            launch.store(begin + k + j * blockDim.x, data);
        }
    }
};

struct Reduce {
    const Launch& launch;
    Word begin;
    Word in_slice; // the chunk's first pack in its slice

    template <int COUNT>
    __device__ __forceinline__ void packs(unsigned k) const {
        Pack total[COUNT];
        Fold fold[COUNT][PER_PACK];
        // All loads before the folds, up to a number that the registers hold.
        const int BATCH = RANKS < 4 ? RANKS : 4;
#pragma unroll 1
        for (int first = 0; first < RANKS; first += BATCH) {
            Pack data[BATCH][COUNT];
#pragma unroll
            for (int r = 0; r < BATCH; ++r)
#pragma unroll
                for (int j = 0; j < COUNT; ++j) {
                    const unsigned at = k + j * blockDim.x;
                    if (first + r == launch.me) data[r][j] = launch.load(begin + at);
                    else if (first + r < RANKS) {
                        uint4 bits = launch.sent(first + r, launch.me)[in_slice + at];
                        memcpy(&data[r][j], &bits, sizeof bits);
                    }
                }
#pragma unroll
            for (int r = 0; r < BATCH; ++r)
#pragma unroll
                for (int j = 0; j < COUNT; ++j)
#pragma unroll
                    for (int e = 0; e < PER_PACK; ++e)
                        fold[j][e].add(total[j].at[e], first + r, data[r][j].at[e]);
        }
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
#pragma unroll
            for (int e = 0; e < PER_PACK; ++e) fold[j][e].end(total[j].at[e]);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const unsigned at = k + j * blockDim.x;
            launch.store(begin + at, total[j]);
            uint4 bits;
            memcpy(&bits, &total[j], sizeof bits);
#pragma unroll
            for (int r = 1; r < RANKS; ++r) {
                const int to = launch.me + r < RANKS ? launch.me + r : launch.me + r - RANKS;
                launch.reduced(launch.me, to)[in_slice + at] = bits;
            }
        }
    }
};

// Waits for a chunk of `peer`, or of all peers; returns in all threads whether it is there.
__device__ __forceinline__ bool wait_for_chunk(
    const Launch& launch, Word flags, int first, int last, Word chunk, State* state,
    const Host& host, Word epoch
) {
    bool is_ready = true;
    for (int rank = first + threadIdx.x; rank < last; rank += blockDim.x) {
        if (rank == launch.me) continue;
        const Word* flag = launch.flag(flags, rank, launch.me, chunk);
        Wait wait(host, &state->aborted, epoch);
        while (is_ready && is_below(flag, epoch)) is_ready = wait.keep_waiting(rank);
        wait.end(RANKS);
    }
    return __syncthreads_and(is_ready);
}

__device__ __forceinline__ void run_item(
    const Launch& launch, unsigned item, State* state, const Host& host, Word epoch
) {
    const Staging& staging = launch.staging;
    const unsigned kind = item >> KIND_SHIFT;
    const int peer = item >> PEER_SHIFT & ((1 << (KIND_SHIFT - PEER_SHIFT)) - 1), me = launch.me;
    const Word chunk = item & ((1 << PEER_SHIFT) - 1), in_slice = chunk * staging.chunk;
    const Word slice = static_cast<Word>(kind == REDUCE ? me : peer) * staging.slice;
    const Word packs = (staging.count + PER_PACK - 1) / PER_PACK;
    // The last slices may be shorter, or empty.
    const Word left_in_slice = staging.slice - in_slice, begin = slice + in_slice;
    const Word left = begin < packs ? packs - begin : 0;
    Word count = left < left_in_slice ? left : left_in_slice;
    count = count < staging.chunk ? count : staging.chunk;
    if (kind == SEND) {
        each_pack(count, Send{launch, begin, launch.sent(me, peer) + in_slice});
        __syncthreads();
        // Releases the stores of the whole block: the barrier orders them before this one.
        if (threadIdx.x == 0) store_release(launch.flag(staging.sent_flags, me, peer, chunk), epoch);
    } else if (kind == REDUCE) {
        if (!wait_for_chunk(launch, staging.sent_flags, 0, RANKS, chunk, state, host, epoch)) return;
        each_pack(count, Reduce{launch, begin, in_slice});
        __syncthreads();
        for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x)
            if (rank != me)
                store_release(launch.flag(staging.reduced_flags, me, rank, chunk), epoch);
    } else {
        const Word flags = staging.reduced_flags;
        if (wait_for_chunk(launch, flags, peer, peer + 1, chunk, state, host, epoch))
            each_pack(count, Recv{launch, begin, launch.reduced(peer, me) + in_slice});
    }
}

extern "C" __global__ void __launch_bounds__(512, 2) large(
    const __grid_constant__ Peers peers, const __grid_constant__ Shape shape,
    const __grid_constant__ Staging staging, char* field, Word first, const unsigned* items,
    unsigned count, int me, State* state, const __grid_constant__ Host host
) {
    __shared__ unsigned shared_item;
    const bool is_vector = (reinterpret_cast<Word>(field) + first * sizeof(Number)) % 16 == 0;
    const Launch launch = {peers, staging, shape, field, first, me, is_vector};
    const Word epoch = epoch_of(state);
    unsigned ticket = threadIdx.x ? 0 : atomicAdd(&state->tickets, 1);
    while (true) {
        if (threadIdx.x == 0) shared_item = ticket < count ? items[ticket] : END << KIND_SHIFT;
        __syncthreads();
        const unsigned item = shared_item;
        if (item >> KIND_SHIFT == END) break;
        // The next one is fetched meanwhile. It is not begun before this one has ended, and blocks
        // take tickets in order: so the first item that has not ended is always under way.
        if (threadIdx.x == 0) ticket = atomicAdd(&state->tickets, 1);
        run_item(launch, item, state, host, epoch);
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        // Each block takes one ticket beyond the items.
        if (ticket == count + gridDim.x - 1) state->tickets = 0;
        count_launch(state);
    }
}
