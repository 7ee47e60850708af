/* Copies of boxes of cells between two places in memory, by their strides. */

#ifndef MPISHARE_COPY_H
#define MPISHARE_COPY_H

#include <stddef.h>
#include <stdint.h>

/* One loop: `count` steps of so many bytes at either end, or to the places in a table. */
typedef struct {
    int64_t count;
    int64_t to, from;
    const int64_t *to_at, *from_at;
} Axis;

/* `run` bytes at each place of the loops, the slowest first; `to` and `from` are offsets. */
typedef struct {
    size_t run;
    int64_t to, from;
    int naxes;
    const Axis *axes;
} Copy;

void copy_cells(const Copy *copy, char *to, const char *from);

#endif
