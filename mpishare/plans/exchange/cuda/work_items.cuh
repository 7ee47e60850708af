// Work items: which cells of a field are copied, and to where. work_items.py writes the records.
#include "numbers.cuh"

#ifndef NFIELDS
#define NFIELDS 1
#endif
// Units that a thread has in flight. More than one pays where ranks share a GPU, since each then has
// few blocks; many blocks keep memory busy by themselves.
#ifndef DEPTH
#define DEPTH 1
#endif
#ifndef TILED
#define TILED 0
#endif
// Whether some cells are computed with (scaled.cuh), and whether some parts are cut at each call.
#ifndef SCALED
#define SCALED 0
#endif
#ifndef SLIDING
#define SLIDING 0
#endif
// Where what arrives is added (adding.cuh): a bit for each type of numbers.
#ifndef ADDING
#define ADDING 0
#endif
// Whether sums go to all copies of a cell (given_back.py): a block may then run several items.
#ifndef GIVING
#define GIVING 0
#endif
// Whether some rows of tiles are stored backwards.
#ifndef REVERSED
#define REVERSED 0
#endif

// The cells of one field in one message, in the order in which they travel: units of `unit` bytes,
// last axis fastest.
struct Part {
    long long first;         // byte offset from the field's first element
    long long step[8];       // bytes along each axis
    // The indices along the axis `along`, -1 of what is cut off; unused where `along` is -1.
    const long long* places;
    unsigned extent[8];
    int axes;
    int along;
    int field;
    int unit;
};

enum Kind { PACK, PACK_AND_ZERO, LOCAL, UNPACK, PUT_LL, GET_LL, READY, PUT_LL_AND_ZERO, ADD, SWAP_LL };

// A chunk of a part, and where it lies packed. The part is embedded, so that one read of global
// memory brings all of it.
struct __align__(16) Item {
    Part part;
    char* packed;                   // first unit of the part in the buffer of even epochs
    long long parity_offset;        // from there to the buffer of odd epochs
    unsigned long long* flag;       // PACK, UNPACK: holds the epoch once the chunk is there
    unsigned long long* stalled_on; // of what may wait: tells the host for which peer
    const Part* target; // LOCAL: the destination; sums: the packed cells, of ADD as `Source`s;
                        // fused: Ghosts or null
                        // of a scaled item: one that has factors behind it (scaled.cuh)
    unsigned first;
    unsigned nunits;
    int kind;
    int element;                    // the type in which units are summed; scaled: 256 more
    int log_rows, log_columns;      // of tiles, where the receiver's order is another; else 0
                                    // ADD: the first is the number of sources
    unsigned next, more;            // GIVING: so many items, from `next` on, follow in this block
    char unused[8];                 // as structs are of whole 16 bytes
};

// Where the buffer of an epoch has the first unit of an item's part.
__device__ __forceinline__ char* packed_of(const Item& item, unsigned long long epoch) {
    return item.packed + (epoch & 1 ? item.parity_offset : 0);
}

// The cells of a receiver that a sender on the same GPU may store into, without staging, at
// exchanges at which the receiver says so.
struct Ghosts {
    Part part;
    char* field;               // of the receiver, as this rank maps it
    unsigned long long* ready; // twice the epoch, plus 1 where they may be stored into
};

// The sizes of the NumPy records come with the compiler options; a test compares the offsets, since
// not every NVRTC in use has __builtin_offsetof.
static_assert(sizeof(Part) == Part_nbytes, "size of Part");
static_assert(sizeof(Item) == Item_nbytes, "size of Item");
static_assert(sizeof(Ghosts) == Ghosts_nbytes, "size of Ghosts");

struct Fields {
    char* at[NFIELDS];
};

// Byte offset of a unit in its field; -1 of one that is cut off. Not unrolled: that makes the kernels
// six times as large and no faster.
__device__ __forceinline__ long long offset_of(const Part& part, unsigned unit) {
    long long at = part.first;
#pragma unroll 1
    for (int axis = part.axes - 1; axis >= 0; --axis) {
        unsigned rest = axis ? unit / part.extent[axis] : 0;
        unsigned here = unit - rest * part.extent[axis];
        unit = rest;
        const long long place = axis == part.along ? part.places[here] : here;
        if (SLIDING && place < 0) return -1;
        at += part.step[axis] * place;
    }
    return at;
}

#ifdef WIRE
#include "wire.cuh"
#else
const int ROW_DEPTH = DEPTH > 1 ? DEPTH : 2; // units in flight of cells that lie in a row
const int MIN_ROW_UNIT = 8;

// The bytes of a unit where it lies packed.
__device__ __forceinline__ int packed_unit(const Part& part) { return part.unit; }

// What is stored for a unit that was read.
template <class To, class From>
__device__ __forceinline__ To carried(From unit) { return unit; }

template <class Number>
__device__ __forceinline__ Number packed_number(const char* packed) {
    return *reinterpret_cast<const Number*>(packed);
}
#endif

template <class From, class To, int COUNT>
__device__ __forceinline__ void copy_units(char* const* from, char* const* to, bool zeroes) {
    From unit[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
        if (!SLIDING || from[k]) unit[k] = *reinterpret_cast<From*>(from[k]);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        if (SLIDING && !from[k]) continue;
        *reinterpret_cast<To*>(to[k]) = carried<To>(unit[k]);
        if (zeroes) *reinterpret_cast<From*>(from[k]) = From();
    }
}

#ifdef WIRE
// From field to field numbers are rounded all the same.
template <class Number, int COUNT, bool SCATTERS>
__device__ __forceinline__ void copy_numbers(int kind, char* const* from, char* const* to) {
    if (SCATTERS) copy_units<Number, Number, COUNT>(from, to, false);
    else if (kind == UNPACK) copy_units<Wire, Number, COUNT>(from, to, false);
    else copy_units<Number, Wire, COUNT>(from, to, kind == PACK_AND_ZERO);
}
#endif

// Copies units i, i + blockDim.x, ... of an item, COUNT of them in flight, by one thread. SCATTERS:
// `other` is a field, with cells `item.target`; else the packed cells.
template <int COUNT, bool SCATTERS>
__device__ __forceinline__ void copy_units_of(
    const Item& item, char* field, char* other, unsigned i
) {
    char* from[COUNT];
    char* to[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        unsigned unit = item.first + i + k * blockDim.x;
        const long long at = offset_of(item.part, unit);
        char* cell = field + at;
        char* there = other + (SCATTERS ? offset_of(*item.target, unit)
                                        : static_cast<long long>(unit) * packed_unit(item.part));
        from[k] = !SCATTERS && item.kind == UNPACK ? there : cell;
        to[k] = !SCATTERS && item.kind == UNPACK ? cell : there;
        if (SLIDING && at < 0) from[k] = to[k] = nullptr;
    }
#ifdef WIRE
    if (item.part.unit == 8) copy_numbers<double, COUNT, SCATTERS>(item.kind, from, to);
    else copy_numbers<float, COUNT, SCATTERS>(item.kind, from, to);
#else
    const bool zeroes = item.kind == PACK_AND_ZERO;
    switch (item.part.unit) {
        case 16: copy_units<uint4, uint4, COUNT>(from, to, zeroes); break;
        case 8: copy_units<unsigned long long, unsigned long long, COUNT>(from, to, zeroes); break;
        case 4: copy_units<unsigned, unsigned, COUNT>(from, to, zeroes); break;
        case 2: copy_units<unsigned short, unsigned short, COUNT>(from, to, zeroes); break;
        default: copy_units<unsigned char, unsigned char, COUNT>(from, to, zeroes);
    }
#endif
}

// Wide units in one row with equal steps, as most large faces are: no division finds them, and more
// of them are in flight.
__device__ __forceinline__ bool is_row(const Part& part) {
    return part.axes == 1 && part.along < 0 && part.unit >= MIN_ROW_UNIT;
}

struct Row {
    char* at; // the cell of this thread
    long long step;
};

__device__ __forceinline__ Row row_of(const Part& part, char* field, unsigned first) {
    return {field + part.first + part.step[0] * (first + threadIdx.x), part.step[0]};
}

template <class From, class To, bool ADDS = false>
__device__ __forceinline__ void copy_row(Row from, Row to, unsigned nunits, bool zeroes = false) {
    const unsigned stride = blockDim.x;
    const long long from_step = from.step * stride, to_step = to.step * stride;
    unsigned i = threadIdx.x;
    for (; i + (ROW_DEPTH - 1) * stride < nunits; i += ROW_DEPTH * stride) {
        From unit[ROW_DEPTH];
#pragma unroll
        for (int k = 0; k < ROW_DEPTH; ++k)
            unit[k] = *reinterpret_cast<From*>(from.at + k * from_step);
        if constexpr (ADDS) {
#pragma unroll
            for (int k = 0; k < ROW_DEPTH; ++k)
                unit[k] = *reinterpret_cast<To*>(to.at + k * to_step) + unit[k];
        }
#pragma unroll
        for (int k = 0; k < ROW_DEPTH; ++k)
            *reinterpret_cast<To*>(to.at + k * to_step) = carried<To>(unit[k]);
#pragma unroll
        for (int k = 0; ADDING && zeroes && k < ROW_DEPTH; ++k)
            *reinterpret_cast<From*>(from.at + k * from_step) = From();
        from.at += ROW_DEPTH * from_step;
        to.at += ROW_DEPTH * to_step;
    }
#pragma unroll 1
    for (; i < nunits; i += stride, from.at += from_step, to.at += to_step) {
        From unit = *reinterpret_cast<From*>(from.at);
        if constexpr (ADDS) unit = *reinterpret_cast<To*>(to.at) + unit;
        *reinterpret_cast<To*>(to.at) = carried<To>(unit);
        if (ADDING && zeroes) *reinterpret_cast<From*>(from.at) = From();
    }
}

#ifdef WIRE
template <class Number, bool SCATTERS>
__device__ __forceinline__ void copy_row_of(const Item& item, Row from, Row to) {
    if (SCATTERS) copy_row<Number, Number>(from, to, item.nunits);
    else if (item.kind == UNPACK) copy_row<Wire, Number>(from, to, item.nunits);
    else copy_row<Number, Wire>(from, to, item.nunits);
}
#endif

template <bool SCATTERS>
__device__ __forceinline__ void copy_rows(const Item& item, Row cells, Row other) {
    const Row from = item.kind == UNPACK ? other : cells, to = item.kind == UNPACK ? cells : other;
#ifdef WIRE
    if (item.part.unit == 8) copy_row_of<double, SCATTERS>(item, from, to);
    else copy_row_of<float, SCATTERS>(item, from, to);
#else
    const bool zeroes = ADDING && item.kind == PACK_AND_ZERO;
    if (item.part.unit == 16) copy_row<uint4, uint4>(from, to, item.nunits, zeroes);
    else copy_row<unsigned long long, unsigned long long>(from, to, item.nunits, zeroes);
#endif
}

template <bool SCATTERS>
__device__ __forceinline__ void copy_cells(const Item& item, char* field, char* other) {
    unsigned i = threadIdx.x;
    if (DEPTH > 1)
        for (; i + (DEPTH - 1) * blockDim.x < item.nunits; i += DEPTH * blockDim.x)
            copy_units_of<DEPTH, SCATTERS>(item, field, other, i);
    for (; i < item.nunits; i += blockDim.x) copy_units_of<1, SCATTERS>(item, field, other, i);
}

// Stores an item into the cells `item.target` of a field. Apart from the code of most copies.
__device__ __noinline__ void scatter_item(const Item& item, char* field, char* into) {
    if (is_row(item.part) && is_row(*item.target))
        copy_rows<true>(item, row_of(item.part, field, item.first),
                        row_of(*item.target, into, item.first));
    else copy_cells<true>(item, field, into);
}

// Only plans that transpose have the code for it.
#if TILED
#include "tiles.cuh"
#endif
#if SCALED
#include "scaled.cuh"
#endif

__device__ __forceinline__ void move_item(const Item& item, const Fields& fields, char* packed) {
    char* field = fields.at[item.part.field];
#if TILED
    if (item.log_columns && item.kind == LOCAL)
        return copy_tiles(item, field, fields.at[item.target->field]);
    if (item.log_columns) return copy_tiles(item, packed, field);
#endif
    if (item.kind == LOCAL) return scatter_item(item, field, fields.at[item.target->field]);
    if (is_row(item.part) && (ADDING || item.kind != PACK_AND_ZERO)) {
        const long long unit = packed_unit(item.part);
        const Row other = {packed + unit * (item.first + threadIdx.x), unit};
        return copy_rows<false>(item, row_of(item.part, field, item.first), other);
    }
    copy_cells<false>(item, field, packed);
}

__device__ void copy_item(const Item& item, const Fields& fields, char* packed) {
    move_item(item, fields, packed);
#if SCALED
    if (is_scaled(item)) {
        const Part& part = item.kind == LOCAL ? *item.target : item.part;
        scale_cells(item, part, fields.at[part.field], item.first, item.nunits);
    }
#endif
}
