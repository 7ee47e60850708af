// The places of parts that slide, found anew before each exchange: rings.py has the same in Python.
#ifndef NSHIFTS
#define NSHIFTS 1
#endif

// A number of the call: its value, or where it is in GPU memory, and its bytes there.
struct Shifts {
    struct {
        long long value;
        const void* at;
        long long nbytes;
    } of[NSHIFTS];

    __device__ __forceinline__ long long operator[](int number) const {
        const auto& each = of[number];
        if (!each.at) return each.value;
        return each.nbytes == 4 ? *static_cast<const int*>(each.at)
                                : *static_cast<const long long*>(each.at);
    }
};

struct Slide {
    long long* places;
    long long start, length, wanted, first, extent;
    int shift, is_source;
    long long room; // for places
};
static_assert(sizeof(Slide) == Slide_nbytes, "size of Slide");

// A block for each part.
extern "C" __global__ void slides(const __grid_constant__ Shifts shifts, const Slide* slides) {
    const Slide slide = slides[blockIdx.x];
    // Both are cut to a lap first, so that no sum overflows.
    long long place = (slide.start + shifts[slide.shift] % slide.length) % slide.length;
    if (place < 0) place += slide.length;
    const long long begin = max(0ll, slide.first - place);
    const long long end = min(slide.wanted, slide.first + slide.extent - place);
    const long long own = slide.is_source ? place + begin - slide.first : begin;
    for (long long i = threadIdx.x; i < slide.room; i += blockDim.x)
        slide.places[i] = i < end - begin ? own + i : -1;
}
