/* Waits for words of shared memory: some looks, then the core is given away between looks, then
 * the caller goes back to Python, which watches deadlines and the life of other ranks. */

#ifndef MPISHARE_WAIT_H
#define MPISHARE_WAIT_H

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

typedef _Atomic uint64_t Word;

/* Looks with the GIL held: about the time in which a core answers a core. */
enum { BRIEF_LOOKS = 64 };
/* After this Python looks at the other ranks; far below any deadline. */
static const int64_t PATIENCE_NS = 1000000;

static inline uint64_t load_acquire(const Word *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static inline void store_release(Word *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

#endif
