/* Exact sums: see exact.c. */

#ifndef MPISHARE_EXACT_H
#define MPISHARE_EXACT_H

#include "module.h"

/* Folds of reduce.c: the correctly rounded sums of the elements of all ranks. */
void fold_exact_float64(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count);
void fold_exact_float32(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count);
void fold_exact_bfloat16(void *into, void *const *from, Py_ssize_t nranks, Py_ssize_t count);

#endif
