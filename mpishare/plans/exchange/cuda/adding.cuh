// Sums of what arrives. The cells of an item are a region of a field: the same parts have a number for
// each of them. So a thread adds these to its cell in their order, whichever comes first.

// Where one part has the cells of a region.
struct Source {
    Part part;                      // their units: where they lie packed, or in the field itself
    char* packed;                   // as in `Item`; null: a rank's own ghosts, in the field
    long long parity_offset;
    const char* flags;              // of the part's first chunk; null: by LL
    unsigned long long* stalled_on; // as in `Item`
    unsigned chunk_nbytes;
    unsigned flag_nbytes; // from one flag to the next
};
static_assert(sizeof(Source) == Source_nbytes, "size of Source");

// The sources of an item, read at once by the last threads of a block, up to its next barrier: else
// each would wait for the one before.
struct Sources {
    static const int MOST = 8; // else they are read where they are
    const Source* begin;
    int count;

    __device__ __forceinline__ explicit Sources(const Item& item) : count(item.log_rows) {
        __shared__ Source near[MOST];
        begin = reinterpret_cast<const Source*>(item.target);
        if (count > MOST) return;
        const unsigned nwords = count * sizeof(Source) / sizeof(Word);
        for (unsigned i = blockDim.x - 1 - threadIdx.x; i < nwords; i += blockDim.x)
            reinterpret_cast<Word*>(near)[i] = reinterpret_cast<const Word*>(begin)[i];
        begin = near;
    }
};

// Waits by all threads of a block for the chunks that have an item's cells; false: aborted.
__device__ __forceinline__ bool wait_for_chunks(const Item& item, Sources sources, Wait wait) {
    bool is_ready = true;
    for (const Source* source = sources.begin; source < sources.begin + sources.count; ++source) {
        if (!source->flags) continue;
        wait.host.stalled_on = source->stalled_on;
        const long long last = offset_of(source->part, item.first + item.nunits - 1);
        const unsigned end = last / source->chunk_nbytes + 1;
        unsigned chunk = offset_of(source->part, item.first) / source->chunk_nbytes + threadIdx.x;
        for (; is_ready && chunk < end; chunk += blockDim.x) {
            const char* flag = source->flags + static_cast<long long>(chunk) * source->flag_nbytes;
            is_ready = wait_for(reinterpret_cast<const Word*>(flag), wait.epoch, wait);
        }
    }
    return __syncthreads_and(is_ready);
}

// The unit of LL that has a number: narrow ones share it.
template <int NBYTES>
struct UnitOf {
    typedef unsigned Type;
};
template <>
struct UnitOf<8> {
    typedef Word Type;
};

// Reads the numbers at bytes `at` of a packed part by LL; returns false if the wait was aborted.
template <class Number, int COUNT>
__device__ __forceinline__ bool get_numbers(
    char* packed, const long long* at, Wait wait, Number* numbers
) {
    typedef typename UnitOf<sizeof(Number)>::Type Unit;
    LL<Unit> words[COUNT];
    bool is_there[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
        is_there[k] = words[k].get(words_of<Unit>(packed, at[k] / sizeof(Unit)), wait.epoch << 32);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const Word* from = words_of<Unit>(packed, at[k] / sizeof(Unit));
        while (!is_there[k]) {
            if (!wait.keep_waiting()) return false;
            is_there[k] = words[k].get(from, wait.epoch << 32);
        }
        const Unit bits = words[k].value() >> 8 * (at[k] % sizeof(Unit));
        memcpy(numbers + k, &bits, sizeof(Number));
    }
    wait.end();
    return true;
}

// Units that a thread has in flight, each of two loads or more; 1 where all parts come by LL.
#ifndef ADD_DEPTH
#define ADD_DEPTH 2
#endif

// Adds to the cells of units `unit`, `unit` + blockDim.x, ..., COUNT of them in flight.
template <class Number, int COUNT>
__device__ __forceinline__ void add_units(
    const Item& item, Sources sources, unsigned unit, char* field, Wait wait
) {
    Number* cell[COUNT];
    Number sum[COUNT], arrived[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
        cell[k] = reinterpret_cast<Number*>(field + offset_of(item.part, unit + k * blockDim.x));
#pragma unroll
    for (int k = 0; k < COUNT; ++k) sum[k] = *cell[k];
    for (const Source* source = sources.begin; source < sources.begin + sources.count; ++source) {
        char* packed = source->packed + (wait.epoch & 1 ? source->parity_offset : 0);
        const bool is_own = !source->packed;
        if (is_own) packed = field;
        wait.host.stalled_on = source->stalled_on;
        long long at[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) at[k] = offset_of(source->part, unit + k * blockDim.x);
        if (is_own || source->flags) {
#pragma unroll
            for (int k = 0; k < COUNT; ++k)
                arrived[k] = *reinterpret_cast<Number*>(packed + at[k]);
        } else if (!get_numbers<Number, COUNT>(packed, at, wait, arrived)) return;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            sum[k] = static_cast<Number>(sum[k] + arrived[k]);
            if (is_own && !GIVING) *reinterpret_cast<Number*>(packed + at[k]) = Number();
        }
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) *cell[k] = sum[k];
    for (int n = 0; GIVING && n < sources.count; ++n) {
        const Source& source = sources.begin[n];
#pragma unroll
        for (int k = 0; k < COUNT && !source.packed; ++k)
            *reinterpret_cast<Number*>(field + offset_of(source.part, unit + k * blockDim.x)) = sum[k];
    }
}

// As many numbers as the widest load brings.
template <class Number>
struct __align__(16) Wide {
    Number at[16 / sizeof(Number)];
};
template <class Number>
__device__ __forceinline__ Wide<Number> operator+(Wide<Number> a, const Wide<Number>& b) {
#pragma unroll
    for (int n = 0; n < 16 / sizeof(Number); ++n) a.at[n] = static_cast<Number>(a.at[n] + b.at[n]);
    return a;
}

__device__ __forceinline__ bool is_run(const Part& part) {
    return part.axes == 1 && part.step[0] == part.unit;
}

// Adds the one part that most large regions have, where it arrives by flags and both lie in one
// piece; returns whether they do.
template <class Number>
__device__ __forceinline__ bool add_run(
    const Item& item, Sources sources, char* field, Word epoch
) {
    const Source* source = sources.begin;
    if (sources.count > 1 || !source->flags || !is_run(item.part) || !is_run(source->part))
        return false;
    const long long first = static_cast<long long>(item.first) * sizeof(Number);
    const unsigned nbytes = item.nunits * sizeof(Number);
    char* to = field + item.part.first + first;
    char* from = source->packed + (epoch & 1 ? source->parity_offset : 0);
    from += source->part.first + first;
    if ((reinterpret_cast<Word>(to) | reinterpret_cast<Word>(from) | nbytes) % 16) return false;
    const unsigned begin = 16 * threadIdx.x;
    copy_row<Wide<Number>, Wide<Number>, true>({from + begin, 16}, {to + begin, 16}, nbytes / 16);
    return true;
}

template <class Number>
__device__ __forceinline__ void add_numbers(
    const Item& item, Sources sources, Range range, char* field, Wait wait
) {
    if (ADD_DEPTH > 1 && add_run<Number>(item, sources, field, wait.epoch)) return;
    unsigned i = threadIdx.x;
    for (; i + (ADD_DEPTH - 1) * blockDim.x < range.nunits; i += ADD_DEPTH * blockDim.x)
        add_units<Number, ADD_DEPTH>(item, sources, range.first + i, field, wait);
    for (; ADD_DEPTH > 1 && i < range.nunits; i += blockDim.x)
        add_units<Number, 1>(item, sources, range.first + i, field, wait);
}

// Runs an item of kind ADD or SWAP_LL by all threads of a block. The plan has numbers of the types
// whose bits are set in ADDING.
__device__ __forceinline__ void add_region(
    const Item& item, Range range, char* field, char* packed, const Wait& wait
) {
    const Sources sources(item);
    if (GIVING && item.kind == SWAP_LL) put_cells(item, range, field, packed, wait.epoch);
    __syncthreads();
    if (ADD_DEPTH > 1 && !wait_for_chunks(item, sources, wait)) return;
#define CASE(element, Number)                                   \
    case element:                                               \
        if constexpr (ADDING >> element & 1)                    \
            add_numbers<Number>(item, sources, range, field, wait); \
        break;
    switch (item.element) { EACH_ADDED(CASE) }
#undef CASE
}
