// Routes copy, pinned and mpi: streams and the host wait for other ranks, these kernels never do.
#include "work_items.cuh"

// Packs or unpacks. A pack also counts the exchanges that this rank's GPU has begun.
extern "C" __global__ void streamed(
    const __grid_constant__ Fields fields, const Item* items, unsigned count,
    unsigned long long* launches, volatile unsigned long long* started
) {
    if (started && blockIdx.x == 0 && threadIdx.x == 0) *started = ++*launches;
    for (unsigned i = blockIdx.x; i < count; i += gridDim.x)
        copy_item(items[i], fields, items[i].packed);
}

enum Element { INT1, INT2, INT4, INT8, HALF, FLOAT, DOUBLE };

template <class Number>
__device__ void sum(const Item& item, const Fields& fields) {
    char* field = fields.at[item.part.field];
    for (unsigned i = threadIdx.x; i < item.nunits; i += blockDim.x) {
        unsigned unit = item.first + i;
        *reinterpret_cast<Number*>(field + offset_of(item.part, unit)) +=
            *reinterpret_cast<const Number*>(item.packed + offset_of(*item.target, unit));
    }
}

struct Half {
    unsigned short bits;
    __device__ float value() const {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
        return wide;
    }
    // Rounded once: the sum of two halves is exact in a float.
    __device__ void operator+=(const Half& other) {
        float wide = value() + other.value();
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
    }
};

// Adds packed cells to a field. No cell is named twice in a launch, and messages have launches of
// their own: so the order of the sums is fixed.
extern "C" __global__ void add(
    const __grid_constant__ Fields fields, const Item* items, unsigned count
) {
    for (unsigned i = blockIdx.x; i < count; i += gridDim.x) {
        const Item& item = items[i];
        switch (item.element) {
            case INT1: sum<unsigned char>(item, fields); break;
            case INT2: sum<unsigned short>(item, fields); break;
            case INT4: sum<unsigned>(item, fields); break;
            case INT8: sum<unsigned long long>(item, fields); break;
            case HALF: sum<Half>(item, fields); break;
            case FLOAT: sum<float>(item, fields); break;
            default: sum<double>(item, fields);
        }
    }
}
