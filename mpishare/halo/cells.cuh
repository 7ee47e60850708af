// Cells of fields, and what is done with them. Every table is written by tables.py.
#ifndef NFIELDS
#define NFIELDS 1
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

enum Kind { PUSH, PUSH_AND_ZERO, LOCAL, PULL };

// Some units of a part, and where they lie packed.
struct Item {
    char* packed;       // of the first unit of the part, at even epochs
    long long turn;     // from there to where they lie at odd epochs
    unsigned long long* flag; // raised to the epoch once the units are there
    unsigned first;
    unsigned count;
    int part;
    int target;         // LOCAL: the part that they go to; where they are summed: the packed cells
    int kind;
    int element;        // how the units are added
};

struct Fields {
    char* at[NFIELDS];
};

// What stays from one launch to the next.
struct State {
    unsigned long long epoch;
    unsigned tickets;
    unsigned done;
};

__device__ __forceinline__ long long place_of(const Part& part, unsigned unit) {
    long long at = part.first;
    for (int axis = part.axes - 1; axis >= 0; --axis) {
        unsigned rest = axis ? unit / part.extent[axis] : 0;
        unsigned here = unit - rest * part.extent[axis];
        unit = rest;
        at += part.step[axis] * (axis == part.along ? part.places[here] : here);
    }
    return at;
}

template <class Unit>
__device__ void move(const Item& item, const Part* parts, const Fields& fields, char* packed) {
    const Part& part = parts[item.part];
    const Part& target = parts[item.target];
    char* field = fields.at[part.field];
    Unit* there = reinterpret_cast<Unit*>(packed);
    for (unsigned i = threadIdx.x; i < item.count; i += blockDim.x) {
        unsigned unit = item.first + i;
        Unit* cell = reinterpret_cast<Unit*>(field + place_of(part, unit));
        if (item.kind == PULL) {
            *cell = there[unit];
        } else if (item.kind == LOCAL) {
            *reinterpret_cast<Unit*>(field + place_of(target, unit)) = *cell;
        } else {
            there[unit] = *cell;
            if (item.kind == PUSH_AND_ZERO) *cell = Unit();
        }
    }
}

__device__ void carry(const Item& item, const Part* parts, const Fields& fields, char* packed) {
    switch (parts[item.part].unit) {
        case 16: move<uint4>(item, parts, fields, packed); break;
        case 8: move<unsigned long long>(item, parts, fields, packed); break;
        case 4: move<unsigned>(item, parts, fields, packed); break;
        case 2: move<unsigned short>(item, parts, fields, packed); break;
        default: move<unsigned char>(item, parts, fields, packed);
    }
}
