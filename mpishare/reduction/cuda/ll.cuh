// LL, as in NCCL: each 64-bit word carries 32 bits of data and 32 bits of the epoch, so that the
// reader needs no fence. Relaxed and of system scope; two words are stored at once, but each stands
// for itself.

// 64-bit words of an element.
const int WORDS = sizeof(Number) > 4 ? sizeof(Number) / 4 : 1;

struct LL {
    unsigned data[WORDS];
};

__device__ __forceinline__ LL split(Number number) {
    LL words = {};
    memcpy(&words, &number, sizeof number);
    return words;
}

__device__ __forceinline__ Number joined(const LL& words) {
    Number number;
    memcpy(&number, &words, sizeof number);
    return number;
}

__device__ __forceinline__ void put_ll(Word* to, const LL& words, Word flag) {
    if constexpr (WORDS == 1) {
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(flag | words.data[0])
                     : "memory");
    } else {
#pragma unroll
        for (int k = 0; k < WORDS; k += 2)
            asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to + k),
                         "l"(flag | words.data[k]), "l"(flag | words.data[k + 1])
                         : "memory");
    }
}

// Returns whether all words are those of the epoch.
__device__ __forceinline__ bool get_ll(const Word* from, LL& words, Word flag) {
    Word seen[WORDS], differs = 0;
    if constexpr (WORDS == 1) {
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen[0]) : "l"(from) : "memory");
    } else {
#pragma unroll
        for (int k = 0; k < WORDS; k += 2)
            asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                         : "=l"(seen[k]), "=l"(seen[k + 1]) : "l"(from + k) : "memory");
    }
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {
        words.data[k] = static_cast<unsigned>(seen[k]);
        differs |= seen[k] ^ flag;
    }
    return differs >> 32 == 0;
}
