// Routes copy, pinned and mpi: streams and the host wait for other ranks, these kernels never do.
#include "work_items.cuh"
#include "epochs.cuh"

__device__ __forceinline__ void copy_items(
    const Fields& fields, const Item* items, unsigned count, Word epoch
) {
    for (unsigned i = blockIdx.x; i < count; i += gridDim.x)
        copy_item(items[i], fields, packed_of(items[i], epoch));
}

// An exchange has a launch or more of each kind: the later ones leave the epochs as they are.
extern "C" __global__ void __launch_bounds__(512) pack(
    const __grid_constant__ Fields fields, const Item* items, unsigned count, Epochs* epochs,
    volatile Word* begun
) {
    copy_items(fields, items, count, begin_epoch(epochs, begun));
}

extern "C" __global__ void __launch_bounds__(512) unpack(
    const __grid_constant__ Fields fields, const Item* items, unsigned count, Epochs* epochs,
    volatile Word* done
) {
    const Word epoch = end_epoch(epochs);
    copy_items(fields, items, count, epoch);
    publish_epoch(epochs, done, epoch);
}

template <class Number>
__device__ void sum(const Item& item, const Fields& fields, const char* from) {
    char* field = fields.at[item.part.field];
    for (unsigned i = threadIdx.x; i < item.nunits; i += blockDim.x) {
        unsigned unit = item.first + i;
        const long long at = offset_of(item.part, unit);
        if (SLIDING && at < 0) continue;
        Number& cell = *reinterpret_cast<Number*>(field + at);
        const char* packed = from + offset_of(*item.target, unit);
        cell = static_cast<Number>(cell + packed_number<Number>(packed));
    }
}

// Adds packed cells to a field. No cell is named twice in a launch, and messages have launches of
// their own: so the order of the sums is fixed. The last one ends the epoch, and is given `done`.
extern "C" __global__ void __launch_bounds__(512) add(
    const __grid_constant__ Fields fields, const Item* items, unsigned count, Epochs* epochs,
    volatile Word* done
) {
    const Word epoch = done ? end_epoch(epochs) : epochs->begun;
    for (unsigned i = blockIdx.x; i < count; i += gridDim.x) {
        const Item& item = items[i];
#if SCALED
        if (is_scaled(item)) {
            char* packed = packed_of(item, epoch);
            scale_units(factors_of(item), nullptr, item.part.unit, packed, item.first, item.nunits);
            __syncthreads();
        }
#endif
#define CASE(element, Number) \
    case element: sum<Number>(item, fields, packed_of(item, epoch)); break;
        switch (SCALED ? item.element & 255 : item.element) { EACH_ADDED(CASE) }
#undef CASE
    }
    if (done) publish_epoch(epochs, done, epoch);
}
