// Numbers that travel as WIRE, one type for all of a plan: plans/wire.py has the rule. In fields they
// have 8 or 4 bytes, and are the units of parts.

// To odd: a float that is not exact is no tie, so that a narrower number of it is rounded once.
__device__ __forceinline__ float to_odd(double wide) {
    const float single = __double2float_rz(wide);
    return single == wide ? single : __uint_as_float(__float_as_uint(single) | 1);
}
__device__ __forceinline__ float to_odd(float wide) { return wide; }

template <class Number>
__device__ __forceinline__ void round_to(Number wide, float* narrow) { *narrow = wide; }
template <class Number, class Format>
__device__ __forceinline__ void round_to(Number wide, Narrow<Format>* narrow) {
    *narrow = Narrow<Format>::of(to_odd(wide));
}
__device__ __forceinline__ float widened(float number) { return number; }
template <class Format>
__device__ __forceinline__ float widened(Narrow<Format> number) { return number.value(); }

struct Wire {
    WIRE number;

    Wire() = default;
    template <class Number>
    __device__ __forceinline__ explicit Wire(Number wide) { round_to(wide, &number); }
    template <class Number>
    __device__ __forceinline__ explicit operator Number() const {
        return static_cast<Number>(widened(number));
    }
};

const int ROW_DEPTH = 4, MIN_ROW_UNIT = 4;

__device__ __forceinline__ int packed_unit(const Part&) { return sizeof(Wire); }

template <class To, class From>
__device__ __forceinline__ To carried(From unit) { return static_cast<To>(Wire(unit)); }

// Of the numbers that are added, those of such fields.
template <class Number>
__device__ __forceinline__ Number packed_number(const char* packed) {
    if constexpr (sizeof(Number) < 4) return Number();
    else return static_cast<Number>(*reinterpret_cast<const Wire*>(packed));
}
