/* Cells between two places in memory, by loops over their strides: copied, or added. */

#ifndef MPISHARE_COPY_H
#define MPISHARE_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One loop: `count` steps of so many bytes at either end, or to the places in a table. The innermost
 * may have the bytes at each place, instead of as many at all. */
typedef struct {
    int64_t count;
    int64_t to, from;
    const int64_t *to_at, *from_at, *nbytes_at;
} Axis;

typedef struct Copy Copy;

/* What is done with `run` bytes of a copy at each place of the innermost loop. */
typedef void (*Line)(const Copy *copy, const Axis *axis, char *to, const char *from);

void copy_line(const Copy *copy, const Axis *axis, char *to, const char *from);
/* Doubles, rounded. */
void single_line(const Copy *copy, const Axis *axis, char *to, const char *from);

/* How elements of a dtype are added: one by one, or as pairs of numbers. */
typedef struct {
    const char *name;
    Line line, scaled;
    size_t number_nbytes, element_nbytes;
} Adding;

/* NULL for a name of no such dtype. */
const Adding *find_adding(const char *name);

/* What elements are multiplied by, and what is added, before they are stored or added. */
enum { MAX_ELEMENT = 16 };
typedef struct {
    bool scales, offsets, adds;
    char scale[MAX_ELEMENT], offset[MAX_ELEMENT]; /* each an element */
} Factors;

/* `run` bytes at each place of the loops, the slowest first; `to` and `from` are offsets. */
struct Copy {
    Line line;
    bool takes; /* what was read is zero afterwards */
    size_t run;
    int64_t to, from;
    int naxes;
    Axis *axes;
    Factors *factors; /* NULL: none */
    /* Of a loop whose count is known at each call, and what is added to both offsets then. */
    const int64_t *slide; /* NULL: none */
    int sliding;
};

void move_cells(const Copy *copy, char *to, char *from);

#endif
