// Routes copy, pinned and mpi: streams and the host wait for other ranks, these kernels never do.
#include "work_items.cuh"
#include "numbers.cuh"

// Packs or unpacks. A pack also counts the exchanges that this rank's GPU has begun.
extern "C" __global__ void streamed(
    const __grid_constant__ Fields fields, const Item* items, unsigned count,
    unsigned long long* launches, volatile unsigned long long* started
) {
    if (started && blockIdx.x == 0 && threadIdx.x == 0) *started = ++*launches;
    for (unsigned i = blockIdx.x; i < count; i += gridDim.x)
        copy_item(items[i], fields, items[i].packed);
}

template <class Number>
__device__ void sum(const Item& item, const Fields& fields) {
    char* field = fields.at[item.part.field];
    for (unsigned i = threadIdx.x; i < item.nunits; i += blockDim.x) {
        unsigned unit = item.first + i;
        Number& cell = *reinterpret_cast<Number*>(field + offset_of(item.part, unit));
        const char* packed = item.packed + offset_of(*item.target, unit);
        cell = static_cast<Number>(cell + *reinterpret_cast<const Number*>(packed));
    }
}

// Adds packed cells to a field. No cell is named twice in a launch, and messages have launches of
// their own: so the order of the sums is fixed.
extern "C" __global__ void add(
    const __grid_constant__ Fields fields, const Item* items, unsigned count
) {
    for (unsigned i = blockIdx.x; i < count; i += gridDim.x) {
        const Item& item = items[i];
#define CASE(element, Number) \
    case element: sum<Number>(item, fields); break;
        switch (item.element) { EACH_ADDED(CASE) }
    }
}
