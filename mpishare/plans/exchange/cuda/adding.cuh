// Sums of what arrives. The cells of an item are a region of a field: the same parts have a number for
// each of them. So a thread adds these to its cell in their order, whichever comes first.

// Where one part has the cells of a region. GIVING: the cells of a region are one of its sources, and
// all that a rank has in its field get the sum, others by `put`.
struct Source {
    Part part;                      // their units: where they lie packed, or in the field itself
    char* packed;                   // as in `Item`; null: a rank's own cells, in the field
    long long parity_offset;
    const char* flags;              // of the part's first chunk; null: by LL
    unsigned long long* stalled_on; // as in `Item`
    char* put;                      // where the sum is sent by LL; null: nowhere
    long long put_parity_offset;
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

// Waits by all threads of a block for the chunks that have some cells; false: aborted.
__device__ __forceinline__ bool wait_for_chunks(Range range, Sources sources, Wait wait) {
    bool is_ready = true;
    for (const Source* source = sources.begin; source < sources.begin + sources.count; ++source) {
        if (!source->flags) continue;
        wait.host.stalled_on = source->stalled_on;
        const long long last = offset_of(source->part, range.first + range.nunits - 1);
        const unsigned end = last / source->chunk_nbytes + 1;
        unsigned chunk = offset_of(source->part, range.first) / source->chunk_nbytes + threadIdx.x;
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
    for (int k = 0; !GIVING && k < COUNT; ++k)
        cell[k] = reinterpret_cast<Number*>(field + offset_of(item.part, unit + k * blockDim.x));
#pragma unroll
    for (int k = 0; !GIVING && k < COUNT; ++k) sum[k] = *cell[k];
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
            const bool is_first = GIVING && source == sources.begin;
            sum[k] = is_first ? arrived[k] : static_cast<Number>(sum[k] + arrived[k]);
            if (is_own && !GIVING) *reinterpret_cast<Number*>(packed + at[k]) = Number();
        }
    }
#pragma unroll
    for (int k = 0; !GIVING && k < COUNT; ++k) *cell[k] = sum[k];
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
    const Item& item, Sources sources, Range range, char* field, Word epoch
) {
    // GIVING: of the two sources one is the cells, in either place.
    const Source* source = sources.begin + (GIVING && !sources.begin->packed);
    const Part& cells = GIVING ? sources.begin[!!sources.begin->packed].part : item.part;
    if (sources.count > 1 + GIVING || !source->flags || !is_run(cells) || !is_run(source->part))
        return false;
    const long long first = static_cast<long long>(range.first) * sizeof(Number);
    const unsigned nbytes = range.nunits * sizeof(Number);
    char* to = field + cells.first + first;
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
    if (GIVING) { // the cells in wide units
        const unsigned count = item.part.unit / sizeof(Number);
        range = {range.first * count, range.nunits * count};
    }
    if (ADD_DEPTH > 1 && !wait_for_chunks(range, sources, wait)) return;
    if (ADD_DEPTH > 1 && add_run<Number>(item, sources, range, field, wait.epoch)) return;
    unsigned i = threadIdx.x;
    for (; i + (ADD_DEPTH - 1) * blockDim.x < range.nunits; i += ADD_DEPTH * blockDim.x)
        add_units<Number, ADD_DEPTH>(item, sources, range.first + i, field, wait);
    for (; ADD_DEPTH > 1 && i < range.nunits; i += blockDim.x)
        add_units<Number, 1>(item, sources, range.first + i, field, wait);
}

// Runs an item of kind ADD or SWAP by all threads of a block. The plan has numbers of the types
// whose bits are set in ADDING.
__device__ __forceinline__ void add_region(
    const Item& item, Range range, char* field, char* packed, const Wait& wait
) {
    const Sources sources(item);
    if (GIVING && item.kind == SWAP && !item.flag) put_cells(item, range, field, packed, wait.epoch);
    __syncthreads();
#define CASE(element, Number)                                   \
    case element:                                               \
        if constexpr (ADDING >> element & 1)                    \
            add_numbers<Number>(item, sources, range, field, wait); \
        break;
    switch (item.element) { EACH_ADDED(CASE) }
#undef CASE
    for (int n = 0; GIVING && n < sources.count; ++n) {
        const Source& source = sources.begin[n];
        if (!source.put) continue;
        __syncthreads(); // all of the sums are in the field
        char* put = source.put + (wait.epoch & 1 ? source.put_parity_offset : 0);
        put_cells(item, range, field, put, wait.epoch);
    }
}
