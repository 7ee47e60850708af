// Rows of columns that go to other ranks: selected, packed and announced by one kernel, awaited and
// unpacked by another one.
//
// A slot has the columns of up to `room` rows, or of `scale` times as many. A rank has two slots and
// two headers for each of its keys, in its own memory, which the peer writes in even epochs and in
// odd ones. The peer overwrites a slot two epochs later: it has seen this rank's next epoch then,
// which followed the reads of the slot on this rank's stream. Keys of other nodes have one slot and one
// header, with which a message of NCCL begins: its place is in graphs.
//
// Started rows that do not fit into a slot follow in rounds, in the kernel that waits: the peer tells
// which rounds it has taken, in the header of what it sends.
//
// A tile is a few words of 32 rows in a row: each warp moves one after another.
#include "grid.cuh"
#include "wait.cuh"

const int MAX_KEYS = 32, MAX_LANES = 64, WARPS = 16, AHEAD = 8, AT_ONCE = 4;
const int DROPPED = MAX_KEYS, STRANGER = MAX_KEYS + 1, GOALS = MAX_KEYS + 2, HOME = -1;
const unsigned POLLS_OF_MEETING = 64; // which last as long as a look of a whole block
const unsigned ALL = ~0u, SEND = 1, TAKE = 2;
const int NO_ROUNDS = 0, ROUNDS = 1, LAST_ROUNDS = 2, MIGRATION = 3;

// A word of each row: of this many bytes, in a column of the caller and in a slot.
struct Lane {
    char* column;
    unsigned slot, at, stride, nbytes; // `slot` is where the column begins, `at` the word in a row
    __device__ char* of_caller(Word row) const { return column + row * stride + at; }
    __device__ char* of_slot(char* rows, Word scale, Word row) const {
        return rows + slot * scale + row * stride + at;
    }
};
struct Lanes {
    Lane of[MAX_LANES + 1]; // the goals of a migration stand behind the last
    unsigned count;         // of a row: with several sets of columns, one set behind the other
};
// The set of columns that takes the rows of each key, -1 for none, and how many rows each set has.
struct Into {
    int set[MAX_KEYS];
    Word capacity[MAX_KEYS];
};
// A number of the caller, or of the GPU.
struct Bound {
    Word at;
    long long value;
    int nbytes, unused;
    __device__ long long get() const {
        if (!at) return value;
        return nbytes == 4 ? *reinterpret_cast<const int*>(at)
                           : *reinterpret_cast<const long long*>(at);
    }
};
struct Span {
    Bound low, high;
    const void* numbers;
    int nbytes, most; // of a number; how many there are
};
struct Spans {
    Span of[MAX_KEYS];
};
struct Header {
    Word count;       // the epoch in the upper half
    Word credit;      // how many rows the peer may send by a migration of the next epoch
    Word wanted;      // how many there are, though they may not all be sent
    Word rows, scale; // where they are, 0 for the first slots
    Word round;       // of the epoch: how many rounds were sent
    Word taken;       // of the other direction: how many were read, ALL if none will be
};
const unsigned HEADER_NBYTES = 128, OFFER_NBYTES = 512, GOES = 3;
struct Key {
    char *theirs, *mine, *mine_rows; // headers and the first slots, for even epochs
    char* rows;                      // the slots of the peer, and their address there if larger
    Word there;
    int peer;
    unsigned scale; // of the slots of the peer
    Word odd;       // 1, 0 where odd epochs have the places of even ones: of other nodes
    __device__ Header* header(char* even, Word epoch) const {
        return reinterpret_cast<Header*>(even + (epoch & odd) * HEADER_NBYTES);
    }
};
struct Table { // of the host, which changes it on the stream
    char* kept; // what a migration keeps
    Word most;  // how many rows it grants a peer
    volatile Word *begun, *done; // words of the host for epochs, where NCCL takes rows
    Key keys[MAX_KEYS];
};
struct Sizes {
    const Table* table;
    // For the host: at a distance of OFFER_NBYTES how many rows came, where these were too many, and
    // GOES words behind how many went by NCCL.
    Word* needed;
    int nkeys;
    unsigned room;
    Word slot; // bytes
};
// What stays from launch to launch.
struct Device {
    State state;
    unsigned barrier, packed, ended, credit; // `credit`: that of the last epoch
    Word stays, kept, kept_side, stuck;
    unsigned holes, goes_on;
    unsigned given[MAX_KEYS], taken[MAX_KEYS], todo[MAX_KEYS]; // rounds
    // What was started, if it takes rounds.
    Lanes lanes;
    Spans spans;
    long long lows[MAX_KEYS], nrows;
};
// For the host: the counts of all keys, where rows are, then what went wrong since it looked.
struct Results {
    long long came[MAX_KEYS], sent[MAX_KEYS], stuck[MAX_KEYS], at[MAX_KEYS], scale[MAX_KEYS];
    long long left, strangers, kept, cut, beyond, outside, epoch;
};
struct Scratch {
    unsigned *listed, *gone; // as many as there are rows: those away by warp, those that leave
    int* goes_to;            // slot and place of the latter, -1 for none
    unsigned* of_blocks;     // GOALS for each block
    char* shifted;           // a word a row, if order is kept
};

union Bytes {
    uint4 of16;
    Word of8;
    unsigned of4;
    unsigned short of2;
    unsigned char of1;
};

__device__ __forceinline__ void copy_bytes(Bytes* to, const Bytes* from, unsigned nbytes) {
    switch (nbytes) {
        case 16: to->of16 = from->of16; break;
        case 8: to->of8 = from->of8; break;
        case 4: to->of4 = from->of4; break;
        case 2: to->of2 = from->of2; break;
        default: to->of1 = from->of1;
    }
}

__device__ __forceinline__ Bytes* as_bytes(char* address) { return reinterpret_cast<Bytes*>(address); }

// Copies some words of a row, from the lane `first` of a set on: where a function of each lane says.
template <class From, class To>
__device__ __forceinline__ void copy_words(
    const Lanes& lanes, unsigned set, unsigned first, From from, To to
) {
    Bytes words[AT_ONCE]; // all are read before one is written: a read takes long
#pragma unroll
    for (unsigned i = 0; i < AT_ONCE; ++i) {
        const Lane& lane = lanes.of[set * lanes.count + first + i];
        if (first + i < lanes.count) copy_bytes(&words[i], as_bytes(from(lane)), lane.nbytes);
    }
#pragma unroll
    for (unsigned i = 0; i < AT_ONCE; ++i) {
        const Lane& lane = lanes.of[set * lanes.count + first + i];
        if (first + i < lanes.count) copy_bytes(as_bytes(to(lane)), &words[i], lane.nbytes);
    }
}

// Calls `move` with the first of the lanes that are moved at once, and a row, for each of them.
template <class Move>
__device__ __forceinline__ void for_tiles(unsigned rows, unsigned lanes, Move move) {
    const unsigned groups = (lanes + AT_ONCE - 1) / AT_ONCE;
    const Word tiles = static_cast<Word>((rows + 31) / 32) * groups;
    for (Word tile = warp_of_grid(); tile < tiles; tile += gridDim.x * (blockDim.x / 32)) {
        const unsigned row = static_cast<unsigned>(tile / groups) * 32 + threadIdx.x % 32;
        if (row < rows) move(static_cast<unsigned>(tile % groups) * AT_ONCE, row);
    }
}

// The slot of the peer to which a key leads.
__device__ __forceinline__ char* slot_of(const Key& key, const Sizes& sizes, Word epoch) {
    return key.rows + (epoch & key.odd) * key.scale * sizes.slot;
}

__device__ __forceinline__ bool meet(Device* device) {
    return meet(&device->barrier, &device->state.aborted);
}

// Announces the rows of the keys, once every block has packed its own.
__device__ __forceinline__ void announce(
    const Sizes& sizes, Device* device, Results* results, Word epoch, const unsigned* counts,
    const unsigned* wanted, unsigned keys
) {
    if (!is_last(&device->packed)) return;
    const unsigned at = threadIdx.x, nkeys = sizes.nkeys;
    // What is kept, and what may come now, has room in twice what all may send.
    const Word last = epoch == 1 ? sizes.room : device->credit;
    const Word taken = device->kept + nkeys * last, all = 2 * nkeys * sizes.table->most;
    const Word free = taken < all ? (all - taken) / nkeys : 0;
    const Word most = free < sizes.table->most ? free : sizes.table->most;
    const Word credit = keys == ALL ? most : device->credit;
    __syncthreads();
    if (at >= nkeys || !(keys >> at & 1)) return;
    if (at == 0) {
        device->credit = static_cast<unsigned>(credit);
        if (sizes.table->begun) *sizes.table->begun = epoch;
    }
    const Key& key = sizes.table->keys[at];
    device->given[at] = 1, device->taken[at] = 0;
    results->sent[at] = counts[at];
    Header* header = key.header(key.theirs, epoch);
    header->credit = credit, header->wanted = wanted[at], header->scale = key.scale;
    header->rows = key.there ? key.there + (epoch & 1) * key.scale * sizes.slot : 0;
    if (!key.odd && wanted[at] > sizes.room * key.scale)
        sizes.needed[at * (OFFER_NBYTES / 8) + GOES] = wanted[at];
    store_release(&header->count, epoch << 32 | counts[at]);
}

// Copies some words of a row of a span to a slot, from the row `begin` of those for the key on.
__device__ __forceinline__ void pack_words(
    const Span& span, long long low, Word begin, unsigned i, long long nrows, const Lanes& lanes,
    unsigned first, char* slot, unsigned scale, Results* results
) {
    long long row = low + begin + i;
    if (span.numbers)
        row = span.nbytes == 4 ? static_cast<const int*>(span.numbers)[row]
                               : static_cast<const long long*>(span.numbers)[row];
    if (row < 0 || row >= nrows) results->outside = 1;
    else
        copy_words(lanes, 0, first, [&](const Lane& lane) { return lane.of_caller(row); },
                   [&](const Lane& lane) { return lane.of_slot(slot, scale, i); });
}

// With `keys` other than ALL: once more, for keys whose slots are larger now.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) send_rows(
    const Sizes sizes, const __grid_constant__ Lanes lanes, const __grid_constant__ Spans spans,
    long long nrows, unsigned keys, Device* device, Results* results
) {
    __shared__ unsigned counts[MAX_KEYS], begins[MAX_KEYS + 1];
    __shared__ long long lows[MAX_KEYS];
    const Word epoch = epoch_of(&device->state) - (keys != ALL);
    bool is_more = false;
    if (threadIdx.x < sizes.nkeys) {
        const Span& span = spans.of[threadIdx.x];
        long long low = span.low.get(), high = span.high.get();
        if (low < 0 || high < low || high > (span.numbers ? span.most : nrows)) {
            results->outside = 1;
            low = high = 0;
        }
        lows[threadIdx.x] = low;
        counts[threadIdx.x] = keys >> threadIdx.x & 1 ? static_cast<unsigned>(high - low) : 0;
        is_more = counts[threadIdx.x] > sizes.room * sizes.table->keys[threadIdx.x].scale;
    }
    is_more = __syncthreads_or(is_more);
    if (threadIdx.x == 0) {
        begins[0] = 0;
        for (int key = 0; key < sizes.nkeys; ++key)
            begins[key + 1] = begins[key] + min(counts[key], sizes.room * sizes.table->keys[key].scale);
        if (is_more && blockIdx.x == 0)
            device->lanes = lanes, device->spans = spans, device->nrows = nrows;
    }
    __syncthreads();
    if (is_more && blockIdx.x == 0 && threadIdx.x < sizes.nkeys)
        device->lows[threadIdx.x] = lows[threadIdx.x];
    for_tiles(begins[sizes.nkeys], lanes.count, [&](unsigned first, unsigned place) {
        int at = 0;
        while (place >= begins[at + 1]) ++at;
        const Key& key = sizes.table->keys[at];
        pack_words(spans.of[at], lows[at], 0, place - begins[at], nrows, lanes, first,
                   slot_of(key, sizes, epoch), key.scale, results);
    });
    announce(sizes, device, results, epoch, counts, counts, keys);
    if (threadIdx.x == 0 && keys == ALL) count_launch(&device->state);
}

// How many of `count` places a condition holds for, which holds for the first ones.
template <class Holds>
__device__ __forceinline__ unsigned count_first(unsigned count, Holds holds) {
    unsigned low = 0, high = count;
    while (low < high) {
        const unsigned middle = (low + high) / 2;
        if (holds(middle)) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The row that fills a gap: the last but `gap` of those that stay, of which there are `rows` with
// those that leave. Of the ones that leave from its place on there are as many as have at most `gap`
// staying rows behind them.
__device__ __forceinline__ unsigned filler_of(
    unsigned gap, const unsigned* gone, unsigned ngone, unsigned rows
) {
    return rows - 1 - gap - count_first(ngone, [&](unsigned at) {
        return rows - 1 - gone[ngone - 1 - at] - at <= gap;
    });
}

// The row that stays at a place, where order is kept.
__device__ __forceinline__ unsigned stayer_of(unsigned place, const unsigned* gone, unsigned ngone) {
    return place + count_first(ngone, [&](unsigned at) { return gone[at] - at <= place; });
}

// What a warp knows of its rows, all of them in one part of the columns.
struct Part {
    unsigned begin, end, found;
};

// Lists the rows of a warp that are not at home, upwards.
__device__ __forceinline__ Part list_away(
    const int* to, unsigned count, unsigned* listed, int me
) {
    const unsigned warps = gridDim.x * WARPS, lane = threadIdx.x % 32;
    const unsigned rows = ((count + warps - 1) / warps + 31) / 32 * 32;
    const Word first = static_cast<Word>(warp_of_grid()) * rows;
    Part part;
    part.begin = first < count ? static_cast<unsigned>(first) : count;
    part.end = first + rows < count ? static_cast<unsigned>(first + rows) : count;
    part.found = 0;
    for (unsigned from = part.begin; from < part.end; from += 32 * AHEAD) {
        int goals[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const unsigned row = from + 32 * i + lane;
            goals[i] = row < part.end ? to[row] : me;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const unsigned away = __ballot_sync(~0u, goals[i] != me);
            if (!away) continue;
            if (goals[i] != me)
                listed[part.begin + part.found + __popc(away & ((1u << lane) - 1))] =
                    from + 32 * i + lane;
            part.found += __popc(away);
        }
    }
    __syncwarp();
    return part;
}

// Calls `use` for 32 listed rows at once: the row, its goal, how many of the same goal come before
// it and how many there are; all threads of a warp, the goal is HOME for those without a row.
template <class Use>
__device__ __forceinline__ void for_listed(
    const Part& part, const unsigned* listed, const int* to, const int* goal_of, int nranks, Use use
) {
    const unsigned lane = threadIdx.x % 32;
    for (unsigned from = 0; from < part.found; from += 32) {
        const bool is_row = from + lane < part.found;
        const unsigned row = is_row ? listed[part.begin + from + lane] : 0;
        int goal = HOME;
        if (is_row) {
            const int rank = to[row];
            goal = rank < -1 || rank >= nranks ? STRANGER : goal_of[rank + 1];
        }
        const unsigned same = __match_any_sync(~0u, goal);
        use(row, goal, __popc(same & ((1u << lane) - 1)), __popc(same));
    }
}

// Adds up what all blocks counted, and what those before this one did. For all threads.
__device__ __forceinline__ void sum_blocks(
    const unsigned* of_blocks, unsigned* totals, unsigned* before
) {
    const unsigned lane = threadIdx.x % 32;
    for (int goal = threadIdx.x / 32; goal < GOALS; goal += WARPS) {
        unsigned total = 0, earlier = 0;
        for (unsigned block = lane; block < gridDim.x; block += 32) {
            const unsigned count = of_blocks[block * GOALS + goal];
            total += count;
            if (block < blockIdx.x) earlier += count;
        }
        for (int step = 16; step; step /= 2) {
            total += __shfl_down_sync(~0u, total, step);
            earlier += __shfl_down_sync(~0u, earlier, step);
        }
        if (lane == 0) totals[goal] = total, before[goal] = earlier;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) migrate_rows(
    const Sizes sizes, const __grid_constant__ Lanes lanes, int* to, const Bound given,
    unsigned capacity, const int* goal_of, int nranks, int me, const Scratch scratch,
    Device* device, Results* results
) {
    __shared__ unsigned of_warps[WARPS][GOALS], totals[GOALS], before[GOALS], rooms[GOALS];
    const Word epoch = epoch_of(&device->state);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long asked = given.get();
    const bool is_outside = asked < 0 || asked > capacity;
    const unsigned count = is_outside ? (asked < 0 ? 0 : capacity) : static_cast<unsigned>(asked);

    // --- which rows are away, and how many go where
    for (int goal = lane; goal < GOALS; goal += 32) of_warps[warp][goal] = 0;
    __syncwarp();
    const Part part = list_away(to, count, scratch.listed, me);
    for_listed(part, scratch.listed, to, goal_of, nranks,
               [&](unsigned, int goal, unsigned rank, unsigned same) {
                   if (goal != HOME && rank == 0) of_warps[warp][goal] += same;
                   __syncwarp();
               });
    __syncthreads();
    if (threadIdx.x < GOALS) { // into what the warps before had
        unsigned total = 0;
        for (int each = 0; each < WARPS; ++each) {
            const unsigned mine = of_warps[each][threadIdx.x];
            of_warps[each][threadIdx.x] = total;
            total += mine;
        }
        scratch.of_blocks[blockIdx.x * GOALS + threadIdx.x] = total;
        // How many may leave: all that are dropped, none that have no peer.
        rooms[threadIdx.x] = threadIdx.x == DROPPED ? ~0u : 0;
        if (threadIdx.x < sizes.nkeys) {
            const Key& key = sizes.table->keys[threadIdx.x];
            const Word credit = epoch == 1 ? sizes.room : key.header(key.mine, epoch - 1)->credit;
            rooms[threadIdx.x] = min(sizes.room * key.scale, static_cast<unsigned>(credit));
        }
    }
    if (!meet(device)) return;
    sum_blocks(scratch.of_blocks, totals, before);

    // --- their places
    unsigned ngone = 0, stuck = 0, first = 0;
    for (int goal = 0; goal < GOALS; ++goal) {
        const unsigned mine = before[goal] + of_warps[warp][goal], room = rooms[goal];
        ngone += min(totals[goal], room);
        first += min(mine, room);
        stuck += totals[goal] - min(totals[goal], room);
    }
    __syncwarp();
    for (int goal = lane; goal < GOALS; goal += 32) of_warps[warp][goal] += before[goal];
    __syncwarp();
    const unsigned stays = count - ngone, stride = ~TOP / max(1, sizes.nkeys);
    for_listed(part, scratch.listed, to, goal_of, nranks,
               [&](unsigned row, int goal, unsigned rank, unsigned same) {
                   const unsigned place = goal == HOME ? 0 : of_warps[warp][goal] + rank;
                   const bool goes = goal != HOME && place < rooms[goal];
                   const unsigned all = __ballot_sync(~0u, goes);
                   if (goes) {
                       const unsigned at = first + __popc(all & ((1u << lane) - 1));
                       scratch.gone[at] = row;
                       scratch.goes_to[at] = goal == DROPPED ? -1 : static_cast<int>(goal * stride + place);
                   }
                   first += __popc(all);
                   const unsigned holes = __popc(__ballot_sync(~0u, goes && row < stays));
                   if (lane == 0 && holes) atomicAdd(&device->holes, holes);
                   __syncwarp();
                   if (goal != HOME && rank == 0) of_warps[warp][goal] += same;
                   __syncwarp();
               });
    if (!meet(device)) return;

    // --- packed
    for_tiles(ngone, lanes.count, [&](unsigned first, unsigned place) {
        const int where = scratch.goes_to[place];
        if (where < 0) return;
        const Key& key = sizes.table->keys[where / stride];
        const unsigned row = scratch.gone[place];
        char* slot = slot_of(key, sizes, epoch);
        copy_words(lanes, 0, first, [&](const Lane& lane) { return lane.of_caller(row); },
                   [&](const Lane& lane) { return lane.of_slot(slot, key.scale, where % stride); });
    });
    __syncthreads();
    if (threadIdx.x < GOALS) before[threadIdx.x] = min(totals[threadIdx.x], rooms[threadIdx.x]);
    announce(sizes, device, results, epoch, before, totals, ALL);

    // --- the gaps closed: each thread overwrites only words that it packed itself
    const unsigned holes = *const_cast<volatile unsigned*>(&device->holes);
    if (!scratch.shifted) {
        for_tiles(holes, lanes.count, [&](unsigned first, unsigned place) {
            const unsigned from = filler_of(place, scratch.gone, ngone, count);
            const unsigned hole = scratch.gone[place];
            copy_words(lanes, 0, first, [&](const Lane& lane) { return lane.of_caller(from); },
                       [&](const Lane& lane) { return lane.of_caller(hole); });
        });
        for_tiles(holes, 1, [&](unsigned, unsigned place) {
            to[scratch.gone[place]] = to[filler_of(place, scratch.gone, ngone, count)];
        });
    } else if (ngone) {
        if (!meet(device)) return;
        const unsigned start = scratch.gone[0];
        const unsigned behind = stays > start ? stays - start : 0;
        Bytes* shifted = as_bytes(scratch.shifted);
        for (unsigned at = 0; at <= lanes.count; ++at) { // the goals too
            const Lane& lane = lanes.of[at];
            for_tiles(behind, 1, [&](unsigned, unsigned place) {
                const unsigned from = stayer_of(start + place, scratch.gone, ngone);
                copy_bytes(shifted + place, as_bytes(lane.of_caller(from)), lane.nbytes);
            });
            if (!meet(device)) return;
            for_tiles(behind, 1, [&](unsigned, unsigned place) {
                copy_bytes(as_bytes(lane.of_caller(start + place)), shifted + place, lane.nbytes);
            });
        }
    }
    if (is_last(&device->ended)) {
        if (threadIdx.x < sizes.nkeys)
            results->stuck[threadIdx.x] =
                totals[threadIdx.x] - min(totals[threadIdx.x], rooms[threadIdx.x]);
        if (threadIdx.x == 0) {
            device->stays = stays, device->stuck = stuck, device->holes = 0;
            results->strangers = totals[STRANGER];
            if (is_outside) results->outside = 1;
        }
    }
    if (threadIdx.x == 0) count_launch(&device->state);
}

// Where the rows of a key are.
struct Arrived {
    char* rows;
    unsigned count, scale;
};

// What block 0 does between two rounds, a thread for each key: it tells the peers what was done in
// the last one, and waits until something can be done for any key.
__device__ __forceinline__ void find_round(
    const Sizes& sizes, const Arrived* arrived, bool is_mine, bool is_last_launch, unsigned& step,
    Device* device, Results* results, const Host& host, Word epoch
) {
    const unsigned at = threadIdx.x;
    const Key& key = sizes.table->keys[at < sizes.nkeys ? at : 0];
    const bool is_key = at < sizes.nkeys && key.odd;
    Header *mine = key.header(key.mine, epoch), *theirs = key.header(key.theirs, epoch);
    const Word tag = epoch << 32, room = sizes.room * key.scale;
    unsigned given = device->given[at % MAX_KEYS], taken = device->taken[at % MAX_KEYS];
    bool sends = false, takes = false, is_any, is_open;
    if (is_key && arrived[at].count > sizes.room * arrived[at].scale) {
        if (step & TAKE) ++taken;
        else if (is_last_launch && !taken) taken = ALL, results->cut = 1;
        if (taken) store_release(&theirs->taken, tag | taken);
        takes = is_mine && static_cast<Word>(taken) * sizes.room * arrived[at].scale < arrived[at].count;
    }
    if (step & SEND) store_release(&theirs->round, tag | ++given);
    if (is_key && given != ALL) sends = given * room < results->sent[at];
    Wait wait(host, &device->state.aborted, epoch);
    do {
        const Word seen = sends ? load_acquire(&mine->taken) : 0;
        if (seen == (tag | ALL)) given = ALL, results->cut = 1, sends = false;
        step = sends && seen >= (tag | given) ? SEND : 0;
        if (takes && load_acquire(&mine->round) > (tag | taken)) step |= TAKE;
        is_any = __syncthreads_or(step);
        is_open = __syncthreads_or(takes || (is_last_launch && sends));
        if (!is_any && (takes || sends)) {
            wait.polls += POLLS_OF_MEETING - 1;
            is_open &= wait.keep_waiting(key.peer);
        }
        is_open = __syncthreads_and(is_open);
    } while (!is_any && is_open);
    if (wait.polls >= POLLS_PER_HOST_CHECK) host.stalled_on[key.peer] = 0;
    if (at < sizes.nkeys) device->given[at] = given, device->taken[at] = taken, device->todo[at] = step;
    if (at == 0) device->goes_on = is_any;
}

// Trades rounds behind the first until all that comes for the keys of a launch is placed, and in the
// last launch of a call all that goes is sent. Peers whose rows have no place by then are told so.
template <class Put>
__device__ __forceinline__ void trade_rounds(
    const Sizes& sizes, const Arrived* arrived, bool is_mine, bool is_last_launch,
    Device* device, Results* results, const Host& host, Word epoch, unsigned nlanes, Put put
) {
    const volatile Device& now = *device;
    for (unsigned step = is_mine ? TAKE : 0;;) {
        __threadfence_system();
        if (!meet(device)) return;
        if (blockIdx.x == 0)
            find_round(sizes, arrived, is_mine, is_last_launch, step, device, results, host, epoch);
        if (!meet(device) || !now.goes_on) return;
        for (int at_key = 0; at_key < sizes.nkeys; ++at_key) {
            const Key& key = sizes.table->keys[at_key];
            const Arrived& from = arrived[at_key];
            const unsigned todo = now.todo[at_key];
            const Word room = sizes.room * key.scale, begin = now.given[at_key] * room;
            const Word sent = results->sent[at_key];
            if (todo & SEND)
                for_tiles(min(room, sent - begin), device->lanes.count, [&](unsigned first, unsigned i) {
                    pack_words(device->spans.of[at_key], device->lows[at_key], begin, i,
                               device->nrows, device->lanes, first, slot_of(key, sizes, epoch),
                               key.scale, results);
                });
            const Word slot = sizes.room * from.scale, done = now.taken[at_key] * slot;
            if (todo & TAKE)
                for_tiles(min(slot, from.count - done), nlanes, [&](unsigned first, unsigned i) {
                    put(first, at_key, done + i, i);
                });
        }
    }
}

// Waits for all peers, then places the rows of keys, in each set of columns one after another. For a
// migration: what was kept comes first, and what has no room is kept. Other kinds of launches trade no
// rounds, or rounds amid a call or in its last launch.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) take_rows(
    const Sizes sizes, const __grid_constant__ Lanes lanes, const __grid_constant__ Into into,
    int kind, const Bound given, long long* count_at, int* to, int me, Device* device,
    Results* results, const Host host
) {
    // By key, of all rows and of those of its set; by set, how many rows come, and have room.
    __shared__ unsigned begins[MAX_KEYS + 1], starts[MAX_KEYS], totals[MAX_KEYS], fits[MAX_KEYS];
    __shared__ Arrived arrived[MAX_KEYS];
    const Word epoch = epoch_of(&device->state) - 1;
    const bool keeps = kind == MIGRATION;
    bool has_come = true, is_more = false;
    if (threadIdx.x < sizes.nkeys) {
        const unsigned at = threadIdx.x;
        const Key& key = sizes.table->keys[at];
        Header* header = key.header(key.mine, epoch);
        Wait wait(host, &device->state.aborted, epoch);
        Word seen;
        while (has_come && ((seen = load_acquire(&header->count)) ^ epoch << 32) >> 32)
            has_come = wait.keep_waiting(key.peer);
        if (wait.polls >= POLLS_PER_HOST_CHECK) host.stalled_on[key.peer] = 0;
        if (has_come) {
            char* rows = header->rows ? reinterpret_cast<char*>(header->rows)
                                      : key.mine_rows + (epoch & key.odd) * sizes.slot;
            arrived[at] = {rows, static_cast<unsigned>(seen), static_cast<unsigned>(header->scale)};
            const Word room = sizes.room * header->scale;
            is_more = arrived[at].count > room || results->sent[at] > sizes.room * key.scale;
            if (is_more && !key.odd) { // it takes no rounds: the others do not come
                is_more = false;
                arrived[at].count = min(arrived[at].count, static_cast<unsigned>(room));
                if (blockIdx.x == 0 && kind != NO_ROUNDS) results->cut = 1;
            }
            if (blockIdx.x == 0) {
                results->came[at] = arrived[at].count;
                results->at[at] = reinterpret_cast<long long>(rows);
                results->scale[at] = header->scale;
                results->epoch = epoch;
                if (header->wanted > room) sizes.needed[at * (OFFER_NBYTES / 8)] = header->wanted;
            }
        }
    }
    if (!__syncthreads_and(has_come)) return;
    is_more = __syncthreads_or(is_more);
    const unsigned was_kept = keeps ? static_cast<unsigned>(device->kept) : 0;
    const Word base = keeps ? device->stays : static_cast<Word>(given.get());
    const int nsets = max(1, sizes.nkeys);
    if (threadIdx.x == 0) {
        for (int set = 0; set < nsets; ++set) totals[set] = 0;
        begins[0] = totals[0] = was_kept; // behind it the first key
        for (int key = 0; key < sizes.nkeys; ++key) {
            const int set = into.set[key];
            const unsigned count = set < 0 ? 0 : arrived[key].count;
            begins[key + 1] = begins[key] + count;
            if (set >= 0) starts[key] = totals[set], totals[set] += count;
        }
        for (int set = 0; set < nsets; ++set) {
            const Word room = base < into.capacity[set] ? into.capacity[set] - base : 0;
            fits[set] = totals[set] < room ? totals[set] : static_cast<unsigned>(room);
        }
    }
    __syncthreads();
    // Of what is kept there are two sides, each for twice what all peers may send.
    const Word side = sizes.table->most / sizes.room * sizes.nkeys * 2;
    char* old_side = sizes.table->kept + device->kept_side * side * sizes.slot;
    char* new_side = sizes.table->kept + (device->kept_side ^ 1) * side * sizes.slot;
    // Some words of a row of a set, from a slot.
    const auto place = [&](int set, unsigned first, Word row, char* slot, Word scale, Word i) {
        const auto from = [&](const Lane& lane) { return lane.of_slot(slot, scale, i); };
        const Word beyond = row - fits[set];
        if (row < fits[set])
            copy_words(lanes, set, first, from,
                       [&](const Lane& lane) { return lane.of_caller(base + row); });
        else if (keeps)
            copy_words(lanes, set, first, from,
                       [&](const Lane& lane) { return lane.of_slot(new_side, side, beyond); });
    };
    const auto put = [&](unsigned first, int key, Word row, unsigned i) {
        const Arrived& origin = arrived[key];
        place(into.set[key], first, starts[key] + row, origin.rows, origin.scale, i);
    };
    for_tiles(begins[sizes.nkeys], lanes.count, [&](unsigned first, unsigned row) {
        if (row < was_kept) {
            place(0, first, row, old_side, side, row);
            return;
        }
        int key = 0;
        while (row >= begins[key + 1]) ++key;
        const unsigned i = row - begins[key];
        if (i < sizes.room * arrived[key].scale) put(first, key, i, i);
    });
    if ((kind == ROUNDS || kind == LAST_ROUNDS) && is_more) {
        const bool is_mine = threadIdx.x < sizes.nkeys && into.set[threadIdx.x] >= 0;
        trade_rounds(sizes, arrived, is_mine, kind == LAST_ROUNDS, device, results, host, epoch,
                     lanes.count, put);
    }
    if (keeps)
        for_tiles(fits[0], 1, [&](unsigned, unsigned row) { to[base + row] = me; });
    if (is_last(&device->ended) && threadIdx.x == 0) {
        if (count_at) *count_at = base + fits[0];
        if (sizes.table->done && kind != NO_ROUNDS) *sizes.table->done = epoch;
        if (keeps) {
            device->kept = results->kept = totals[0] - fits[0];
            device->kept_side ^= 1;
            results->left = device->stuck + totals[0] - fits[0];
        }
        for (int set = 0; set < nsets && !keeps; ++set)
            results->beyond += totals[set] - fits[set];
    }
}
