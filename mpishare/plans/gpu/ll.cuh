// LL, as in NCCL: each 64-bit word carries 32 bits of data and 32 bits of the epoch, so that the
// reader needs no fence. Relaxed and of system scope; two words are stored at once, but each stands
// for itself.
#include "wait.cuh"

// The words of a value of up to 4 bytes, or of a multiple of 8. `flag` has the epoch in its upper
// half, and zeros in the lower.
template <class T>
struct LL {
    static const int COUNT = sizeof(T) > 4 ? sizeof(T) / 4 : 1;
    unsigned data[COUNT];

    static __device__ __forceinline__ LL of(T value) {
        LL words = {};
        memcpy(&words, &value, sizeof value);
        return words;
    }
    __device__ __forceinline__ T value() const {
        T found;
        memcpy(&found, data, sizeof found);
        return found;
    }
    __device__ __forceinline__ void put(Word* to, Word flag) const {
        if constexpr (COUNT == 1) {
            asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(flag | data[0])
                         : "memory");
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; k += 2)
                asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to + k),
                             "l"(flag | data[k]), "l"(flag | data[k + 1])
                             : "memory");
        }
    }
    // Returns whether all words are those of the epoch.
    __device__ __forceinline__ bool get(const Word* from, Word flag) {
        Word seen[COUNT], differs = 0;
        if constexpr (COUNT == 1) {
            asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen[0]) : "l"(from) : "memory");
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; k += 2)
                asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                             : "=l"(seen[k]), "=l"(seen[k + 1]) : "l"(from + k) : "memory");
        }
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            data[k] = static_cast<unsigned>(seen[k]);
            differs |= seen[k] ^ flag;
        }
        return differs >> 32 == 0;
    }
};
