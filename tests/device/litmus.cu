// Litmus tests of the memory model of mpishare.cuh, a block of each rank. Each counts outcomes that
// must not be.
#include <mpishare.cuh>
using namespace mpishare;

__device__ void set(const Device& d, int peer, int slot, Word value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(detail::theirs(d, peer, slot)), "l"(value) : "memory");
}

__device__ bool comes(const Device& d, int peer, int slot, Word value) {
    detail::Wait waiting(d, peer);
    while (true) {
        Word seen;
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(detail::mine(d, peer, slot)) : "memory");
        if (seen >= value) return waiting.end(true);
        if (!waiting.goes_on()) return waiting.end(false);
    }
}

__device__ unsigned load(const unsigned* from) {
    unsigned seen;
    asm volatile("ld.weak.global.u32 %0, [%1];" : "=r"(seen) : "l"(from) : "memory");
    return seen;
}

__device__ void store(unsigned* to, unsigned value) {
    asm volatile("st.weak.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

const int LINES = 64, APART = 1056; // places in other cache lines, on other pages now and then

// Message passing: many words, then a signal; who has the signal has the words. The reader has old
// words in its L1 cache, and answers by a signal that the tested order is no part of.
extern "C" __global__ void message(Device d, long long rounds, unsigned long long* wrong) {
    const Word launch = epoch(d, 0);
    const int to = (d.rank + 1) % d.size, from = (d.rank + d.size - 1) % d.size;
    for (long long k = 1; k <= rounds; ++k) {
        const Word number = (launch - 1) * rounds + k;
        for (int i = 0; i < LINES; ++i) store(at<unsigned>(d, to, i * APART), number);
        set(d, to, 1, number);
        if (!comes(d, from, 1, number)) return;
        unsigned old = 0;
        for (int i = LINES - 1; i >= 0; --i)
            old += load(at<unsigned>(d, d.rank, i * APART)) != static_cast<unsigned>(number);
        if (old) atomicAdd(wrong, 1ULL);
        signal(d, from, 2, number);
        if (!wait(d, to, 2, number)) return;
    }
}

// The reuse of a slot: one buffer; the reader's answer must not overtake its reads, nor the next
// message the answer.
extern "C" __global__ void reuse(Device d, long long rounds, unsigned long long* wrong) {
    const Word launch = epoch(d, 0);
    const int to = (d.rank + 1) % d.size, from = (d.rank + d.size - 1) % d.size;
    for (long long k = 1; k <= rounds; ++k) {
        const Word number = (launch - 1) * rounds + k;
        if (number > 1 && !comes(d, to, 2, number - 1)) return;
        for (int i = 0; i < LINES; ++i) store(at<unsigned>(d, to, i * APART), number);
        set(d, to, 1, number);
        if (!comes(d, from, 1, number)) return;
        unsigned other = 0;
        for (int i = 0; i < LINES; ++i)
            other += load(at<unsigned>(d, d.rank, i * APART)) != static_cast<unsigned>(number);
        if (other) atomicAdd(wrong, 1ULL);
        set(d, from, 2, number);
    }
}

// Store buffering between ranks 0 and 1: each stores at the other, then looks at its own word. At
// least one sees the other's, if a fence is between. Ranks meet before and after by barriers.
extern "C" __global__ void buffering(Device d, long long rounds, unsigned long long* wrong) {
    const Word launch = epoch(d, 0);
    const int peer = d.rank ^ 1;
    const bool plays = d.rank < 2 && d.size > 1;
    for (long long k = 1; k <= rounds; ++k) {
        const unsigned number = static_cast<unsigned>((launch - 1) * rounds + k);
        unsigned seen = 0;
        if (!barrier<mpishare::thread>(d, 3)) return;
        if (plays) {
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at<unsigned>(d, peer, 0)),
                         "r"(number) : "memory");
            __threadfence_system();
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
                         : "=r"(seen) : "l"(at<unsigned>(d, d.rank, 0)) : "memory");
            *at<volatile unsigned>(d, 0, APART + d.rank) = seen == number;
        }
        if (!barrier<mpishare::thread>(d, 3)) return;
        if (d.rank == 0 && d.size > 1) {
            const bool one = *at<volatile unsigned>(d, 0, APART);
            const bool other = *at<volatile unsigned>(d, 0, APART + 1);
            if (!one && !other) atomicAdd(wrong, 1ULL);
        }
    }
}
