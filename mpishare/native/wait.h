/* Waits for words of shared memory: some looks, then the core is given away between looks, then
 * the caller goes back to Python, which watches deadlines and the life of other ranks. */

#ifndef MPISHARE_WAIT_H
#define MPISHARE_WAIT_H

#include "module.h"

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

/* Whether a number of looks can be waited with: -1 with an error if not. */
static inline int require_looks(int looks_per_yield)
{
    if (looks_per_yield > 0)
        return 0;
    PyErr_SetString(PyExc_ValueError, "at least one look comes before a yield");
    return -1;
}

typedef bool (*Done)(void *what);

/* Waits a little; false if it is not done after that. A wait that is not brief lets go of the GIL,
 * which the caller takes again: else the watchdog would stop this thread, for its own turn. */
static inline bool wait_a_little(Done is_done, void *what, int looks_per_yield,
                                 PyThreadState **released)
{
    for (int look = 0; look < BRIEF_LOOKS; look++) {
        if (is_done(what))
            return true;
        if (looks_per_yield == 1)
            break;
        relax();
    }
    if (*released == NULL)
        *released = PyEval_SaveThread();
    const int64_t begin = now_ns();
    do {
        for (int look = 0; look < looks_per_yield; look++) {
            if (is_done(what))
                return true;
            relax();
        }
        sched_yield();
    } while (now_ns() - begin < PATIENCE_NS);
    return is_done(what);
}

/* A word of shared memory that another rank raises to a value. */
typedef struct {
    const Word *word;
    uint64_t value;
} Awaited;

static inline bool is_raised(void *what)
{
    const Awaited *awaited = what;
    return load_acquire(awaited->word) >= awaited->value;
}

static inline bool wait_word(const Word *word, uint64_t value, int looks_per_yield)
{
    Awaited awaited = {word, value};
    PyThreadState *released = NULL;
    const bool has_come = wait_a_little(is_raised, &awaited, looks_per_yield, &released);
    if (released != NULL)
        PyEval_RestoreThread(released);
    return has_come;
}

#endif
