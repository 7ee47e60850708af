/* Cells between two places in memory, by loops over their strides: copied, added, or set to zero. */

#ifndef MPISHARE_COPY_H
#define MPISHARE_COPY_H

#include <stddef.h>
#include <stdint.h>

/* One loop: `count` steps of so many bytes at either end, or to the places in a table. The innermost
 * may have the bytes at each place, instead of as many at all. */
typedef struct {
    int64_t count;
    int64_t to, from;
    const int64_t *to_at, *from_at, *nbytes_at;
} Axis;

/* What is done with `run` bytes at each place of the innermost loop. */
typedef void (*Line)(const Axis *axis, size_t run, char *to, const char *from);

void copy_line(const Axis *axis, size_t run, char *to, const char *from);
void zero_line(const Axis *axis, size_t run, char *to, const char *from);
void single_line(const Axis *axis, size_t run, char *to, const char *from); /* doubles, rounded */

/* How elements of a dtype are added: one by one, or as pairs of numbers. */
typedef struct {
    const char *name;
    Line line;
    size_t number_nbytes;
} Adding;

/* NULL for a name of no such dtype. */
const Adding *find_adding(const char *name);

/* `run` bytes at each place of the loops, the slowest first; `to` and `from` are offsets. */
typedef struct {
    Line line;
    size_t run;
    int64_t to, from;
    int naxes;
    const Axis *axes;
} Copy;

void move_cells(const Copy *copy, char *to, const char *from);

#endif
