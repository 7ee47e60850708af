/* What the files of this extension module know of each other. */

#ifndef MPISHARE_MODULE_H
#define MPISHARE_MODULE_H

/* One build for every Python from 3.11 on, the first whose stable ABI has buffers. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The address of the bytes of a writable buffer, such as a memoryview of shared memory. */
PyObject *address_of(PyObject *module, PyObject *buffer);

/* Whether the reduction of small fields knows an operation. */
PyObject *can_reduce(PyObject *module, PyObject *operation);
PyObject *fold_elements(PyObject *module, PyObject *given);

/* Exact sums, of a process and rounded. */
PyObject *add_exactly(PyObject *module, PyObject *given);
PyObject *round_exactly(PyObject *module, PyObject *given);

/* Describes what a call is given. */
PyObject *describe(PyObject *module, PyObject *given);

/* Copies rows of columns, and looks at columns. */
PyObject *move_rows(PyObject *module, PyObject *given);
PyObject *count_rows(PyObject *module, PyObject *given);

/* Reads an attribute by a name that is made once: to make it takes as long as to look it up. */
static inline PyObject *attribute(PyObject *owner, PyObject **name, const char *text)
{
    if (*name == NULL && (*name = PyUnicode_InternFromString(text)) == NULL)
        return NULL;
    return PyObject_GetAttr(owner, *name);
}

/* Ends the life of an object whose own memory is freed. */
static inline void free_object(void *object)
{
    PyTypeObject *type = Py_TYPE((PyObject *)object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

extern PyType_Spec exchange_spec, fence_spec, reduce_spec;

#endif
