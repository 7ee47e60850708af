// Rows of columns that go to other ranks: selected, packed and announced by one kernel, awaited and
// unpacked by another one.
//
// A slot has a header, then the columns of up to `room` rows. A rank has two slots for each of its
// keys, in its own memory, which the peer writes in even epochs and in odd ones. The peer overwrites
// a slot two epochs later: it has seen this rank's next epoch then, which followed the reads of the
// slot on this rank's stream.
//
// A tile is one word of 32 rows in a row: each warp moves one after another.
#include "wait.cuh"

const int MAX_KEYS = 32, MAX_LANES = 64, WARPS = 16, AHEAD = 8;
const int DROPPED = MAX_KEYS, STRANGER = MAX_KEYS + 1, GOALS = MAX_KEYS + 2, HOME = -1;
const unsigned CUT = 1u << 31;

// A word of each row: of this many bytes, in a column of the caller and in a slot.
struct Lane {
    char* column;
    unsigned slot, at, stride, nbytes; // `slot` is where the column begins, `at` the word in a row
    __device__ char* of_caller(Word row) const { return column + row * stride + at; }
    __device__ char* of_slot(char* rows, Word row) const { return rows + slot + row * stride + at; }
};
struct Lanes {
    Lane of[MAX_LANES + 1]; // the goals of a migration stand behind the last
    int count;
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
struct Key {
    char *theirs, *mine; // the slots for even epochs
    int peer, unused;
};
struct Sizes {
    const Key* keys;
    int nkeys;
    unsigned room;
    Word slot; // bytes
};
struct Header {
    Word count; // the epoch in the upper half; CUT if there were more rows
    Word credit; // how many rows the peer may send by a migration of the next epoch
};
const unsigned HEADER_NBYTES = 128;
// What stays from launch to launch.
struct Device {
    State state;
    unsigned barrier, packed, ended, withheld; // `withheld`: of the credit that was announced
    Word stays, kept, kept_side, stuck;
    unsigned holes, unused;
};
// For the host: the counts of all keys, then what went wrong since it looked.
struct Results {
    long long came[MAX_KEYS], sent[MAX_KEYS], stuck[MAX_KEYS];
    long long left, strangers, kept, cut, beyond, outside, epoch;
};
struct Scratch {
    unsigned *listed, *gone; // as many as there are rows: those away by warp, those that leave
    int* goes_to;            // slot and place of the latter, -1 for none
    unsigned* of_blocks;     // GOALS for each block
    char* shifted;           // a word a row, if order is kept
};

__device__ __forceinline__ void copy_word(char* to, const char* from, unsigned nbytes) {
    switch (nbytes) {
        case 16: *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from); break;
        case 8: *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(from); break;
        case 4: *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from); break;
        case 2: *reinterpret_cast<short*>(to) = *reinterpret_cast<const short*>(from); break;
        default: *to = *from;
    }
}

__device__ __forceinline__ unsigned warp_of_grid() {
    return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}

// Calls `move` with a lane and a row, for each of them.
template <class Move>
__device__ __forceinline__ void for_tiles(unsigned rows, unsigned lanes, Move move) {
    const Word tiles = static_cast<Word>((rows + 31) / 32) * lanes;
    for (Word tile = warp_of_grid(); tile < tiles; tile += gridDim.x * (blockDim.x / 32)) {
        const unsigned row = static_cast<unsigned>(tile / lanes) * 32 + threadIdx.x % 32;
        if (row < rows) move(static_cast<unsigned>(tile % lanes), row);
    }
}

__device__ __forceinline__ char* slot_of(char* even, const Sizes& sizes, Word epoch) {
    return even + (epoch & 1) * sizes.slot;
}

// Waits for all blocks of this launch, as cooperative groups do: all of them have room at once.
__device__ __forceinline__ void meet(unsigned* barrier) {
    __syncthreads();
    if (gridDim.x > 1 && threadIdx.x == 0) {
        __threadfence();
        const unsigned mine = blockIdx.x ? 1 : CUT - (gridDim.x - 1);
        const unsigned before = atomicAdd(barrier, mine);
        while (!((before ^ *const_cast<volatile unsigned*>(barrier)) & CUT)) {}
        __threadfence();
    }
    __syncthreads();
}

// Whether this block is the last one that comes here.
__device__ __forceinline__ bool is_last(unsigned* done) {
    __shared__ bool found;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        found = atomicAdd(done, 1) == gridDim.x - 1;
        if (found) *done = 0;
        __threadfence_system();
    }
    __syncthreads();
    return found;
}

// Announces the rows of all keys, once every block has packed its own.
__device__ __forceinline__ void announce(
    const Sizes& sizes, Device* device, Results* results, Word epoch, const unsigned* counts,
    bool are_cut
) {
    if (!is_last(&device->packed)) return;
    const unsigned key = threadIdx.x, room = sizes.room, nkeys = sizes.nkeys;
    // What is kept, and what may come now, has room in twice what all may send.
    const Word taken = device->kept + static_cast<Word>(nkeys) * (room - device->withheld);
    const Word all = 2ull * nkeys * room, free = taken < all ? (all - taken) / nkeys : 0;
    const unsigned credit = free < room ? static_cast<unsigned>(free) : room;
    __syncthreads();
    if (key >= nkeys) return;
    if (key == 0) device->withheld = room - credit;
    const bool is_cut = are_cut && counts[key] > room;
    const Word count = counts[key] < room ? counts[key] : room;
    results->sent[key] = count;
    if (is_cut) results->cut = 1;
    Header* header = reinterpret_cast<Header*>(slot_of(sizes.keys[key].theirs, sizes, epoch));
    header->credit = credit;
    __threadfence_system();
    store_release(&header->count, epoch << 32 | (is_cut ? CUT : 0) | count);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) send_rows(
    const Sizes sizes, const __grid_constant__ Lanes lanes, const __grid_constant__ Spans spans,
    long long nrows, Device* device, Results* results
) {
    __shared__ unsigned counts[MAX_KEYS], begins[MAX_KEYS + 1];
    __shared__ long long lows[MAX_KEYS];
    const Word epoch = epoch_of(&device->state);
    if (threadIdx.x < sizes.nkeys) {
        const Span& span = spans.of[threadIdx.x];
        long long low = span.low.get(), high = span.high.get();
        if (low < 0 || high < low || high > (span.numbers ? span.most : nrows)) {
            results->outside = 1;
            low = high = 0;
        }
        lows[threadIdx.x] = low;
        counts[threadIdx.x] = static_cast<unsigned>(high - low);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        begins[0] = 0;
        for (int key = 0; key < sizes.nkeys; ++key)
            begins[key + 1] = begins[key] + min(counts[key], sizes.room);
    }
    __syncthreads();
    for_tiles(begins[sizes.nkeys], lanes.count, [&](unsigned at, unsigned place) {
        int key = 0;
        while (place >= begins[key + 1]) ++key;
        const Span& span = spans.of[key];
        const unsigned i = place - begins[key];
        long long row = lows[key] + i;
        if (span.numbers)
            row = span.nbytes == 4 ? static_cast<const int*>(span.numbers)[i]
                                   : static_cast<const long long*>(span.numbers)[i];
        if (row < 0 || row >= nrows) {
            results->outside = 1;
            return;
        }
        const Lane& lane = lanes.of[at];
        char* slot = slot_of(sizes.keys[key].theirs, sizes, epoch) + HEADER_NBYTES;
        copy_word(lane.of_slot(slot, i), lane.of_caller(row), lane.nbytes);
    });
    announce(sizes, device, results, epoch, counts, true);
    if (threadIdx.x == 0) count_launch(&device->state);
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
            const char* mine = sizes.keys[threadIdx.x].mine;
            const Header* last =
                reinterpret_cast<const Header*>(slot_of(const_cast<char*>(mine), sizes, epoch - 1));
            rooms[threadIdx.x] = epoch == 1 ? sizes.room
                                            : min(sizes.room, static_cast<unsigned>(last->credit));
        }
    }
    meet(&device->barrier);
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
    const unsigned stays = count - ngone;
    for_listed(part, scratch.listed, to, goal_of, nranks,
               [&](unsigned row, int goal, unsigned rank, unsigned same) {
                   const unsigned place = goal == HOME ? 0 : of_warps[warp][goal] + rank;
                   const bool goes = goal != HOME && place < rooms[goal];
                   const unsigned all = __ballot_sync(~0u, goes);
                   if (goes) {
                       const unsigned at = first + __popc(all & ((1u << lane) - 1));
                       scratch.gone[at] = row;
                       scratch.goes_to[at] = goal == DROPPED ? -1 : static_cast<int>(goal * sizes.room + place);
                   }
                   first += __popc(all);
                   const unsigned holes = __popc(__ballot_sync(~0u, goes && row < stays));
                   if (lane == 0 && holes) atomicAdd(&device->holes, holes);
                   __syncwarp();
                   if (goal != HOME && rank == 0) of_warps[warp][goal] += same;
                   __syncwarp();
               });
    meet(&device->barrier);

    // --- packed
    for_tiles(ngone, lanes.count, [&](unsigned at, unsigned place) {
        const int where = scratch.goes_to[place];
        if (where < 0) return;
        const Lane& lane = lanes.of[at];
        const unsigned key = where / sizes.room, i = where % sizes.room;
        char* slot = slot_of(sizes.keys[key].theirs, sizes, epoch) + HEADER_NBYTES;
        copy_word(lane.of_slot(slot, i), lane.of_caller(scratch.gone[place]), lane.nbytes);
    });
    __syncthreads();
    if (threadIdx.x < GOALS) before[threadIdx.x] = min(totals[threadIdx.x], rooms[threadIdx.x]);
    announce(sizes, device, results, epoch, before, false);

    // --- the gaps closed: each thread overwrites only words that it packed itself
    const unsigned holes = *const_cast<volatile unsigned*>(&device->holes);
    if (!scratch.shifted) {
        for_tiles(holes, lanes.count, [&](unsigned at, unsigned place) {
            const Lane& lane = lanes.of[at];
            const unsigned from = filler_of(place, scratch.gone, ngone, count);
            copy_word(lane.of_caller(scratch.gone[place]), lane.of_caller(from), lane.nbytes);
        });
        for_tiles(holes, 1, [&](unsigned, unsigned place) {
            to[scratch.gone[place]] = to[filler_of(place, scratch.gone, ngone, count)];
        });
    } else if (ngone) {
        meet(&device->barrier);
        const unsigned start = scratch.gone[0];
        for (int at = 0; at <= lanes.count; ++at) { // the goals too
            const Lane& lane = lanes.of[at];
            for_tiles(stays > start ? stays - start : 0, 1, [&](unsigned, unsigned place) {
                const unsigned from = stayer_of(start + place, scratch.gone, ngone);
                copy_word(scratch.shifted + static_cast<Word>(place) * 16, lane.of_caller(from),
                          lane.nbytes);
            });
            meet(&device->barrier);
            for_tiles(stays > start ? stays - start : 0, 1, [&](unsigned, unsigned place) {
                copy_word(lane.of_caller(start + place),
                          scratch.shifted + static_cast<Word>(place) * 16, lane.nbytes);
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

// Waits for all peers, then places the rows of the keys from `first` to `last` one after another.
// With `kept`, for a migration: what was kept comes first, and what has no room is kept.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) take_rows(
    const Sizes sizes, const __grid_constant__ Lanes lanes, int first, int last, const Bound given,
    Word capacity, long long* count_at, char* kept, int* to, int me, Device* device,
    Results* results, const Host host
) {
    __shared__ unsigned counts[MAX_KEYS], begins[MAX_KEYS + 2];
    const Word epoch = epoch_of(&device->state) - 1;
    bool has_come = true;
    if (threadIdx.x < sizes.nkeys) {
        const Key& key = sizes.keys[threadIdx.x];
        const Word* word = &reinterpret_cast<Header*>(slot_of(key.mine, sizes, epoch))->count;
        Wait wait(host, &device->state.aborted, epoch);
        Word seen;
        while (has_come && ((seen = load_acquire(word)) ^ epoch << 32) >> 32)
            has_come = wait.keep_waiting(key.peer);
        if (wait.polls >= POLLS_PER_HOST_CHECK) host.stalled_on[key.peer] = 0;
        const unsigned count = static_cast<unsigned>(seen);
        counts[threadIdx.x] = count & ~CUT;
        if (blockIdx.x == 0 && has_come) {
            results->came[threadIdx.x] = count & ~CUT;
            results->epoch = epoch;
            if (count & CUT) results->cut = 1;
        }
    }
    if (!__syncthreads_and(has_come)) return;
    const unsigned was_kept = kept ? static_cast<unsigned>(device->kept) : 0;
    if (threadIdx.x == 0) {
        begins[0] = was_kept; // behind it key `first`
        for (int key = first; key < last; ++key)
            begins[key - first + 1] = begins[key - first] + counts[key];
    }
    __syncthreads();
    const unsigned all = begins[last - first];
    const Word base = kept ? device->stays : static_cast<Word>(given.get());
    const Word room = base < capacity ? capacity - base : 0;
    const unsigned fits = all < room ? all : static_cast<unsigned>(room);
    // Of what is kept there are two sides, each for twice what all peers may send.
    const Word side = (sizes.slot - HEADER_NBYTES) * sizes.nkeys * 2;
    char* old_side = kept + device->kept_side * side;
    char* new_side = kept + (device->kept_side ^ 1) * side;
    for_tiles(all, lanes.count, [&](unsigned at, unsigned place) {
        const Lane& lane = lanes.of[at];
        // On a side a column begins at so many times its place in a slot.
        const Word of_side = static_cast<Word>(lane.slot) * (sizes.nkeys * 2 - 1);
        const char* from;
        if (place < was_kept) {
            from = lane.of_slot(old_side + of_side, place);
        } else {
            int at_key = 0;
            while (place >= begins[at_key + 1]) ++at_key;
            char* slot = slot_of(sizes.keys[first + at_key].mine, sizes, epoch) + HEADER_NBYTES;
            from = lane.of_slot(slot, place - begins[at_key]);
        }
        if (place < fits) copy_word(lane.of_caller(base + place), from, lane.nbytes);
        else if (kept) copy_word(lane.of_slot(new_side + of_side, place - fits), from, lane.nbytes);
    });
    if (to)
        for_tiles(fits, 1, [&](unsigned, unsigned place) { to[base + place] = me; });
    if (is_last(&device->ended) && threadIdx.x == 0) {
        if (count_at) *count_at = base + fits;
        if (kept) {
            device->kept = results->kept = all - fits;
            device->kept_side ^= 1;
            results->left = device->stuck + all - fits;
        } else if (fits < all) {
            results->beyond += all - fits;
        }
    }
}
