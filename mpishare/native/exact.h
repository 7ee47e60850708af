/* Exact sums: see exact.c. */

#ifndef MPISHARE_EXACT_H
#define MPISHARE_EXACT_H

#include "module.h"
#include <stddef.h>

/* Adds the products of two rows, or the elements of x if y is NULL, to words (words.h). */
void add_exact(long long *words, const double *x, const double *y, size_t count, int is_portable);

/* Folds of reduce.c: the correctly rounded sums of the elements of all ranks. */
void fold_exact_float64(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count);
void fold_exact_float32(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count);
void fold_exact_bfloat16(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count);

#endif
