// StridedCells of fields, and what is done with them. Every table is written by work_items.py.
#ifndef NFIELDS
#define NFIELDS 1
#endif
// Units that a thread has on their way at once. More than one pays where ranks share a GPU and each
// has few blocks; many blocks keep memory busy by themselves.
#ifndef DEPTH
#define DEPTH 1
#endif

// The cells of one field that go with one message, in the order in which they travel: units of
// `unit` bytes, the last axis fastest.
struct Part {
    long long first;         // bytes from the field's first element
    long long step[8];       // bytes along each axis
    const long long* places; // which steps along the axis `along`, if that is not -1
    unsigned extent[8];
    int axes;
    int along;
    int field;
    int unit;
};

enum Kind { PACK, PACK_AND_ZERO, LOCAL, UNPACK, PUT_LL, GET_LL };

// Some units of a part, and where they lie packed. The part stands in it, so that one look at
// memory brings all of it.
struct __align__(16) Item {
    Part part;
    char* packed;             // of the first unit of the part, at even epochs
    long long turn;           // from there to where they lie at odd epochs
    unsigned long long* flag; // PACK, UNPACK: raised to the epoch once the units are there
    unsigned long long* late; // UNPACK, GET_LL: the host's word for who is waited for
    const Part* target;       // LOCAL: what they go to; where they are summed: the packed cells
    unsigned first;
    unsigned count;
    int kind;
    int element;              // how the units are summed
    long long unused;         // whole 16 bytes
};

struct Fields {
    char* at[NFIELDS];
};

// Not unrolled, which would make the kernels six times as large and no faster.
__device__ __forceinline__ long long place_of(const Part& part, unsigned unit) {
    long long at = part.first;
#pragma unroll 1
    for (int axis = part.axes - 1; axis >= 0; --axis) {
        unsigned rest = axis ? unit / part.extent[axis] : 0;
        unsigned here = unit - rest * part.extent[axis];
        unit = rest;
        at += part.step[axis] * (axis == part.along ? part.places[here] : here);
    }
    return at;
}

template <class Unit, int COUNT>
__device__ __forceinline__ void move_units(char* const* from, char* const* to, bool zeroes) {
    Unit unit[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) unit[k] = *reinterpret_cast<Unit*>(from[k]);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        *reinterpret_cast<Unit*>(to[k]) = unit[k];
        if (zeroes) *reinterpret_cast<Unit*>(from[k]) = Unit();
    }
}

// One thread's units i, i + blockDim.x, ... of an item.
template <int COUNT>
__device__ __forceinline__ void move(const Item& item, char* field, char* packed, unsigned i) {
    char* from[COUNT];
    char* to[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        unsigned unit = item.first + i + k * blockDim.x;
        char* cell = field + place_of(item.part, unit);
        char* other = item.kind == LOCAL ? field + place_of(*item.target, unit)
                                         : packed + static_cast<long long>(unit) * item.part.unit;
        from[k] = item.kind == UNPACK ? other : cell;
        to[k] = item.kind == UNPACK ? cell : other;
    }
    const bool zeroes = item.kind == PACK_AND_ZERO;
    switch (item.part.unit) {
        case 16: move_units<uint4, COUNT>(from, to, zeroes); break;
        case 8: move_units<unsigned long long, COUNT>(from, to, zeroes); break;
        case 4: move_units<unsigned, COUNT>(from, to, zeroes); break;
        case 2: move_units<unsigned short, COUNT>(from, to, zeroes); break;
        default: move_units<unsigned char, COUNT>(from, to, zeroes);
    }
}

__device__ void carry(const Item& item, const Fields& fields, char* packed) {
    char* field = fields.at[item.part.field];
    unsigned i = threadIdx.x;
    if (DEPTH > 1)
        for (; i + (DEPTH - 1) * blockDim.x < item.count; i += DEPTH * blockDim.x)
            move<DEPTH>(item, field, packed, i);
    for (; i < item.count; i += blockDim.x) move<1>(item, field, packed, i);
}
