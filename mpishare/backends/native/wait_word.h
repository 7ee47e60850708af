/* One word of shared memory that another rank raises. */

#ifndef MPISHARE_WAIT_WORD_H
#define MPISHARE_WAIT_WORD_H

#include "module.h"
#include "wait.h"

/* Whether a number of looks can be waited with: -1 with an error if not. */
static inline int require_looks(int looks_per_yield)
{
    if (looks_per_yield > 0)
        return 0;
    PyErr_SetString(PyExc_ValueError, "at least one look comes before a yield");
    return -1;
}

/* Waits a little until a word has reached a value; false if it has not after that. */
static inline bool wait_word(const Word *word, uint64_t value, int looks_per_yield)
{
    for (int look = 0; look < BRIEF_LOOKS; look++) {
        if (load_acquire(word) >= value)
            return true;
        if (looks_per_yield == 1)
            break;
        relax();
    }
    bool has_come = false;
    const int64_t begin = now_ns();
    Py_BEGIN_ALLOW_THREADS /* else the watchdog would stop this thread, for its own turn */
        do {
            for (int look = 0; look < looks_per_yield && !has_come; look++) {
                has_come = load_acquire(word) >= value;
                relax();
            }
            if (has_come)
                break;
            sched_yield();
        } while (now_ns() - begin < PATIENCE_NS);
    Py_END_ALLOW_THREADS
    return has_come || load_acquire(word) >= value;
}

#endif
