/* What the files of this extension module know of each other. */

#ifndef MPISHARE_MODULE_H
#define MPISHARE_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The address of the bytes of a writable buffer, such as a memoryview of shared memory. */
PyObject *address_of(PyObject *module, PyObject *buffer);

/* Whether the reduction of small fields knows an operation. */
PyObject *can_reduce(PyObject *module, PyObject *operation);

extern PyTypeObject ExchangeType, FenceType, ReduceType;

#endif
